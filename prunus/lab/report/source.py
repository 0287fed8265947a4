"""What a report is about: one run, a study, or a folder of runs, as cells of arm, sparsity and seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .kinds import CELL, read_checked
from .read import Json, Record, is_run, number, read_record

CONTROLS = ("dense", "magnitude", "random")


@dataclass(frozen=True)
class Cell:
    """One run as part of a comparison; ``more`` is what a study notes beside it."""

    arm: str
    sparsity: float  # asked for; 0 for a dense run
    seed: int
    record: Record
    more: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One arm at one sparsity over its seeds; accuracies and their differences are in percent."""

    arm: str
    sparsity: float
    values: Sequence[float]  # one a seed
    mean: float | None = None
    spread: float | None = None
    difference: float | None = None  # paired, to the arm it is compared with
    half_width: float | None = None  # of its 95 % interval
    against: str = ""
    verdict: str = ""
    overlap: float | None = None
    dense: str = "dense"  # the dense arm of the same recipe; empty if there is none
    cost: float | None = None  # paired difference to it
    same_as: str = ""  # the arm whose runs these are
    budget: float = 1.0  # against the study's steps
    mixed: str = ""  # what differs from the arm it is against beside what is compared


@dataclass(frozen=True)
class Source:
    """All that a page shows."""

    title: str
    kind: str  # run, study or runs
    cells: Sequence[Cell]
    rows: Sequence[Row] = ()
    study: Json = field(default_factory=dict)
    notes: Sequence[str] = ()
    num_open: int = 0  # runs that have neither ended nor failed, as far as the folder says

    @property
    def record(self) -> Record:
        """The first run, or what a study says of all of them where its runs are not at hand."""
        if self.cells:
            return self.cells[0].record
        environment = self.study.get("environment")
        return Record(self.title, self.study["base"], environment if isinstance(environment, dict) else {}, [])

    @property
    def is_comparison(self) -> bool:
        return self.kind != "run"

    @cached_property
    def arms(self) -> list[str]:
        """Names of arms that are a computation of their own: the controls, then the others in the study's order."""
        own = [row.arm for row in self.rows if not row.same_as]
        found = list(dict.fromkeys([*(cell.arm for cell in self.cells), *own]))
        return [name for name in CONTROLS if name in found] + [name for name in found if name not in CONTROLS]

    @cached_property
    def sparsities(self) -> list[float]:
        """Those that are compared, dense apart."""
        return sorted({one.sparsity for one in [*self.cells, *self.rows]} - {0.0})

    @property
    def budget(self) -> float:
        """The study's own, or that of most rows; the best is the best of those that have it."""
        if self.study:
            return number(self.study["base"].get("budget_scale")) or 1.0
        return statistics.mode([row.budget for row in self.rows] or [1.0])

    def runs(self, arm: str, sparsity: float) -> list[Record]:
        return [cell.record for cell in self.cells if cell.arm == arm and cell.sparsity == sparsity]

    def row(self, arm: str, sparsity: float) -> Row | None:
        return next((row for row in self.rows if row.arm == arm and row.sparsity == sparsity), None)


def read_source(folder: Path) -> Source:
    """The run, study or runs in ``folder``; ValueError if there is nothing that a report could show."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a run folder or a study folder")
    title = folder.resolve().name
    if is_run(folder):
        record = read_record(folder)
        notes = [f"This run {note}." for note in record.notes]
        return Source(title, "run", [_cell(record)], notes=notes, num_open=int(record.is_open))
    if (folder / "study.json").is_file():
        from .study import read_study

        return read_study(folder)
    cells, notes = read_cells(folder)
    if notes and not cells:
        raise ValueError(f"no run in {folder} can be read: {notes[0]}")
    if not cells:
        raise ValueError(f"{folder} holds neither a run (run.json) nor a study (study.json) nor folders of runs")
    num_open = sum(cell.record.is_open for cell in cells)
    return Source(title, "runs", cells, rows_of(cells), notes=notes, num_open=num_open)


def read_cells(folder: Path) -> tuple[list[Cell], list[str]]:
    """Cells of the runs right below ``folder``; one that cannot be read is noted and left out."""
    cells: list[Cell] = []
    notes: list[str] = []
    noted: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path)):
        try:
            record = read_record(path)
            more = read_checked(path / "cell.json", CELL) if (path / "cell.json").is_file() else {}
        except ValueError as error:
            notes.append(f"{path.name} is left out: {error}.")
            continue
        cells.append(_cell(record, more))
        for note in record.notes:
            noted.setdefault(note, []).append(path.name)
    return cells, notes + [f"{_several(names)} {note}." for note, names in noted.items()]


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"Each of {len(names)} runs ({names[0]}, ...)"


def _cell(record: Record, more: Json | None = None) -> Cell:
    """The cell that a run says it is; without ``cell.json`` its arm is its folder's name without the seed."""
    more, config = more or {}, record.config
    seed = config.get("seed", 0)
    dense = config.get("score") == "none"
    asked = 0.0 if dense else number(config.get("sparsity")) or 0.0
    name = record.name.removesuffix(f"-s{seed}").removesuffix(f"-{asked:.12g}")
    return Cell(str(more.get("arm", name)), asked, seed if isinstance(seed, int) else 0, record, more)


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """Mean and spread by arm and sparsity from the results of runs that ended; verdicts are a study's to give."""
    grouped: dict[tuple[str, float, float], list[float]] = {}
    for cell in cells:
        budget = number(cell.record.config.get("budget_scale")) or 1.0
        values = grouped.setdefault((cell.arm, cell.sparsity, budget), [])
        if cell.record.quality is not None:
            values.append(cell.record.quality * scale_of(cell.record))
    return [
        Row(
            arm,
            sparsity,
            values,
            mean=math.fsum(values) / len(values) if values else None,
            spread=statistics.stdev(values) if len(values) > 1 else None,
            budget=budget,
        )
        for (arm, sparsity, budget), values in grouped.items()
    ]


def scale_of(record: Record) -> float:
    """Accuracies are read in percent."""
    return 100.0 if record.metric == "accuracy" else 1.0


def mean_of(values: Sequence[Any]) -> float | None:
    """Mean of the numbers among ``values``."""
    found = [value for value in map(number, values) if value is not None]
    return math.fsum(found) / len(found) if found else None
