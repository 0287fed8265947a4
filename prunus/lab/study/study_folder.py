"""The folder of a study: what was planned, what is finished, what failed, and which runs are claimed."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files.atomic import is_part, write_atomically
from ...files.json_file import is_deep, read_json, write_json
from ...files.lock import try_lock
from ..run_files import SLIM, RunFiles, slim_runs
from ..schema import CELL, is_number
from .study_plan import FORMAT, Cell, StudyPlan, canonical, extended, key_of

if TYPE_CHECKING:
    from torch import Tensor

MASKS = "masks.safetensors"
NUMBERS = "accuracy sparsity num_prunable num_asked tokens examples seconds".split()  # every result has them
QUALITIES = ("loss", "perplexity")  # null if the training diverged


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def exists(self) -> bool:
        return (self.path / "study.json").is_file()

    def run(self, cell: Cell) -> Path:
        return self.path / "runs" / cell.folder

    def plan(self) -> StudyPlan:
        path = self.path / "study.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is not a study: it has no study.json")
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {values.get('format')!r}; this version reads {FORMAT}")
        try:
            return StudyPlan.from_json(values)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def join(self, plan: StudyPlan, environment: Mapping[str, Any]) -> StudyPlan:
        """Write ``plan`` here, together with what is planned here already; returns both."""
        self._check_is_free(locked=False)
        with self.locked("study", wait=True):  # another process may add to the plan at the same time
            self._check_is_free(locked=True)
            whole = extended(self.plan(), plan, self.path) if self.exists else plan
            self.check_runs(whole)
            self.write(whole, environment)
        return whole

    def _check_is_free(self, *, locked: bool) -> None:
        """Refuse a folder that holds something and is no study; until we have the lock another may be making one."""
        names = {path.name for path in self.path.iterdir() if not is_part(path)} if self.path.exists() else set()
        begins = "locks" in names and (names == {"locks"} or not locked)
        if names and not self.exists and not begins:
            raise ValueError(f"{self.path} is neither empty nor a study; choose another --out")

    def write(self, plan: StudyPlan, environment: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "study.json", plan.to_json() | {"environment": environment})
        (self.path / "runs").mkdir(exist_ok=True)

    def check_runs(self, plan: StudyPlan) -> None:
        """Refuse a finished run that has the name of a planned one and computed something else."""
        stored = self.runs()
        for cell in plan.cells:
            run = stored.get(cell.folder)
            if run is None or not run.has("result.json"):
                continue
            here, planned = canonical(run.run()), canonical(plan.run_of(cell))
            if data := read_cell(run).get("data"):
                here, planned = here | data, planned | dict(plan.data)
            for name in sorted(here.keys() | planned.keys()):
                if here.get(name) != planned.get(name):
                    raise ValueError(
                        f"{run.path} was run with {name} = {here.get(name)}, but the study has {planned.get(name)}; "
                        "move that folder away"
                    )

    def runs(self) -> dict[str, RunFiles]:
        """What is stored of every run, in runs.jsonl or in a folder of its own, by the name of its folder."""
        folders = (path for path in (self.path / "runs").glob("*") if path.is_dir())
        stored = [*slim_runs(self.path), *map(RunFiles, folders)]  # a folder of a run stands above its line
        for run in stored:
            if run.line is not None and is_deep(run.line):
                raise ValueError(f"{self.path / SLIM}: the line of {run.name} is nested too deep")
        return {run.name: run for run in sorted(stored, key=lambda run: run.name)}

    def ended(self) -> dict[str, RunFiles]:
        """Runs that are not to be run again, by what they compute: finished ones, and damaged ones, which are kept."""
        return {key_of(run.run()): run for run in self.runs().values() if run.has("result.json")}

    def finished(self) -> tuple[dict[str, RunFiles], dict[str, str]]:
        """Runs with a whole result, and what is wrong with the other results; both by what the runs compute."""
        ended = self.ended()
        damaged = {key: wrong for key, run in ended.items() if (wrong := damage(run))}
        return {key: run for key, run in ended.items() if key not in damaged}, damaged

    def failures(self) -> dict[str, dict[str, Any]]:
        return {name: run.load("failed.json") for name, run in self.runs().items() if run.has("failed.json")}

    @contextmanager
    def locked(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Whether this process alone holds the lock ``name``; the system frees it if the process dies."""
        path = self.path / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with try_lock(path, wait=wait) as is_locked:
            yield is_locked is not False


def damage(run: RunFiles) -> str:
    """What is wrong with the result of a run and what to do about it; empty if it is whole."""
    path, mend = run.path / "result.json", "move it away to have it run again"
    known = f"runs/{run.name}/result.json"  # wherever the study is moved to
    try:
        values = run.load("result.json")
    except ValueError as error:
        return f"{error}; {mend}".replace(str(path), known)
    wrong = [name for name in NUMBERS if not is_number(values.get(name))]
    for name in QUALITIES:
        if not isinstance(value := values.get(name, ""), float | None) and not is_number(value):
            wrong.append(name)
    return f"{known} has no number for {wrong[0]}; {mend}" if wrong else ""


def read_cell(run: RunFiles) -> dict[str, Any]:
    return run.load_checked("cell.json", CELL) if run.has("cell.json") else {}


def save_masks(folder: Path, masks: Mapping[str, "Tensor"]) -> None:
    """Write boolean masks as packed bits, one tensor a weight, and their shapes into the header."""
    from safetensors.torch import save

    from ...ops import bits

    header = {name: "x".join(map(str, mask.shape)) for name, mask in masks.items()}
    content = save({name: bits.pack(mask.cpu()) for name, mask in masks.items()}, header)
    write_atomically(folder / MASKS, lambda file: file.write(content))


def jaccard(first: Path, second: Path) -> float | None:
    """``|A and B| / |A or B|`` of what two runs pruned: 1 for the same weights; None where masks are not kept."""
    if not (first / MASKS).is_file() or not (second / MASKS).is_file():
        return None
    (ours, shapes), (theirs, others) = _read_masks(first / MASKS), _read_masks(second / MASKS)
    if shapes != others:
        raise ValueError(f"{first / MASKS} and {second / MASKS} hold masks of different weights")
    total = sum(map(math.prod, shapes.values()))
    # a set bit is a kept weight, and the unused bits of the last byte are zero
    kept_by_both = sum(_num_ones(ours[name] & theirs[name]) for name in ours)
    kept_by_one = sum(_num_ones(ours[name] | theirs[name]) for name in ours)
    return (total - kept_by_one) / (total - kept_by_both) if total > kept_by_both else 1.0


def _num_ones(packed: np.ndarray) -> int:
    return sum(value.bit_count() * int(num) for value, num in enumerate(np.bincount(packed, minlength=256)))


def _read_masks(path: Path) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            shapes = {name: tuple(map(int, shape.split("x"))) for name, shape in (file.metadata() or {}).items()}
            masks = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in masks.keys() | shapes.keys():
            if masks[name].dtype != "uint8" or masks[name].shape != (-(-math.prod(shapes[name]) // 8),):
                raise ValueError(f"the bits of {name} do not fit its shape")
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete it to leave the overlap out") from error
    return masks, shapes
