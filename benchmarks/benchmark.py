"""What all benchmarks share: options, a JSON record of what was measured, and a section of a page.

A benchmark is a module with a command, which measures, and ``SECTIONS``, which draw the records it wrote.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunus.export.huggingface import default_dtype
from prunus.files.json_file import write_json
from prunus.lab.study.tables import markdown_table, measured_on
from prunus.lab.tracking import commit, environment, machine

Row = dict[str, Any]
Measured = tuple[str, dict[str, Any], list[Row]]  # what was measured, settings, rows
Record = dict[str, Any]  # a JSON file
SPARSITY = 0.5  # that speeds are measured at


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
            if isinstance(value, int | tuple) and not isinstance(value, bool):
                least = 0 if name == "threads" else 1
                numbers = value if isinstance(value, tuple) else (value,)
                if not numbers or min((n for n in numbers if isinstance(n, int)), default=least) < least:
                    raise ValueError(f"--{name} must be at least {least}, got {value}")
        if self.threads:
            torch.set_num_threads(self.threads)
        what, settings, rows = self.measure()
        columns = [*dict.fromkeys(name for row in rows for name in row)]
        cells = [[row.get(name, "") for name in columns] for row in rows]
        lines = [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in line] for line in cells]
        print(markdown_table(columns, lines))
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


def random_llama(
    shape: Mapping[str, Any], blocks: int, size: tuple[int, int], device: torch.device, place: str = ""
) -> tuple[Any, Tensor]:
    """A random bfloat16 Llama that never ends a text, and random tokens (num, length); made on the device, then moved.

    Speed and memory depend on the values of weights as little as on the tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, num_hidden_layers=blocks, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16), device:
        model: Any = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model.to(place or device), torch.randint(0, config.vocab_size, size, device=device).to(place or device)


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

    ``more`` gives further keys of a row, ``below`` a second table.
    """

    columns: str  # of table_of
    more: Callable[[Row, Record], Row] = lambda row, record: {}
    below: Callable[[Record], str] = lambda record: ""

    def __call__(self, record: Record) -> str:
        settings = record["settings"]
        values = [
            f"{name.replace('_', ' ')} {value:{form}}"
            for name, value in settings.items()
            for kind, form in ((str, ""), (bool, ""), (int, ","), (float, ",.4g"))
            if type(value) is kind and name != "note"
        ]
        note = f"\n\n{settings['note']}" if "note" in settings else ""
        rows = [row | self.more(row, record) for row in record["rows"]]
        table = table_of(rows, self.columns) if self.columns else ""
        return f"{origin_of(record)}\n\n{'; '.join(values)}{note}\n\n{table}{self.below(record)}\n"


def origin_of(record: Record) -> str:
    """Machine, versions, day and file."""
    made = record["environment"]
    return f"{measured_on(made)}; {record['date']}, commit {made['commit']}; `{record['file']}`"


def table_of(rows: Sequence[Row], columns: str) -> str:
    """A Markdown table of columns ``heading = key:format``, apart by `` | ``.

    The heading may be left out where it is the key. Several keys stand in braces, as in ``{mean:.3f} to {most:.3f}``.
    A cell without one of its values is empty.
    """
    headings, cells = [], []
    for heading, _, cell in (column.rpartition(" = ") for column in columns.split(" | ")):
        headings.append(heading or cell.partition(":")[0])
        cells.append(cell if "{" in cell else f"{{{cell}}}")

    def drawn(row: Row, cell: str) -> str:
        return "" if any(row.get(key) is None for key in re.findall(r"{(\w+)", cell)) else cell.format(**row)

    return markdown_table(headings, [[drawn(row, cell) for cell in cells] for row in rows])


def all_records(folder: Path) -> list[Record]:
    """Every record of a folder with the name of its file, the oldest first."""
    found = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]
    found.sort(key=lambda each: (each[1]["date"], each[1].get("began", ""), each[0].name))
    return [record | {"file": path.name} for path, record in found]


def newest_records(folder: Path, what: str = "") -> list[Record]:
    """The newest record of each kind, or of one kind, for each machine and set of weights."""
    newest: dict[tuple[str, str, str], Record] = {}
    for record in (record for record in all_records(folder) if what in ("", record["what"])):
        about = record["settings"].get("weights", "")
        newest[record["what"], record["environment"]["machine"], about] = record
    return [record for _, record in sorted(newest.items())]
