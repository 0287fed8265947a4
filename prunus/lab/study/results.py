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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, mode
from typing import Any

from ...files.json_file import write_json
from ..run import Run
from ..run_files import RunFiles
from .intervals import ACCURACY, PERPLEXITY, Metric, deviation, paired, verdict
from .study_folder import Folder, jaccard, read_cell
from .study_plan import Cell, StudyPlan, canonical, key_of

SCORE = {"score", "eps", "exponent"}
CHANCE = 1e-6  # of the prunable weights: one in many millions that stays is zero after some step


@dataclass(frozen=True)
class Finished:
    """A finished run as one cell sees it."""

    cell: Cell
    files: RunFiles
    result: Mapping[str, Any]
    notes: Mapping[str, Any]  # of cell.json

    def fault(self, plan: StudyPlan, metric: Metric) -> str | None:
        """Why the run does not count; None if it does."""
        share, total, target = (self.result[name] for name in ("sparsity", "num_prunable", "num_asked"))
        zeros = round(share * total)
        if not 0 <= zeros - target <= CHANCE * total:
            return f"{share:.4%} of the prunable weights are zero, {zeros:,}; asked for were {target:,.0f}"
        for name in ("loss", metric.name):
            if (value := self.result[name]) is None or not abs(value) < 1e300:
                return f"the training diverged: its {name} is not finite"
        if self.notes.get("data", dict(plan.data)) != dict(plan.data):
            return "it was made with other data than the study's"
        return None


def update(folder: Folder) -> dict[str, Any]:
    """Read every run and write ``study_result.json`` anew, and overlaps with magnitude into each cell.json."""
    with folder.locked("study", wait=True):
        plan = folder.plan()
        cells = {one.cell: one for one in finished_cells(plan, folder.finished()[0])}
        for cell, one in cells.items():
            twin = plan.overlapped(cell)
            control = cells.get(twin) if twin else None
            if control and _overlap(one, plan) is None:
                value = jaccard(one.files.path, control.files.path)
                if value is not None:  # a slim run keeps no masks
                    noted = {"overlap": value, "overlap_with": control.cell.arm}
                    write_json(one.files.path / "cell.json", {**one.notes, **noted})
        values = summary(folder, plan)
        write_json(folder.path / "study_result.json", values)
    return values


def summary(folder: Folder, plan: StudyPlan) -> dict[str, Any]:
    finished, damaged = folder.finished()
    every = finished_cells(plan, finished)
    metric = ACCURACY if every and not every[0].result["tokens"] else PERPLEXITY  # only text counts tokens
    faults = [one.fault(plan, metric) for one in every]
    counted = [one for one, fault in zip(every, faults, strict=True) if not fault]
    if counted and min(abs(metric.of(one.result)) for one in counted) < 10:
        metric = replace(metric, decimals=3)  # differences are smaller still
    done = {one.cell for one in every}
    seeds = {cell.seed for cell in done}
    failures = folder.failures()
    reasons = {
        cell: damaged.get(key_of(plan.run_of(cell))) or failures.get(cell.folder, {}).get("message")
        for cell in plan.owners.values()
    }
    return {
        "hash": plan.hash,
        "metric": asdict(metric) | {"better": "higher" if metric.higher_is_better else "lower"},
        "rows": list(_rows(plan, counted, metric)),
        "failed": [asdict(cell) | {"message": why} for cell, why in reasons.items() if why],
        "off_target": [asdict(one.cell) | {"message": why} for one, why in zip(every, faults, strict=True) if why],
        "num_runs": len(set(plan.owners.values())),
        "num_finished": len({one.files.name for one in every}),
        "round_ends": all(cell in done for cell in plan.cells if cell.seed in seeds),
    }


def finished_cells(plan: StudyPlan, stored: Mapping[str, RunFiles]) -> list[Finished]:
    pairs = [(cell, files) for cell in plan.ordered() if (files := stored.get(key_of(plan.run_of(cell))))]
    return [Finished(cell, files, files.load("result.json"), read_cell(files)) for cell, files in pairs]


def _rows(plan: StudyPlan, finished: Sequence[Finished], metric: Metric) -> Iterator[dict[str, Any]]:
    places = dict.fromkeys((cell.arm, cell.sparsity) for cell in plan.cells)
    groups = {place: [one for one in finished if (one.cell.arm, one.cell.sparsity) == place] for place in places}
    values = {place: {one.cell.seed: metric.of(one.result) for one in group} for place, group in groups.items()}
    for arm, sparsity in sorted(places, key=lambda place: place[1]):
        group = groups[arm, sparsity]
        if not group:
            continue
        cell, ours = group[0].cell, values[arm, sparsity]
        numbers = [ours[seed] for seed in sorted(ours)]
        against = mode(plan.against(one.cell) for one in group)
        twins = [twin.arm for one in group if sparsity and (twin := plan.dense_for(one.cell))]
        dense = mode(twins) if twins else None
        other = values.get((against, sparsity)) if against != arm else None
        difference = paired(ours, other) if other is not None else None
        cost = paired(ours, values[dense, 0.0]) if dense else None
        yield {
            "arm": arm,
            "sparsity": sparsity,
            "seeds": sorted(ours),
            "values": numbers,
            "mean": fmean(numbers),
            "sd": deviation(numbers),
            "min": min(numbers),
            "max": max(numbers),
            **_measured(group, plan),
            "decimals": metric.decimals,
            "budget_scale": plan.run_of(cell).budget_scale,
            "same_as": owner.arm if (owner := plan.owners[cell]).arm != arm else None,
            "runs": [one.files.name for one in group],
            "against": against if other is not None else None,
            "difference": difference and asdict(difference),
            "verdict": verdict(difference, metric) if other is not None else "",
            "against_budget": plan.arm[against].changes.get("budget_scale", plan.base.budget_scale),
            "beside": _beside(plan.run_of(cell), plan.run_of(replace(cell, arm=against))),
            "dense": dense,
            "cost": cost and asdict(cost),
        }


def _beside(ours: Run, theirs: Run) -> list[str]:
    """Fields in which two runs differ beside the score, if they differ in the score: a mixed comparison."""
    first, second = canonical(ours), canonical(theirs)
    differ = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    written = {name for name, value in vars(ours).items() if value != getattr(theirs, name)}
    if "regrow" in written:
        written.discard("regrow_by")
    return sorted(differ & written - SCORE) if differ & SCORE else []


def _measured(group: Sequence[Finished], plan: StudyPlan) -> dict[str, Any]:
    def noted(name: str, runs: Sequence[Finished]) -> list[float]:
        return [value for one in runs if (value := one.notes.get(name)) is not None]

    warm = noted("wall_seconds", [one for one in group if one.notes.get("cold") is False])
    known = {
        "wall_seconds": warm or noted("wall_seconds", group),
        "peak_mib": noted("peak_mib", group),
        "overlap": [value for one in group if (value := _overlap(one, plan)) is not None],
    }
    return {
        "measured_sparsity": fmean(one.result["sparsity"] for one in group),
        **{name: fmean(one.result[name] for one in group) for name in ("tokens", "examples", "seconds")},
        "cold": not warm,
        "at_once": max(one.notes.get("at_once", 1) for one in group),
        **{name: fmean(values) if values else None for name, values in known.items()},
    }


def _overlap(one: Finished, plan: StudyPlan) -> float | None:
    """The overlap in cell.json if it is with the right run."""
    twin = plan.overlapped(one.cell)
    return one.notes.get("overlap") if twin and one.notes.get("overlap_with") == twin.arm else None
