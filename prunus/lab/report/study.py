"""A study folder: its runs as cells and what ``study_result.json`` concludes from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..study.table import mixed_with
from .numbers import plain, short_percent
from .read import Json, number, read_json
from .source import Cell, Row, Source, read_cells, rows_of


def read_study(folder: Path) -> Source:
    """The study in ``folder``, however far it is; a part that is missing is noted."""
    study = read_json(folder / "study.json")
    if not isinstance(study, dict) or not isinstance(study.get("base"), dict):
        raise ValueError(f"{folder / 'study.json'} does not describe a study: expected an object with the field 'base'")
    runs = folder / "runs"
    cells, notes = read_cells(runs) if runs.is_dir() else ([], ["The folder holds no runs, so there are no curves."])
    result = read_json(folder / "study_result.json") if (folder / "study_result.json").is_file() else None
    if isinstance(result, dict):
        rows = [_row(row) for row in _dicts(result.get("rows")) if isinstance(row.get("arm"), str)]
        notes = _shortcomings(result, cells) + notes
        if any("dense" not in row for row in _dicts(result.get("rows"))):
            notes.append("study_result.json is of an older version: prunus study --out FOLDER writes it anew.")
    else:
        rows = rows_of(cells)
        notes.insert(0, "There is no study_result.json: means are taken from the runs, and there are no verdicts.")
    return Source(
        folder.resolve().name, "study", _ordered(cells, study), rows, study, notes, _num_open(study, cells, result)
    )


def _num_open(study: Json, cells: Sequence[Cell], result: Any) -> int:
    """Runs to come: by the result, which knows arms that share one, else by the plan."""
    if isinstance(result, dict) and isinstance(result.get("num_runs"), int):
        done = result.get("num_finished")
        return result["num_runs"] - (done if isinstance(done, int) else 0) - len(_dicts(result.get("failed")))
    planned = sum(len(arm["cells"]) for arm in _dicts(study.get("arms")) if isinstance(arm.get("cells"), list))
    return max(1, planned - sum(not cell.record.is_open for cell in cells))


def _ordered(cells: Sequence[Cell], study: Json) -> list[Cell]:
    """Cells in the order of the study's arms."""
    place = {str(arm.get("name")): i for i, arm in enumerate(_dicts(study.get("arms")))}
    return sorted(cells, key=lambda cell: (place.get(cell.arm, len(place)), cell.arm, cell.sparsity, cell.seed))


def _row(row: Mapping[str, Any]) -> Row:
    difference, cost = (row.get(name) if isinstance(row.get(name), dict) else {} for name in ("difference", "cost"))
    values = row.get("values")
    budget = number(row.get("budget_scale"))
    same = str(row.get("same_as") or "")
    return Row(
        arm=row["arm"],
        sparsity=number(row.get("sparsity")) or 0.0,
        values=[v for v in values if number(v) is not None] if isinstance(values, list) else [],
        mean=number(row.get("mean")),
        spread=number(row.get("sd")),
        difference=None if same else number((difference or {}).get("mean")),
        half_width=number((difference or {}).get("half_width")),
        against=str(row.get("against") or ""),
        verdict=f"the same computation as {same}" if same else str(row.get("verdict") or ""),
        overlap=None if same else number(row.get("overlap")),
        dense=str(row.get("dense", "dense") or ""),
        cost=number((cost or {}).get("mean")),
        same_as=same,
        note=f"budget × {plain(budget, 3)}" if budget not in (None, 1.0) else "",
        mixed=mixed_with(row),
    )


def _shortcomings(result: Json, cells: Sequence[Cell]) -> list[str]:
    """What of a study is not there, or does not count; of failures those that no run folder tells."""
    told = {(cell.seed, cell.record.failure) for cell in cells}
    done, planned = result.get("num_finished"), result.get("num_runs")
    said = [f"{done} of {planned} runs have ended."] if isinstance(done, int) and done != planned else []
    for kind, words in (("failed", "failed"), ("off_target", "does not count")):
        for one in _dicts(result.get(kind)):
            if kind == "failed" and (one.get("seed"), one.get("message")) in told:
                continue
            sparsity = number(one.get("sparsity")) or 0.0
            where = f"{one.get('arm')} at {short_percent(sparsity)}, seed {one.get('seed')}"
            said.append(f"{where} {words}: {one.get('message')}")
    return said


def _dicts(value: object) -> list[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
