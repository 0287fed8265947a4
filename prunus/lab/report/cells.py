"""What a report is about: one run, a study, or a folder of runs, as cells of arm, sparsity and seed."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..run import Run
from ..run_files import SLIM, RunFiles, slim_runs
from ..schema import CELL, STUDY, STUDY_RESULT
from ..study.arms import slug
from ..study.intervals import deviation
from ..study.tables import mixed_with
from .numbers import number, short_percent
from .records import Json, RunRecord, read_record

CONTROLS = ("dense", "magnitude", "random")


@dataclass(frozen=True)
class ArmRow:
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
    decimals: int = 2  # to write values and differences with


@dataclass(frozen=True)
class Source:
    """All that a page shows."""

    title: str
    kind: str  # run, study or runs
    cells: Sequence[RunRecord]
    rows: Sequence[ArmRow] = ()
    study: Json = field(default_factory=dict)
    notes: Sequence[str] = ()
    num_open: int = 0  # runs that have neither ended nor failed, as far as the folder says

    @property
    def record(self) -> RunRecord:
        """The first run, or what a study says of all of them where its runs are not at hand."""
        if self.cells:
            return self.cells[0]
        environment = self.study.get("environment")
        return RunRecord(self.title, self.base, environment if isinstance(environment, dict) else {}, [])

    @cached_property
    def base(self) -> Run:
        """What all runs share: as the study says, or that of the first run."""
        return Run.from_json(self.study["base"]) if self.study else self.record.run

    @property
    def is_comparison(self) -> bool:
        return self.kind != "run"

    @cached_property
    def arms(self) -> list[str]:
        """Arms with computations of their own: the controls, then the others in the study's order."""
        own = [row.arm for row in self.rows if not row.same_as]
        names = list(dict.fromkeys([*(cell.arm for cell in self.cells), *own]))
        return [name for name in CONTROLS if name in names] + [name for name in names if name not in CONTROLS]

    @cached_property
    def sparsities(self) -> list[float]:
        return sorted({one.sparsity for one in [*self.cells, *self.rows]} - {0.0})

    @property
    def budget(self) -> float:
        """The study's own, or that of most rows; only arms with this budget can be the best."""
        if self.study:
            return self.base.budget_scale
        return statistics.mode([row.budget for row in self.rows] or [1.0])

    def runs(self, arm: str, sparsity: float) -> list[RunRecord]:
        return [cell for cell in self.cells if cell.arm == arm and cell.sparsity == sparsity]

    def row(self, arm: str, sparsity: float) -> ArmRow | None:
        return next((row for row in self.rows if row.arm == arm and row.sparsity == sparsity), None)


def read_source(folder: Path) -> Source:
    """The run, study or runs in ``folder``; ValueError if there is nothing that a report could show."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a run folder or a study folder")
    if (folder / "run.json").is_file():
        record = read_record(RunFiles(folder))
        notes = [f"This run {note}." for note in record.notes]
        return Source(record.name, "run", [record], notes=notes, num_open=int(record.is_open))
    if (folder / "study.json").is_file():
        return _read_study(folder)
    cells, notes = _read_cells(folder)
    if notes and not cells:
        raise ValueError(f"no run in {folder} can be read: {notes[0]}")
    if not cells:
        raise ValueError(
            f"{folder} holds no run (run.json), study (study.json) or folders of runs, nor a model from prunus prune "
            "(result.json) or prunus recover (recovery.json)"
        )
    num_open = sum(cell.is_open for cell in cells)
    return Source(folder.resolve().name, "runs", cells, rows_of(cells), notes=notes, num_open=num_open)


def _read_cells(folder: Path, slim: Iterable[RunFiles] = ()) -> tuple[list[RunRecord], list[str]]:
    """Cells of the runs in a folder and of ``slim`` ones, by name; one that cannot be read is noted and left out."""
    paths = folder.iterdir() if folder.is_dir() else ()
    runs = {run.name: run for run in [*slim, *(RunFiles(path) for path in paths if (path / "run.json").is_file())]}
    cells: list[RunRecord] = []
    notes: list[str] = []
    noted: dict[str, list[str]] = {}
    for _, run in sorted(runs.items()):
        try:
            record = read_record(run)
            more = run.load_checked("cell.json", CELL) if run.has("cell.json") else {}
        except ValueError as error:
            notes.append(f"{run.name} is left out: {error}.")
            continue
        cells.append(replace(record, more=more))
        for note in record.notes:
            noted.setdefault(note, []).append(run.name)
    for note, names in noted.items():
        several = names[0] if len(names) == 1 else f"Each of {len(names)} runs ({names[0]}, ...)"
        notes.append(f"{several} {note}.")
    return cells, notes


def rows_of(cells: Sequence[RunRecord]) -> list[ArmRow]:
    """Mean and spread by arm and sparsity from the results of runs that ended; only a study gives verdicts."""
    grouped: dict[tuple[str, float, float], list[float]] = {}
    for cell in cells:
        values = grouped.setdefault((cell.arm, cell.sparsity, cell.run.budget_scale), [])
        if cell.quality is not None:
            values.append(cell.quality)
    return [
        ArmRow(arm, sparsity, values, mean=mean_of(values), spread=deviation(values), budget=budget)
        for (arm, sparsity, budget), values in grouped.items()
    ]


def mean_of(values: Sequence[Any]) -> float | None:
    numbers = [value for value in map(number, values) if value is not None]
    return statistics.fmean(numbers) if numbers else None


def _read_study(folder: Path) -> Source:
    """The study in ``folder``, however far it is; a part that is missing is noted."""
    files = RunFiles(folder)
    study = files.load_checked("study.json", STUDY)
    try:
        Run.from_json(study["base"])
    except ValueError as error:
        raise ValueError(f"{folder / 'study.json'}: base: {error}") from error
    cells, notes = _read_cells(folder / "runs", slim_runs(folder))
    if not (folder / "runs").is_dir() and not (folder / SLIM).is_file():
        notes = ["The folder holds no runs, so there are no curves."]
    if files.has("study_result.json"):
        result = files.load_checked("study_result.json", STUDY_RESULT)
        rows, notes = [_row(row) for row in result["rows"]], _problems(result, cells) + notes
        # runs that arms share are counted once
        num_open = result["num_runs"] - result["num_finished"] - len(result["failed"])
    else:
        rows = rows_of(cells)
        notes.insert(0, "There is no study_result.json: means are taken from the runs, and there are no verdicts.")
        planned = sum(len(arm["cells"]) for arm in study["arms"])
        num_open = max(1, planned - sum(not cell.is_open for cell in cells))
    return Source(folder.resolve().name, "study", _in_order(cells, study), rows, study, notes, num_open)


def _in_order(cells: Sequence[RunRecord], study: Json) -> list[RunRecord]:
    """Cells in the order of the study's arms, under the names that these have there.

    A run without an end has no cell.json: its arm is known by the name of its folder alone, in plain letters.
    """
    arms = [arm["name"] for arm in study["arms"]]
    names, place = {slug(arm): arm for arm in arms}, {arm: i for i, arm in enumerate(arms)}
    named = [cell if cell.more else replace(cell, more={"arm": names.get(cell.arm, cell.arm)}) for cell in cells]
    return sorted(named, key=lambda cell: (place.get(cell.arm, len(place)), cell.arm, cell.sparsity, cell.seed))


def _row(row: Mapping[str, Any]) -> ArmRow:
    same = row.get("same_as") or ""
    difference, cost = ({} if same else row.get("difference") or {}), row.get("cost") or {}
    return ArmRow(
        arm=row["arm"],
        sparsity=row["sparsity"],
        values=[value for value in row["values"] if number(value) is not None],
        mean=number(row.get("mean")),
        spread=number(row.get("sd")),
        difference=number(difference.get("mean")),
        half_width=number(difference.get("half_width")),
        against=row.get("against") or "",
        verdict=f"the same computation as {same}" if same else row.get("verdict") or "",
        overlap=None if same else number(row.get("overlap")),
        dense=row.get("dense", "dense") or "",
        cost=number(cost.get("mean")),
        same_as=same,
        budget=row["budget_scale"],
        mixed=mixed_with(row),
        decimals=3 if row.get("decimals") == 3 else 2,
    )


def _problems(result: Json, cells: Sequence[RunRecord]) -> list[str]:
    """What a study lacks, and what does not count; failures that notes of the runs name already are left out."""
    known = {(cell.seed, cell.failure) for cell in cells}
    done, planned = result["num_finished"], result["num_runs"]
    notes = [f"{done} of {planned} runs have ended."] if done != planned else []
    for kind, words in (("failed", "failed"), ("off_target", "does not count")):
        for one in result[kind]:
            if kind == "off_target" or (one["seed"], one["message"]) not in known:
                where = f"{one['arm']} at {short_percent(one['sparsity'])}, seed {one['seed']}"
                notes.append(f"{where} {words}: {one['message']}")
    return notes
