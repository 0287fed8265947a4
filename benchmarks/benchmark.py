"""What all benchmarks share: options, clocks, a JSON record of what was measured, and a section of a page.

A benchmark is a module with a command, which measures, and ``SECTIONS``, which draw the records it wrote.
"""

import ctypes
import gc
import json
import re
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from prunus.files.json_file import read_json, write_json
from prunus.lab.study.tables import markdown_table, measured_on
from prunus.lab.tracking import commit, environment, machine, peak_memory, reset_peak_memory
from prunus.ops.machine import said_by_linux, wait_for
from prunus.schedule import check_sparsity

Row = dict[str, Any]
Measured = tuple[str, dict[str, Any], list[Row]]  # what was measured, settings, rows
Record = dict[str, Any]  # a JSON file
Result = TypeVar("Result")
QUEUED = 10  # calls that are queued on a GPU and timed together


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """Options of every benchmark."""

    threads: int = 0  # CPU threads; 0 leaves torch's choice
    results: Path = Path("benchmarks/results")  # folder of the JSON files

    @abstractmethod
    def measure(self) -> Measured: ...

    def run(self) -> None:
        """Check the options, measure, print the rows, and write them."""
        for name, value in ((option.name, getattr(self, option.name)) for option in fields(self)):
            if name == "sparsity":
                check_sparsity(value)
            elif isinstance(value, int | tuple) and not isinstance(value, bool):
                least = 0 if name == "threads" else 1
                numbers = value if isinstance(value, tuple) else (value,)
                if not numbers or min((n for n in numbers if isinstance(n, int)), default=least) < least:
                    raise ValueError(f"--{name} must be at least {least}, got {value}")
        if self.threads:
            torch.set_num_threads(self.threads)
        what, settings, rows = self.measure()
        columns = dict.fromkeys(name for row in rows for name in row)
        cells = [[row.get(name, "") for name in columns] for row in rows]
        print(
            markdown_table(
                list(columns), [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in line] for line in cells]
            )
        )
        print(f"written to {write_record(what, settings, rows, self.results)}")


def write_record(what: str, settings: dict[str, Any], rows: list[Row], folder: Path) -> Path:
    """Write a record and return its path."""
    path, record = new_record(what, settings, folder)
    write_json(path, record | {"rows": rows})
    return path


def new_record(what: str, settings: dict[str, Any], folder: Path) -> tuple[Path, Record]:
    """A record without rows, and its path: ``<what>-<weights>_<machine>_<date>_<commit>.json``."""

    def slug(text: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    folder.mkdir(parents=True, exist_ok=True)
    about, today = slug(f"{what} {settings.get('weights', '')}"), str(date.today())
    path = folder / f"{about}_{slug(machine())}_{today}_{commit() or 'installed'}.json"
    now = datetime.now().isoformat(timespec="seconds")
    record = {"what": what, "date": today, "began": now, "environment": environment(), "settings": settings}
    return path, record | {"rows": []}


def continued(path: Path, record: Record) -> Record:
    """The record that an interrupted run left at ``path``, or ``record``; ValueError where their settings differ."""
    if not path.is_file():
        return record
    before = read_json(path)
    for name, value in record["settings"].items():
        if (old := before["settings"].get(name)) != value:
            raise ValueError(f"{path} has {name} = {old}, not {value}; give another --results")
    return before


def made_on(device: torch.device, dtype: torch.dtype, make: Callable[[], Result]) -> Result:
    """What ``make`` returns, a model say, with random weights of a type that are made on the device."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            return make()
    finally:
        torch.set_default_dtype(before)


# Clocks and memory


def timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of a call that begins and ends with nothing under way on the device, and what it returned."""
    wait_for(device)
    started = time.perf_counter()
    result = work()
    wait_for(device)
    return time.perf_counter() - started, result


def median_ms(
    function: Callable[[], object], repeat: int, device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of ``repeat`` calls after one to warm up; ``before`` runs untimed ahead of each."""
    times: list[float] = []
    while len(times) <= repeat and (len(times) < 4 or sum(times) < 20):  # a slow rival is measured fewer times
        before()
        times.append(timed(queued(function, 1), device)[0])  # its result is freed within its time
    return 1e3 * statistics.median(times[1:])


@dataclass
class Turns:
    """Seconds of every call of one arm, those of all CPU cores, and what the last call returned."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    result: Any = None

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def in_turns(
    arms: Mapping[str, Callable[[], object]],
    repeat: int,
    device: torch.device,
    warm_up: int = 1,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Turns]:
    """Each arm ``repeat`` times after some calls to warm up, in turns: what else the machine does falls on all.

    ``after`` runs untimed behind each call.
    """
    turns = {name: Turns() for name in arms}
    for number in range(-warm_up, repeat):
        for name, arm in arms.items():
            cpu = time.process_time()
            seconds, turns[name].result = timed(arm, device)
            if number >= 0:
                turns[name].seconds.append(seconds)
                turns[name].cpu_seconds.append(time.process_time() - cpu)
            after()
    return turns


def overhead(arm: Turns, beside: Turns) -> float:
    """Median over rounds of the time that an arm took beyond another in the same round, as a fraction."""
    return statistics.median(ours / other - 1 for ours, other in zip(arm.seconds, beside.seconds, strict=True))


def queued(call: Callable[[], object], num: int = QUEUED) -> Callable[[], None]:
    """``num`` calls, one behind the other: what one costs where the host runs ahead of the GPU."""

    def calls() -> None:
        for _ in range(num):
            call()

    return calls


def copy_gb_s(device: torch.device) -> float | None:
    """Measured bandwidth of a large copy on a GPU, bytes read and written together."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * QUEUED * source.nbytes / median_ms(queued(lambda: target.copy_(source)), 4, device) / 1e6


def peak_extra_mib(function: Callable[[], object], device: torch.device, after: Callable[[], object]) -> float | None:
    """MiB that a call needs at its peak beyond what was allocated before it, its result included.

    On CUDA the allocator's own count; on Linux the process's largest resident size, which counts
    every temporary, numpy's too; None elsewhere. The least of three calls, each followed by ``after``:
    what else the process touches can only add. Builds of torch for ARM keep freed memory, which hides it from this
    count; the environment variable MIMALLOC_PURGE_DELAY=0 makes them return it.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu and said_by_linux("self/status", "VmHWM") is None:
        return None
    peaks = []
    for _ in range(3):
        gc.collect()
        if not on_gpu:
            ctypes.CDLL(None).malloc_trim(0)
        reset_peak_memory(device)
        base = torch.cuda.memory_allocated() if on_gpu else said_by_linux("self/status", "VmRSS") or 0
        timed(queued(function, 1), device)
        peaks.append((peak_memory(device) - base) / 2**20)
        after()
    return min(peaks)


# What a page draws of records

END = "<!-- end of figures -->"


def filled(text: str, parts: Mapping[str, str]) -> str:
    """``text`` with each part between its mark, ``<!-- NAME: written by ... -->``, and the next ``END``."""
    for name, part in parts.items():
        mark = re.compile(rf"(<!-- {name}: written by [^\n]* -->\n).*?({END})", re.DOTALL)
        if len(mark.findall(text)) != 1:
            raise ValueError(f"the page needs the lines <!-- {name}: written by ... --> and {END} once")
        text = mark.sub(lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text)
    return text


@dataclass(frozen=True)
class RecordTable:
    """Draws a record: where it was made, its settings, and a table of its rows.

    A column is ``heading: "key:format"``; a value that is missing or None is an empty cell. ``more`` gives further
    keys of a row, ``below`` a second table.
    """

    columns: Mapping[str, str]
    more: Callable[[Row, Record], Row] = lambda row, record: {}
    below: Callable[[Record], str] = lambda record: ""

    def __call__(self, record: Record) -> str:
        settings, made = record["settings"], record["environment"]
        origin = f"{measured_on(made)}; {record['date']}, commit {made['commit']}; `{record['file']}`"
        values = [
            f"{name.replace('_', ' ')} {value:{form}}"
            for name, value in settings.items()
            for kind, form in ((str, ""), (bool, ""), (int, ","), (float, ",.4g"))
            if type(value) is kind and name != "note"
        ]
        note = f"\n\n{settings['note']}" if "note" in settings else ""
        rows = [row | self.more(row, record) for row in record["rows"]]
        table = table_of(rows, self.columns) if self.columns else ""
        return f"{origin}\n\n{'; '.join(values)}{note}\n\n{table}{self.below(record)}\n"


def table_of(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    def cell(row: Row, column: str) -> str:
        key, _, form = column.partition(":")
        return "" if row.get(key) is None else format(row[key], form)

    return markdown_table(list(columns), [[cell(row, column) for column in columns.values()] for row in rows])


def all_records(folder: Path) -> list[Record]:
    """Every record of a folder with the name of its file, the oldest first."""
    found = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]
    found.sort(key=lambda each: (each[1]["date"], each[1].get("began", ""), each[0].name))
    return [record | {"file": path.name} for path, record in found]


def newest_records(folder: Path) -> list[Record]:
    """The newest record of each kind, machine and set of weights."""
    newest: dict[tuple[str, str, str], Record] = {}
    for record in all_records(folder):
        about = record["settings"].get("weights", "")
        newest[record["what"], record["environment"]["machine"], about] = record
    return [record for _, record in sorted(newest.items())]
