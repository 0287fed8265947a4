"""A study folder: its runs as cells and what ``study_result.json`` concludes from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..study.arms import slug
from ..study.table import mixed_with
from .kinds import STUDY, STUDY_RESULT, read_checked
from .numbers import short_percent
from .read import Json, number
from .source import Cell, Row, Source, read_cells, rows_of


def read_study(folder: Path) -> Source:
    """The study in ``folder``, however far it is; a part that is missing is noted."""
    study = read_checked(folder / "study.json", STUDY)
    if "base" not in study:
        raise ValueError(f"{folder / 'study.json'} does not describe a study: expected an object with the field 'base'")
    runs = folder / "runs"
    cells, notes = read_cells(runs) if runs.is_dir() else ([], ["The folder holds no runs, so there are no curves."])
    path = folder / "study_result.json"
    result = read_checked(path, STUDY_RESULT) if path.is_file() else None
    if result is not None:
        rows = [_row(row) for row in result.get("rows", ()) if "arm" in row]
        notes = _shortcomings(result, cells) + notes
        if any("dense" not in row for row in result.get("rows", ())):
            notes.append("study_result.json is of an older version: prunus study --out FOLDER writes it anew.")
    else:
        rows = rows_of(cells)
        notes.insert(0, "There is no study_result.json: means are taken from the runs, and there are no verdicts.")
    return Source(
        folder.resolve().name,
        "study",
        _ordered(_named(cells, study), study),
        rows,
        study,
        notes,
        _num_open(study, cells, result),
    )


def _num_open(study: Json, cells: Sequence[Cell], result: Json | None) -> int:
    """Runs to come: by the result, which knows arms that share one, else by the plan."""
    if result is not None and "num_runs" in result:
        return result["num_runs"] - result.get("num_finished", 0) - len(result.get("failed", ()))
    planned = sum(len(arm.get("cells", ())) for arm in study.get("arms", ()))
    return max(1, planned - sum(not cell.record.is_open for cell in cells))


def _named(cells: Sequence[Cell], study: Json) -> list[Cell]:
    """Cells with their arms as the study writes them: a run without an end is known by its folder, in plain letters."""
    names = {slug(arm["name"]): arm["name"] for arm in study.get("arms", ()) if "name" in arm}
    return [cell if cell.more else replace(cell, arm=names.get(cell.arm, cell.arm)) for cell in cells]


def _ordered(cells: Sequence[Cell], study: Json) -> list[Cell]:
    """Cells in the order of the study's arms."""
    place = {str(arm.get("name")): i for i, arm in enumerate(study.get("arms", ()))}
    return sorted(cells, key=lambda cell: (place.get(cell.arm, len(place)), cell.arm, cell.sparsity, cell.seed))


def _row(row: Mapping[str, Any]) -> Row:
    same = str(row.get("same_as") or "")
    difference, cost = ({} if same else row.get("difference") or {}), row.get("cost") or {}
    return Row(
        arm=row["arm"],
        sparsity=number(row.get("sparsity")) or 0.0,
        values=[value for value in row.get("values", ()) if number(value) is not None],
        mean=number(row.get("mean")),
        spread=number(row.get("sd")),
        difference=number(difference.get("mean")),
        half_width=number(difference.get("half_width")),
        against=str(row.get("against") or ""),
        verdict=f"the same computation as {same}" if same else str(row.get("verdict") or ""),
        overlap=None if same else number(row.get("overlap")),
        dense=str(row.get("dense", "dense") or ""),
        cost=number(cost.get("mean")),
        same_as=same,
        budget=number(row.get("budget_scale")) or 1.0,
        mixed=mixed_with(row),
    )


def _shortcomings(result: Json, cells: Sequence[Cell]) -> list[str]:
    """What of a study is not there, or does not count; of failures those that no run folder tells."""
    told = {(cell.seed, cell.record.failure) for cell in cells}
    done, planned = result.get("num_finished"), result.get("num_runs")
    said = [f"{done} of {planned} runs have ended."] if done is not None and done != planned else []
    for kind, words in (("failed", "failed"), ("off_target", "does not count")):
        for one in result.get(kind, ()):
            if kind == "failed" and (one.get("seed"), one.get("message")) in told:
                continue
            sparsity = number(one.get("sparsity")) or 0.0
            where = f"{one.get('arm')} at {short_percent(sparsity)}, seed {one.get('seed')}"
            said.append(f"{where} {words}: {one.get('message')}")
    return said
