"""``study_result.json``: one row for each arm and sparsity, with its statistics.

metric      name, better ("lower" or "higher"), scale (accuracy is in per cent), unit
rows        arm, sparsity, seeds and values (of the runs that count), mean, sd (n - 1), min, max, measured_sparsity,
            tokens, examples, budget_scale, seconds, peak_mib (means), wall_seconds (mean of the runs that paid for no
            start-up, of all if cold, which is true where there are none), at_once (most workers that shared a
            device), overlap (mean Jaccard of the pruned weights with those of magnitude: of the run that is equal but
            for the score, else of the arm magnitude if it is trained alike), decimals (to write values with),
            same_as (the arm whose runs these are, or null), runs (folder names),
            against (an arm) and difference to it {mean, half_width (95 %), num_seeds}, verdict, against_budget, and
            beside (fields in which the two differ beside the score, where they differ in that too); dense (the dense
            arm that is equal in all but pruning, or null) and cost: the same difference to it
failed      arm, sparsity, seed, message: runs that failed, and those whose result.json is damaged
off_target  runs that count nowhere, with a message: zeros that were not asked for, no finite quality, other data
num_runs, num_finished      different computations, and those with a result
round_ends  whether every arm has the seeds that any arm has
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...files.json_file import read_json, write_json
from ..run import Run
from .folder import Folder
from .keys import canonical, key_of
from .plan import Cell, Plan
from .statistics import ACCURACY, PERPLEXITY, Metric, Paired, deviation, mean, paired, verdict

SCORE = {"score", "eps", "exponent"}
CHANCE = 1e-6  # of the prunable weights: one in many millions that stays is zero after some step
TOLERANCE = 5e-4  # of the prunable weights, in older results: rounding by layer, nothing more
BY_ROW = 2e-2  # of the same: a row of n inputs drops a whole number of them: half a weight of 25


@dataclass(frozen=True)
class Finished:
    """A finished run as one cell sees it."""

    cell: Cell
    folder: Path
    result: Mapping[str, Any]
    about: Mapping[str, Any]

    def fault(self, plan: Plan, metric: Metric) -> str | None:
        """Why it does not count, if it does not."""
        share, total = self.result["sparsity"], self.result["num_prunable"]
        zeros, asked = round(share * total), self.result.get("num_asked", self.cell.sparsity * total)
        fewest, most = self._allowed(plan)
        if not fewest * total <= zeros - asked <= most * total:
            return f"{share:.4%} of the prunable weights are zero, {zeros:,}; asked for were {asked:,.0f}"
        for name in ("loss", metric.name):
            if (value := self.result[name]) is None or not math.isfinite(value):
                return f"the training diverged: its {name} is not finite"
        if self.about.get("data", dict(plan.data)) != dict(plan.data):
            return "it was made with other data than the study's"
        return None

    def _allowed(self, plan: Plan) -> tuple[float, float]:
        """Zeros beyond those asked for that may be, at least and at most, as parts of the prunable weights."""
        if "num_asked" in self.result:
            return 0.0, CHANCE
        rounding = BY_ROW if plan.run_of(self.cell).allocate == "row" else TOLERANCE
        return -rounding, rounding


def update(folder: Folder) -> dict[str, Any]:
    """Read every run and write ``study_result.json`` anew; returns it."""
    with folder.locked("study", wait=True):
        plan = folder.plan()
        note_overlaps(folder, plan)
        values = summary(folder, plan)
        write_json(folder.path / "study_result.json", values)
    return values


def summary(folder: Folder, plan: Plan) -> dict[str, Any]:
    """What the runs in ``folder`` say about ``plan``."""
    every = list(finished_cells(folder, plan))
    metric = metric_of(every)
    faults = [one.fault(plan, metric) for one in every]
    counted = [one for one, fault in zip(every, faults, strict=True) if not fault]
    metric = replace(metric, decimals=decimals_of(metric, counted))
    rows = list(_rows(plan, counted, metric))
    done = {one.cell for one in every}
    seeds = {cell.seed for cell in done}
    return {
        "hash": plan.hash,
        "metric": asdict(metric) | {"better": "higher" if metric.higher_is_better else "lower"},
        "rows": rows,
        "failed": [asdict(cell) | {"message": why} for cell, why in _failures(folder, plan)],
        "off_target": [
            asdict(one.cell) | {"message": fault} for one, fault in zip(every, faults, strict=True) if fault
        ],
        "num_runs": len(set(plan.owners.values())),
        "num_finished": len({one.folder for one in every}),
        "round_ends": all(cell in done for cell in plan.cells if cell.seed in seeds),
    }


def _failures(folder: Folder, plan: Plan) -> Iterator[tuple[Cell, str]]:
    """Runs that ended without a result, or whose result is damaged, with why."""
    damaged = folder.damaged()
    for cell in dict.fromkeys(plan.owners.values()):
        if why := damaged.get(key_of(plan.run_of(cell))) or (folder.failure(cell) or {}).get("message"):
            yield cell, why


def finished_cells(folder: Folder, plan: Plan) -> Iterator[Finished]:
    """Every cell whose computation has a whole result, in the plan's order."""
    paths = folder.finished()
    for cell in plan.ordered():
        if path := paths.get(key_of(plan.run_of(cell))):
            yield Finished(cell, path, read_json(path / "result.json"), folder.about(path))


def metric_of(finished: Sequence[Finished]) -> Metric:
    """Perplexity where tokens were read, accuracy for images."""
    return ACCURACY if finished and not finished[0].result["tokens"] else PERPLEXITY


def decimals_of(metric: Metric, counted: Sequence[Finished]) -> int:
    """Two, or three where values are below ten and their differences smaller still."""
    return 3 if counted and min(abs(metric.of(one.result)) for one in counted) < 10 else 2


def _rows(plan: Plan, finished: Sequence[Finished], metric: Metric) -> Iterator[dict[str, Any]]:
    places = dict.fromkeys((cell.arm, cell.sparsity) for cell in plan.cells)
    groups = {place: [one for one in finished if (one.cell.arm, one.cell.sparsity) == place] for place in places}
    values = {place: {one.cell.seed: metric.of(one.result) for one in group} for place, group in groups.items()}
    for arm, sparsity in sorted(places, key=lambda place: place[1]):
        group = groups[arm, sparsity]
        if not group:
            continue
        cell = group[0].cell
        against = _most([plan.against(one.cell) for one in group])
        twins = [twin.arm for one in group if sparsity and (twin := plan.dense_for(one.cell))]
        dense = _most(twins) if twins else None
        other = values.get((against, sparsity)) if against != arm else None
        yield {
            "arm": arm,
            "sparsity": sparsity,
            **_described(values[arm, sparsity]),
            **_measured(group, plan),
            "decimals": metric.decimals,
            "budget_scale": plan.run_of(cell).budget_scale,
            "same_as": same_as(plan, cell),
            "runs": [one.folder.name for one in group],
            **_compared(values[arm, sparsity], against if other is not None else None, other or {}, metric),
            "against_budget": _budget(plan, against),
            "beside": _beside(plan.run_of(cell), plan.run_of(replace(cell, arm=against))),
            "dense": dense,
            "cost": _json(paired(values[arm, sparsity], values[dense, 0.0]) if dense else None),
        }


def _most(names: Sequence[str]) -> str:
    """The name that most seeds have, the first of several."""
    return max(names, key=names.count)


def _beside(ours: Run, theirs: Run) -> list[str]:
    """Fields in which two runs differ beside the score, if they differ in the score: a mixed comparison."""
    first, second = canonical(ours), canonical(theirs)
    differ = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    written = {name for name, value in vars(ours).items() if value != getattr(theirs, name)}
    if "regrow" in written:
        written.discard("regrow_by")
    return sorted(differ & written - SCORE) if differ & SCORE else []


def _budget(plan: Plan, arm: str) -> float:
    return plan.arm[arm].changes.get("budget_scale", plan.base.budget_scale)


def _described(values: Mapping[int, float]) -> dict[str, Any]:
    numbers = [values[seed] for seed in sorted(values)]
    return {
        "seeds": sorted(values),
        "values": numbers,
        "mean": mean(numbers),
        "sd": deviation(numbers),
        "min": min(numbers),
        "max": max(numbers),
    }


def _measured(group: Sequence[Finished], plan: Plan) -> dict[str, Any]:
    """Means over the runs of what was counted and timed."""
    from_result = {name: mean([one.result[name] for one in group]) for name in ("sparsity", "tokens", "examples")}
    noted = {
        name: [one.about[name] for one in group if one.about.get(name) is not None]
        for name in ("wall_seconds", "peak_mib")
    }
    noted["overlap"] = [value for one in group if (value := _overlap(one, plan)) is not None]
    warm = [one.about["wall_seconds"] for one in group if one.about.get("cold") is False]
    noted["wall_seconds"] = warm or noted["wall_seconds"]
    return {
        "measured_sparsity": from_result["sparsity"],
        "tokens": from_result["tokens"],
        "examples": from_result["examples"],
        "seconds": mean([one.result["seconds"] for one in group]),
        "cold": not warm,
        "at_once": max(one.about.get("at_once", 1) for one in group),
        **{name: mean(known) if known else None for name, known in noted.items()},
    }


def _compared(
    ours: Mapping[int, float], against: str | None, theirs: Mapping[int, float], metric: Metric
) -> dict[str, Any]:
    if against is None:
        return {"against": None, "difference": None, "verdict": ""}
    difference = paired(ours, theirs)
    return {"against": against, "difference": _json(difference), "verdict": verdict(difference, metric)}


def _json(difference: Paired | None) -> dict[str, Any] | None:
    return asdict(difference) if difference else None


def same_as(plan: Plan, cell: Cell) -> str | None:
    owner = plan.owners[cell]
    return owner.arm if owner.arm != cell.arm else None


def note_overlaps(folder: Folder, plan: Plan) -> None:
    """Write into each run's cell.json how much of what it pruned magnitude pruned too, where both masks are there."""
    from .masks import jaccard

    found = {one.cell: one for one in finished_cells(folder, plan)}
    for cell, one in found.items():
        twin = plan.overlapped(cell)
        control = found.get(twin) if twin else None
        if control and _overlap(one, plan) is None and (value := jaccard(one.folder, control.folder)) is not None:
            noted = {"overlap": value, "overlap_with": control.cell.arm}
            write_json(one.folder / "cell.json", {**one.about, **noted})


def _overlap(one: Finished, plan: Plan) -> float | None:
    """What was noted, if it is with the run that it should be with; older notes are with the arm magnitude."""
    twin = plan.overlapped(one.cell)
    return one.about.get("overlap") if twin and one.about.get("overlap_with", "magnitude") == twin.arm else None
