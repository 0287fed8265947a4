"""The tables and the answer of ``docs/evidence/bits.md`` from the records of ``bits-study``."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .bits_study import FORMS, OURS, WAYS, WHAT
from .figures import (
    NOT_MEASURED,
    NOTHING,
    Goal,
    ModelFigures,
    figures_of,
    goals_table,
    joined,
    rows_of_study,
    runs_of_study,
)
from .shrink_figures import SMALLER
from .study import SLIGHT, gains, level_name

ORDER = ("GPT-51M", "SmolLM2-135M", "stories15M")
OURS_OF_FOUR = {"4": "4 bits", "4-together": "while pruning", "4-scales": "scales recovered"}
FOUR = OURS_OF_FOUR | {"4-gptq": "GPTQ alone", "4-nearest": "nearest"}
SPARSE = ("repair", "recover", "trained", "trained-recover")
SHRUNK = ("shrink", "shrink-recover")
# what 4 bits may add to the perplexity of 16 bits
GOALS = [Goal(model, level, 0.003, SPARSE, is_share=True) for model in ORDER for level in ("50", "80")]
VERBS = {  # way: what to do in fewer than 16 bits, and in 16
    "dense": ("quantise the dense model", "leave the model as it is"),
    **dict.fromkeys(SPARSE, ("prune and quantise", "prune")),
    **dict.fromkeys(SHRUNK, ("shrink and quantise", "shrink")),
    "small": ("train a smaller model and quantise it", "train a smaller model"),
}
SCOPES = {  # what a user has: the ways that become possible
    "With calibration windows alone": ("dense", "repair", "shrink"),
    "With text to learn from": ("recover", "shrink-recover"),
    "With training from the start": ("trained", "trained-recover", "small"),
}
USABLE = 0.5  # arms that add more to the perplexity answer nobody's question
NARROW = 1.05  # times as many bits: a range that ends there is too short to say so


@dataclass(frozen=True)
class Arm:
    """A model in one form: the bits that it takes a weight of the dense one, and what it adds to its perplexity."""

    way: str
    level: str
    form: str  # of FORMS; "" in 16 bits
    bits: float
    loss: float  # a share of the dense model's perplexity in 16 bits

    @property
    def is_usable(self) -> bool:
        return self.loss <= USABLE

    @property
    def verb(self) -> str:
        return VERBS[self.way][0 if self.form else 1]

    @property
    def num_bits(self) -> int:
        return FORMS[self.form].bits if self.form else 16

    @property
    def title(self) -> str:
        """As a user would say it."""
        kind = "" if self.way == "dense" else f"{level_name(self.level)} {WAYS[self.way].title} "
        return f"{kind}in {self.num_bits} bits" + (f", {self.rounding}" if self.rounding not in ("", OURS) else "")

    @property
    def rounding(self) -> str:
        return FORMS[self.form].rounding if self.form else ""


@dataclass(frozen=True)
class BitsFigures:
    figures: ModelFigures
    arms: Sequence[Arm]


def read_figures(folder: Path, studies: Path) -> list[BitsFigures]:
    return [BitsFigures(model, arms_of(model, studies)) for model in figures_of(folder, WHAT, order=ORDER)]


def arms_of(model: ModelFigures, studies: Path) -> list[Arm]:
    arms = []
    for (name, level), rows in model.rows.items():
        way, _, form = name.partition(" ")
        loss = model.above(name, level)
        if way in WAYS and (form in FORMS or not form) and loss is not None:
            bits = statistics.fmean(row["bits_a_weight"] for row in rows.values())
            arms.append(Arm(way, level, form, bits, loss))
    if model.name == ORDER[0] and not any(arm.way == "small" for arm in arms):
        arms += smaller_arms(studies / SMALLER)
    ways, forms = [*WAYS], ["", *FORMS]
    return sorted(arms, key=lambda arm: (ways.index(arm.way), arm.level, forms.index(arm.form)))


def smaller_arms(study: Path) -> list[Arm]:
    """Smaller dense models of another study, which were trained from the start on the same text, in 16 bits."""
    rows = rows_of_study(study)
    values = {arm: dict(zip(row["seeds"], row["values"], strict=True)) for (arm, _), row in rows.items()}
    sizes = {cell["arm"]: result["num_prunable"] for cell, result in runs_of_study(study)}
    arms = []
    for name in ("dense, width 448", "dense, width 384", "dense, 4 blocks", "dense, 2 blocks"):
        share = sizes[name] / sizes["dense"]
        loss = -statistics.fmean(gains(values[name], values["dense"], "perplexity")) / 100
        arms.append(Arm("small", f"{100 * (1 - share):.0f}", "", 16 * share, loss))
    return arms


def parts(folder: Path, studies: Path) -> dict[str, str]:
    models = read_figures(folder, studies)
    headings = ["way", "16 bits", *FOUR.values()]
    return {
        "answer": "\n".join(map(_answer, models)) or NOTHING,
        "bands": "\n\n".join(map(_bands, models)) or NOTHING,
        "goals": goals_table(GOALS, [model.figures for model in models], headings, _line, words=(0, 1)),
        "models": "\n".join(map(_model, models)) or NOTHING,
    }


# The answer


def frontier(arms: Sequence[Arm]) -> list[Arm]:
    """Arms from many bits to few, each clearly better than all with fewer bits; best in more than a narrow range."""
    best: list[Arm] = []
    for arm in sorted((arm for arm in arms if arm.is_usable), key=lambda arm: (arm.bits, arm.loss)):
        if not best or arm.loss < best[-1].loss - SLIGHT / 100:
            best.append(arm)
    groups = [[*group] for _, group in groupby(reversed(best), key=lambda arm: arm.verb)]
    wide = [own for more, own in pairwise(groups) if more[-1].bits >= NARROW * own[-1].bits]
    return [arm for group in (*groups[:1], *wide) for arm in group]


def bands(arms: Sequence[Arm]) -> list[tuple[str, list[Arm]]]:
    """Ranges of bits and what to do in each, with its best arms; many bits first."""
    ranges: list[tuple[str, list[Arm]]] = []
    for verb, group in groupby(frontier(arms), key=lambda arm: arm.verb):
        best = [*group]
        low = f"{best[-1].bits:.2f}"
        name = f"from {low} to {ranges[-1][1][-1].bits:.2f}" if ranges else f"above {low} bits a weight"
        ranges.append((f"{name} **{verb}**", best))
    return ranges


def _answer(model: BitsFigures) -> str:
    said, ranges = [], bands(model.arms)
    for what, best in ranges:
        losses = dict.fromkeys(percent(arm.loss) for arm in (best[0], best[-1]))
        said.append(f"{what} ({' to '.join(losses)})")
    least = ranges[-1][1][-1].bits
    is_end = any(arm.bits < least for arm in model.arms)
    end = f"all that was measured loses more than {USABLE:.0%}" if is_end else "nothing was measured"
    return f"- {model.figures.name}: {'; '.join(said)}; below {least:.2f} {end}."


def percent(share: float, digits: int = 1) -> str:
    """With a sign, and never a negative zero."""
    return f"{round(share, digits + 2) + 0.0:+.{digits}%}"


def _bands(model: BitsFigures) -> str:
    """The best arms of each range of bits, by what a user has, which includes what is named before."""
    lines, ways, before = [f"**{model.figures.name}**"], [], None
    for scope, more in SCOPES.items():
        ways += more
        if not any(arm.way in more for arm in model.arms):
            continue
        ranges = bands([arm for arm in model.arms if arm.way in ways])
        lines += ["", f"{scope}: the same." if ranges == before else f"{scope}:\n"]
        for what, best in ranges if ranges != before else ():
            named = "; ".join(f"{arm.title}: {arm.bits:.2f} bits, {percent(arm.loss)}" for arm in best)
            lines.append(f"- {what} ({named})")
        before = ranges
    return "\n".join(lines)


# Goals and tables


def _line(goal: Goal, model: ModelFigures | None) -> list[str]:
    """The best sparse model of a level in 16 bits, and in 4."""

    def losses_of(way: str) -> list[float | None]:
        return [model.above(f"{way} {form}", goal.level, way) if model else None for form in FOUR]

    ways = [way for way in goal.ways if any(loss is not None for loss in losses_of(way))]
    if model is None or not (way := model.best(ways, goal.level)):
        return [*[""] * (2 + len(FOUR)), goal.wish, NOT_MEASURED]
    cells, losses = [WAYS[way].title, model.cell(way, goal.level, ends=False)], losses_of(way)
    for form, loss in zip(FOUR, losses, strict=True):
        shown = model.cell(f"{way} {form}", goal.level, ends=False)
        cells.append("" if loss is None else f"{shown}, {percent(loss, 2)}")
    outcome, ours = NOT_MEASURED, [loss for loss in losses[: len(OURS_OF_FOUR)] if loss is not None]
    if ours:
        over = 100 * (min(ours) - goal.value)
        outcome = "met" if over <= 0 else f"**missed by {over:.2f} points**"
    return [*cells, goal.wish, outcome]


def _model(model: BitsFigures) -> str:
    figures, rows = model.figures, model.figures.rows_of()
    last = ""
    if steps := {row["steps"] for row in rows if row["steps"]}:
        rates = joined({row["lr"] for row in rows if "lr" in row}, "g")
        last = f" Recovered in {joined(steps)} steps of {figures.settings['batch']}, learning rates {rates}."
    peers = {form.peer: {row[form.peer] for row in rows if form.peer in row} for form in FORMS.values() if form.peer}
    last += "".join(f" {peer} {joined(versions)}." for peer, versions in peers.items() if versions)
    last += "" if any(peers.values()) else " No quantiser of others was installed there."
    seconds = sum(row["elapsed"] + (0 if " " in row["way"] else row["seconds"]) for row in rows)
    last += f" Making and evaluating all of these took {seconds / 60:,.0f} minutes of one process."
    headings = ["weights", "left out", "stored in", "bits a weight", "MB", figures.metric, "beside dense", "s"]
    lines = []
    for arm in model.arms:
        name = f"{arm.way} {arm.form}".rstrip()
        if here := [*figures.rows.get((name, arm.level), {}).values()]:
            stored = ", ".join(filter(None, (f"{arm.num_bits} bits", arm.rounding)))
            megabytes = statistics.fmean(row["num_bytes"] for row in here) / 1e6
            seconds = statistics.median(row["seconds"] for row in here)
            cells = [f"{arm.bits:.3f}", f"{megabytes:.2f}", figures.cell(name, arm.level), percent(arm.loss, 2)]
            about = [WAYS[arm.way].title, level_name(arm.level) if arm.level else "", stored]
            lines.append([*about, *cells, f"{seconds:.1f}" if seconds else ""])
    first = f"{rows[0]['num_weights'] / 1e6:,.1f} M weights in the dense model's blocks. "
    return figures.section(markdown_table(headings, lines, words=(0, 2)), first=first, last=last)
