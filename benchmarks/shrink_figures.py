"""The tables of ``docs/evidence/shrink.md`` from the records of ``shrink-study``, ``shrink-time`` and its speed."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .benchmark import Record, newest_records
from .recover_figures import above, beside, longest
from .repair_figures import ModelFigures, figures_of
from .shrink_speed import TABLES
from .shrink_study import PEERS, PROMPTS, RECOVERED, WAYS, WHAT, title_of
from .study import level_name

SMALLER = "gpt2-rates"  # the study whose dense runs of other sizes were trained from the start
TRAINED_SMALL = {"25": "dense, width 448", "50": "dense, 4 blocks"}  # by level: an arm of it of about that size
OF = {
    "units": "of neurons and head groups",
    "weights": "of the blocks' weights",
    "multiplications": "of multiplications",
}


@dataclass(frozen=True)
class Goal:
    """What a way should reach at most; of ``relative`` ones the share above its dense model, or points below it."""

    model: str
    level: str
    ways: tuple[str, ...]  # of which the best counts
    value: float
    relative: bool = False


OURS = ("solved", "tuned", "measured")
LEARNED = tuple(f"{way}{RECOVERED}" for way in OURS)
GOALS = [
    *(Goal("stories15M", level, ("solved",), value) for level, value in (("1/6", 3.8), ("1/3", 5.6), ("1/2", 9.9))),
    *(Goal("stories15M", level, ("tuned",), value) for level, value in (("1/6", 3.2), ("1/3", 4.2), ("1/2", 6.5))),
    Goal("SmolLM2-135M", "20", LEARNED, 45.0),
    Goal("SmolLM2-135M", "40", LEARNED, 55.0),
    Goal("GPT-51M", "25", LEARNED, 0.007, relative=True),
    Goal("GPT-51M", "50", LEARNED, 0.022, relative=True),
    *(
        Goal(model, level, LEARNED, value, relative=True)
        for model in ("ResNet-20", "ResNet-18")
        for level, value in (("30", 0.005), ("50", 0.015))
    ),
]


def read_figures(folder: Path) -> list[ModelFigures]:
    return [longest(model) for model in figures_of(folder, WHAT)]


def parts(folder: Path, studies: Path) -> dict[str, str]:
    """What the page shows between its marks."""
    models = read_figures(folder)
    return {
        "goals": _goals(models),
        "peers": _peers(models),
        "models": "\n".join(map(_model, models)) or "Nothing is measured yet.",
        "small": _trained_small(models, studies),
        "texts": "\n\n".join(filter(None, map(_texts, models))) or "Nothing is written yet.",
        **{name: _speeds(folder, f"shrink {name}") for name in ("time", "speed")},
    }


# Goals and peers


def _goals(models: Sequence[ModelFigures]) -> str:
    headings = ["model and level", "dense", "way", "reached", "beside dense", "goal", "outcome"]
    by_name, lines = {model.name: model for model in models}, []
    for goal in GOALS:
        model = by_name.get(goal.model)
        best = best_of(model, goal.ways, goal.level) if model else None
        name, wish = f"{goal.model}, {level_name(goal.level)}", _wish(goal)
        if model is None or best is None:
            lines.append([name, "", title_of(goal.ways[0]), "", "", wish, "**not measured**"])
            continue
        reached = above(model, best, goal.level) if goal.relative else model.mean(best, goal.level)
        assert reached is not None
        missed = reached - goal.value
        far = f"{100 * missed:.1f} points" if goal.relative else f"{missed / goal.value:.1%}"
        cells = [model.cell("dense", "", ends=False), title_of(best), model.cell(best, goal.level)]
        outcome = "met" if missed <= 0 else f"**missed by {far}**"
        lines.append([name, *cells, beside(model, best, goal.level), wish, outcome])
    return markdown_table(headings, lines, words=(0, 2, len(headings) - 1))


def _wish(goal: Goal) -> str:
    if not goal.relative:
        return f"{goal.value:g}"
    return f"{-100 * goal.value:+.1f} points" if goal.model.startswith("ResNet") else f"{goal.value:+.1%}"


def best_of(model: ModelFigures, ways: Sequence[str], level: str) -> str | None:
    """The way with the best mean, of those that were measured."""
    means = {way: mean for way in ways if (mean := model.mean(way, level)) is not None}
    sign = -1 if model.metric == "accuracy" else 1
    return min(means, key=lambda way: sign * means[way], default=None)


def increase(model: ModelFigures, way: str, level: str) -> float | None:
    """What a way adds to the log loss of its dense model, or takes off its accuracy: the mean over seeds."""
    values, dense = model.values(way, level), model.values("dense", "")
    if model.metric == "accuracy":
        each = [dense[seed] - value for seed, value in values.items() if seed in dense]
    else:
        each = [math.log(value / dense[seed]) for seed, value in values.items() if seed in dense]
    return statistics.fmean(each) if each else None


def _peers(models: Sequence[ModelFigures]) -> str:
    """What the best of the others adds to the loss, and what shrink adds."""
    headings = ["model and level", "best of the others", "adds", "best with our refit", "adds"]
    headings += [f"{title_of(way).strip('*')} adds" for way in OURS] + ["smallest of all"]
    lines = []
    pairs = [(model, level) for model in models for level in model.levels]
    for model, level in pairs:
        peer = best_of(model, PEERS, level)
        refit = best_of(model, [way for way in WAYS if way.endswith("-refit")], level)
        if peer is None:
            continue
        first = increase(model, peer, level)
        cells = [text for way in (peer, refit) for text in (title_of(way) if way else "", _added(model, way, level))]
        cells += [_added(model, way, level, first) for way in OURS]
        best = best_of(model, [*WAYS], level)
        lines.append([f"{model.name}, {level_name(level)}", *cells, title_of(best) if best else ""])
    return markdown_table(headings, lines, words=(0, 1, 3, len(headings) - 1))


def _added(model: ModelFigures, way: str | None, level: str, beside: float | None = None) -> str:
    added = increase(model, way, level) if way else None
    if added is None:
        return ""
    share = f" ({added / beside:.0%})" if beside else ""
    return (f"{100 * added:.2f} points" if model.metric == "accuracy" else f"{added:.3f} nats") + share


# Tables by model


def _model(model: ModelFigures) -> str:
    settings, levels = model.settings, model.levels
    unit, seeds = settings["unit"], sorted({seed for rows in model.rows.values() for seed in rows})
    about = f"{settings['about']}. " if settings["about"] else ""
    about += f"Levels are shares {OF[settings['of']]}. Calibrated on {settings['samples']} {unit}, seeds "
    about += f"{', '.join(map(str, seeds))}; {model.metric} on {settings['held_out']:,} held-out {unit}."
    rows = [row for by_seed in model.rows.values() for row in by_seed.values()]
    about += f" What learns reads {settings['batch']} a step." if any(row["steps"] for row in rows) else ""
    versions = sorted({row["torch_pruning"] for row in rows if "torch_pruning" in row})
    about += f" Torch-Pruning {', '.join(versions)}." if versions else ""
    headings = ["way", *map(level_name, levels), "what is left", "steps", "learning rate", "s"]
    ways = [way for base in WAYS for way in (base, f"{base}{RECOVERED}")]
    lines = [["dense", *[model.cell("dense", "")] * len(levels), "", "", "", ""]]
    for way in (way for way in ways if any(way == measured for measured, _ in model.rows)):
        lines.append([title_of(way), *(model.cell(way, level) for level in levels), *_cost(model, way)])
    table = markdown_table(headings, lines)
    return f"### {model.name}\n\n{about}\n\n{model.origins}\n\n{table}\n{_mixtures(model)}"


def _cost(model: ModelFigures, way: str) -> list[str]:
    """What is left of the weights, or of the multiplications, by level; steps, learning rates, median of seconds."""
    left = []
    for level in model.levels:
        shares = {share for row in model.rows.get((way, level), {}).values() if (share := _left(model, row))}
        left.append(" to ".join(f"{share:.1%}" for share in sorted({min(shares), max(shares)})) if shares else "-")
    rows = [row for (name, _), by_seed in model.rows.items() if name == way for row in by_seed.values()]
    steps = sorted({row["steps"] for row in rows if row["steps"]})
    rates = sorted({row["lr"] for row in rows if "lr" in row})
    seconds = f"{statistics.median(row['seconds'] for row in rows):.1f}"
    return [", ".join(left), ", ".join(f"{num:,}" for num in steps), ", ".join(f"{rate:g}" for rate in rates), seconds]


def _left(model: ModelFigures, row: dict) -> float | None:
    if "multiplications" in row:
        return row["multiplications"] / next(iter(model.rows["dense", ""].values()))["multiplications"]
    return row["weights"] / row["weights_before"] if "weights_before" in row else None


def _mixtures(model: ModelFigures) -> str:
    """What the measured split tried: layers removed, and the distance from the dense model."""
    lines = []
    for level in model.levels:
        for seed, row in sorted(model.rows.get(("measured", level), {}).items()):
            tried = ", ".join(f"{layers} layers {distance:.4g}" for layers, distance in row["mixtures"])
            lines.append(f"- {level_name(level)}, seed {seed}: {tried}; removed: {', '.join(row['removed'])}")
    head = '\nMixtures of depth and width that `split="measured"` tried, and their distance from the dense model:\n\n'
    return head + "\n".join(lines) + "\n" if lines else ""


def _trained_small(models: Sequence[ModelFigures], studies: Path) -> str:
    """Recovered models beside smaller ones that were trained from the start."""
    arms = {row["arm"]: row for row in json.loads((studies / SMALLER / "study_result.json").read_text())["rows"]}
    lines = []
    for model in (model for model in models if model.name == "GPT-51M"):
        for level in (level for level in model.levels if TRAINED_SMALL.get(level) in arms):
            best, arm = best_of(model, LEARNED, level), arms[TRAINED_SMALL[level]]
            ours = [title_of(best), model.cell(best, level)] if best else ["", ""]
            lines.append([f"{model.name}, {level_name(level)}", *ours, arm["arm"], f"{arm['mean']:.2f}"])
    return markdown_table(
        ["model and level", "way", "perplexity", "trained from the start", "perplexity"], lines, (1, 3)
    )


def _texts(model: ModelFigures) -> str:
    """What the dense model and the best recovered ones write, of the first seed."""
    blocks = []
    for level in ("", *model.levels):
        way = best_of(model, LEARNED, level) if level else "dense"
        rows = sorted(model.rows.get((way or "", level), {}).items())
        if not rows or "texts" not in rows[0][1]:
            continue
        title = f"{level_name(level)} removed, {title_of(way or '')}" if level else "dense"
        quotes = [f"> **{prompt}**{_quoted(text)}" for prompt, text in zip(PROMPTS, rows[0][1]["texts"], strict=True)]
        blocks.append(f"{model.name}, {title}:\n\n" + "\n>\n".join(quotes))
    return "\n\n".join(blocks)


def _quoted(text: str) -> str:
    """In one line, a sign for each run of line breaks."""
    text = re.sub(r"\s*\n\s*", " ⏎ ", text)
    return "".join(f"\\{letter}" if letter in "\\`*_<>|#[]" else letter for letter in f" {text}")


def _speeds(folder: Path, what: str) -> str:
    records: Iterator[Record] = (record for record in newest_records(folder) if record["what"] == what)
    return "\n".join(map(TABLES[what], records)) or "Nothing is measured yet."
