"""The rows of ``study_result.json`` as text, for a terminal and for a page. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from .statistics import written

HEADINGS = ("arm", "asked", "zeros", "mean ± sd", "seeds", "to dense", "overlap", "budget", "s a run", "verdict")

READING = (
    "± beside a mean is the standard deviation over seeds, beside a difference of equal seeds its 95 % interval. "
    "Cold seconds are of the first run of a process, with its start-up; runs at once shared a device. "
    "To dense is the difference to the dense runs that are equal in all but pruning, where the study has them. "
    "Overlap is the Jaccard index of the pruned weights with those of the run that is equal but for its score, "
    "magnitude, or if there is none of the arm magnitude where it is trained alike"
)


def title_of(values: Mapping[str, Any]) -> str:
    metric = values["metric"]
    unit = " in per cent" if metric["scale"] != 1 else ""
    return (
        f"{metric['name']}{unit}, {metric['better']} is better; {values['num_finished']} of {values['num_runs']} runs"
    )


def cells_of(row: Mapping[str, Any]) -> list[str]:
    """One row under HEADINGS."""
    return [
        row["arm"],
        f"{row['sparsity']:.1%}" if row["sparsity"] else "dense",
        f"{row['measured_sparsity']:.3%}",
        written(row["mean"], row["decimals"]) + _plus_minus(row["sd"], row["decimals"]),
        str(len(row["seeds"])),
        difference(row["cost"], row["decimals"]),
        "" if row["overlap"] is None else f"{row['overlap']:.3f}",
        f"x {row['budget_scale']:g}",
        f"{row['wall_seconds'] or row['seconds']:.1f}" + (" cold" if row["cold"] else "") + _beside_others(row),
        said(row),
    ]


def _beside_others(row: Mapping[str, Any]) -> str:
    return f", {row['at_once']} at once" if row["at_once"] > 1 else ""


def said(row: Mapping[str, Any]) -> str:
    """The verdict with what it is against; unequal budgets and recipes are named."""
    if row["same_as"]:
        return f"the same computation as {row['same_as']}"
    if not row["against"]:
        return ""
    mixed = mixed_with(row)
    return f"{row['verdict']} (against {row['against']}{'; ' if mixed else ''}{mixed})"


def mixed_with(row: Mapping[str, Any]) -> str:
    """What differs between an arm and the one it is against beside what they are to be compared in."""
    budget, other = row.get("budget_scale", 1.0), row.get("against_budget", 1.0)
    beside = row.get("beside") or []
    said = [f"{budget / other:g} times the tokens"] if budget != other else []
    return ", ".join([*said, *([f"{', '.join(beside)} differ{'s' * (len(beside) == 1)} too"] if beside else [])])


def difference(value: Mapping[str, Any] | None, decimals: int) -> str:
    if value is None:
        return ""
    return written(value["mean"], decimals, sign=True) + _plus_minus(value["half_width"], decimals)


def _plus_minus(value: float | None, decimals: int) -> str:
    return "" if value is None else f" ± {written(value, decimals)}"


def notes_of(values: Mapping[str, Any]) -> Iterator[str]:
    """What failed, what does not count, and how the table is to be read."""
    for entry in values["failed"]:
        yield f"failed: {entry['arm']} at {entry['sparsity']:g}, seed {entry['seed']}: {entry['message']}"
    for entry in values["off_target"]:
        yield f"not counted: {entry['arm']} at {entry['sparsity']:g}, seed {entry['seed']}: {entry['message']}"
    if values["rows"]:
        sparsities = sorted({row["sparsity"] for row in values["rows"]} - {0.0})
        chance = ", ".join(f"{s / (2 - s):.3f} at {s:.0%}" for s in sparsities)
        yield READING + (f" (by chance {chance})." if chance else ".")
