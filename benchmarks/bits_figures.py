"""The tables and the answer of ``docs/evidence/bits.md`` from the records of ``bits-study``."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .bits_forms import FORMS, OURS
from .bits_study import WAYS, WHAT
from .recover_figures import above, longest
from .repair_figures import ModelFigures, figures_of
from .shrink_figures import SMALLER
from .study import SLIGHT, gains, level_name

ORDER = ("GPT-51M", "SmolLM2-135M", "stories15M")
GOAL = 0.003  # what 4 bits may add to the perplexity of 16 bits
GOAL_LEVELS = ("50", "80")
FOUR = {"4": "4 bits", "4-together": "while pruning", "4-gptq": "GPTQ alone", "4-nearest": "nearest"}
OF_GOAL = 2  # of these are ours
SPARSE = ("repair", "recover", "trained", "trained-recover")
SHRUNK = ("shrink", "shrink-recover")
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
NOTHING = "Nothing is measured yet."


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
    def title(self) -> str:
        """As a user would say it."""
        kind = "" if self.way == "dense" else f"{level_name(self.level)} {WAYS[self.way].title} "
        return f"{kind}in {form_title(self.form)}"


def form_title(form: str) -> str:
    if not form:
        return "16 bits"
    rounding = FORMS[form].rounding
    return f"{FORMS[form].bits} bits" + (f", {rounding}" if rounding != OURS else "")


@dataclass(frozen=True)
class BitsFigures:
    """All records of one model."""

    figures: ModelFigures
    studies: Path

    @cached_property
    def arms(self) -> list[Arm]:
        arms = []
        for name, level in self.figures.rows:
            way, _, form = name.partition(" ")
            loss = above(self.figures, name, level)
            if way in WAYS and (form in FORMS or not form) and loss is not None:
                arms.append(Arm(way, level, form, self.mean(name, level, "bits_a_weight"), loss))
        if self.figures.name == ORDER[0] and not any(arm.way == "small" for arm in arms):
            arms += smaller_arms(self.studies / SMALLER)
        order = [*WAYS], ["", *FORMS]
        return sorted(arms, key=lambda arm: (order[0].index(arm.way), arm.level, order[1].index(arm.form)))

    def mean(self, name: str, level: str, key: str) -> float:
        return statistics.fmean(row[key] for row in self.figures.rows[name, level].values())

    def scopes(self) -> Iterator[tuple[str, list[Arm]]]:
        """Arms by what a user has; a scope holds those before it, and is left out where it adds none."""
        ways: list[str] = []
        for name, more in SCOPES.items():
            ways += more
            if any(arm.way in more for arm in self.arms):
                yield name, [arm for arm in self.arms if arm.way in ways]


def smaller_arms(study: Path) -> list[Arm]:
    """Smaller dense models of another study, which were trained from the start on the same text, in 16 bits."""
    rows = {row["arm"]: row for row in json.loads((study / "study_result.json").read_text())["rows"]}
    runs = [json.loads(line) for line in (study / "runs.jsonl").read_text().splitlines()]
    sizes = {run["cell.json"]["arm"]: run["result.json"]["num_prunable"] for run in runs}
    dense, arms = dict(zip(rows["dense"]["seeds"], rows["dense"]["values"], strict=True)), []
    for name in ("dense, width 448", "dense, width 384", "dense, 4 blocks", "dense, 2 blocks"):
        share = sizes[name] / sizes["dense"]
        each = gains(dict(zip(rows[name]["seeds"], rows[name]["values"], strict=True)), dense, "perplexity")
        arms.append(Arm("small", f"{100 * (1 - share):.0f}", "", 16 * share, -statistics.fmean(each) / 100))
    return arms


def read_figures(folder: Path, studies: Path) -> list[BitsFigures]:
    models = [BitsFigures(longest(model), studies) for model in figures_of(folder, WHAT)]
    return sorted(models, key=lambda model: [model.figures.name != name for name in ORDER])


def parts(folder: Path, studies: Path) -> dict[str, str]:
    """What the page shows between its marks."""
    models = read_figures(folder, studies)
    return {
        "answer": answer(models),
        "bands": "\n\n".join(map(_bands, models)) or NOTHING,
        "goals": _goals(models),
        "models": "\n".join(map(_model, models)) or NOTHING,
    }


# The answer


def frontier(arms: Sequence[Arm]) -> list[Arm]:
    """Arms from many bits to few; each is better than all with fewer bits, by more than anybody would miss.

    Those of one kind that are best only in a narrow range are left out.
    """
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
    up_to = None
    for verb, group in groupby(frontier(arms), key=lambda arm: arm.verb):
        best = [*group]
        low = best[-1].bits
        name = f"above {low:.2f} bits a weight" if up_to is None else f"from {low:.2f} to {up_to:.2f}"
        ranges.append((f"{name} **{verb}**", best))
        up_to = low
    return ranges


def answer(models: Sequence[BitsFigures]) -> str:
    """A sentence for each model, of all that was measured."""
    lines = []
    for model in models:
        ranges = bands(model.arms)
        said = "; ".join(f"{what} ({_losses(best)})" for what, best in ranges)
        least = min(best[-1].bits for _, best in ranges)
        is_end = any(arm.bits < least for arm in model.arms)
        end = f"all that was measured loses more than {USABLE:.0%}" if is_end else "nothing was measured"
        lines.append(f"- {model.figures.name}: {said}; below {least:.2f} {end}.")
    return "\n".join(lines) or NOTHING


def _losses(arms: Sequence[Arm]) -> str:
    return " to ".join(dict.fromkeys(percent(arm.loss) for arm in (arms[0], arms[-1])))


def percent(share: float, digits: int = 1) -> str:
    """With a sign, and never a negative zero."""
    return f"{round(share, digits + 2) + 0.0:+.{digits}%}"


def _bands(model: BitsFigures) -> str:
    """The best arms of each range of bits, by what a user has."""
    lines, before = [f"**{model.figures.name}**"], None
    for scope, arms in model.scopes():
        ranges = bands(arms)
        lines += ["", f"{scope}: the same." if ranges == before else f"{scope}:"]
        for what, best in ranges if ranges != before else ():
            named = "; ".join(f"{arm.title}: {arm.bits:.2f} bits, {percent(arm.loss)}" for arm in best)
            lines += ["", f"- {what} ({named})"] if best is ranges[0][1] else [f"- {what} ({named})"]
        before = ranges
    return "\n".join(lines)


# Goals and tables


def _goals(models: Sequence[BitsFigures]) -> str:
    """The best sparse model of a level in 16 bits, and in 4."""
    headings = ["model and level", "way", "16 bits", *FOUR.values(), "goal", "outcome"]
    by_name, lines = {model.figures.name: model.figures for model in models}, []
    for name, level in ((name, level) for name in ORDER for level in GOAL_LEVELS):
        figures, cells = by_name.get(name), [""] * (2 + len(FOUR))
        ways = [way for way in SPARSE if figures and any(loss is not None for loss in _losses_of(figures, way, level))]
        outcome = "**not measured**"
        if figures and ways:
            way = min(ways, key=lambda way: figures.mean(way, level) or 0.0)
            losses = _losses_of(figures, way, level)
            cells = [WAYS[way].title, figures.cell(way, level, ends=False)]
            for form, lost in zip(FOUR, losses, strict=True):
                shown = figures.cell(f"{way} {form}", level, ends=False)
                cells.append("" if lost is None else f"{shown}, {percent(lost, 2)}")
            if ours := [loss for loss in losses[:OF_GOAL] if loss is not None]:
                over = 100 * (min(ours) - GOAL)
                outcome = "met" if over <= 0 else f"**missed by {over:.2f} points**"
        lines.append([f"{name}, {level_name(level)}", *cells, f"{GOAL:+.1%}", outcome])
    return markdown_table(headings, lines, words=(0, 1, len(headings) - 1))


def _losses_of(figures: ModelFigures, way: str, level: str) -> list[float | None]:
    return [loss_to(figures, f"{way} {form}", way, level) for form in FOUR]


def loss_to(figures: ModelFigures, way: str, beside: str, level: str) -> float | None:
    """The mean share by which a way's perplexity is above another's, over equal seeds."""
    pairs = gains(figures.values(way, level), figures.values(beside, level), figures.metric)
    return -statistics.fmean(pairs) / 100 if pairs else None


def _model(model: BitsFigures) -> str:
    figures, settings = model.figures, model.figures.settings
    rows = [row for by_seed in figures.rows.values() for row in by_seed.values()]
    unit, seeds = settings["unit"], ", ".join(map(str, sorted({row["seed"] for row in rows})))
    about = f"{settings['about']}. " if settings["about"] else ""
    about += f"{rows[0]['num_weights'] / 1e6:,.1f} M weights in the dense model's blocks. Calibrated on "
    about += (
        f"{settings['samples']} {unit}, seeds {seeds}; {figures.metric} on {settings['held_out']:,} held-out {unit}."
    )
    steps = sorted({row["steps"] for row in rows if row["steps"]})
    about += f" Recovered in {', '.join(map(str, steps))} steps of {settings['batch']}." if steps else ""
    peers = {form.peer: {row[form.peer] for row in rows if form.peer in row} for form in FORMS.values() if form.peer}
    about += "".join(f" {peer} {', '.join(sorted(versions))}." for peer, versions in peers.items() if versions)
    about += "" if any(peers.values()) else " No quantiser of others was installed there."
    seconds = sum(row["elapsed"] + (0 if " " in row["way"] else row["seconds"]) for row in rows)
    about += f" Making and evaluating all of these took {seconds / 60:,.0f} minutes of one process."
    headings = ["weights", "left out", "stored in", "bits a weight", "MB", figures.metric, "beside dense", "s"]
    lines = [_line(model, arm) for arm in model.arms if (_name(arm), arm.level) in figures.rows]
    return f"### {figures.name}\n\n{about}\n\n{figures.origins}\n\n{markdown_table(headings, lines, words=(0, 2))}\n"


def _name(arm: Arm) -> str:
    return f"{arm.way} {arm.form}".rstrip()


def _line(model: BitsFigures, arm: Arm) -> list[str]:
    name = _name(arm)
    seconds = statistics.median(row["seconds"] for row in model.figures.rows[name, arm.level].values())
    stored = f"{FORMS[arm.form].bits} bits, {FORMS[arm.form].rounding}" if arm.form else "16 bits"
    sizes = [f"{arm.bits:.3f}", f"{model.mean(name, arm.level, 'num_bytes') / 1e6:.2f}"]
    cells = [model.figures.cell(name, arm.level), percent(arm.loss, 2), f"{seconds:.1f}" if seconds else ""]
    return [WAYS[arm.way].title, level_name(arm.level) if arm.level else "", stored, *sizes, *cells]
