"""The tables of ``docs/evidence/shrink.md`` from the records of ``shrink-study``, ``shrink-time`` and its speed."""

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .benchmark import RecordTable, newest_records
from .costs import SHRINK_TABLE
from .decode import SHRUNK_TABLE
from .figures import (
    LEARNING,
    NOT_MEASURED,
    NOTHING,
    Goal,
    ModelFigures,
    by_level,
    figures_of,
    goals_table,
    joined,
    rows_of_study,
)
from .shrink_study import PEERS, PROMPTS, RECOVERED, WAYS, WHAT, title_of
from .study import level_name

SMALLER = "gpt2-rates"  # the study whose dense runs of other sizes were trained from the start
TRAINED_SMALL = {"25": "dense, width 448", "50": "dense, 4 blocks"}  # by level: an arm of it of about that size
OF = {
    "units": "of neurons and head groups",
    "weights": "of the blocks' weights",
    "multiplications": "of multiplications",
}
OURS = ("solved", "tuned", "measured")
LEARNED = tuple(f"{way}{RECOVERED}" for way in OURS)
TITLES = {way: title_of(way) for base in ("dense", *WAYS) for way in (base, f"{base}{RECOVERED}")}
GOALS = [
    *(Goal("stories15M", level, value, ("solved",)) for level, value in (("1/6", 3.8), ("1/3", 5.6), ("1/2", 9.9))),
    *(Goal("stories15M", level, value, ("tuned",)) for level, value in (("1/6", 3.2), ("1/3", 4.2), ("1/2", 6.5))),
    Goal("SmolLM2-135M", "20", 45.0, LEARNED),
    Goal("SmolLM2-135M", "40", 55.0, LEARNED),
    Goal("GPT-51M", "25", 0.007, LEARNED, is_share=True),
    Goal("GPT-51M", "50", 0.022, LEARNED, is_share=True),
    *(
        Goal(model, level, value, LEARNED, is_share=True)
        for model in ("ResNet-20", "ResNet-18")
        for level, value in (("30", 0.005), ("50", 0.015))
    ),
]


def read_figures(folder: Path) -> list[ModelFigures]:
    return figures_of(folder, WHAT)


def parts(folder: Path, studies: Path) -> dict[str, str]:
    models = read_figures(folder)
    return {
        "goals": goals_table(GOALS, models, ["dense", "way", "reached", "beside dense"], _line, words=(0, 2)),
        "peers": _peers(models),
        "models": "\n".join(map(_model, models)) or NOTHING,
        "small": _trained_small(models, studies),
        "texts": "\n\n".join(filter(None, map(_texts, models))) or "Nothing is written yet.",
        "time": _drawn(folder, "shrink time", SHRINK_TABLE),
        "speed": _drawn(folder, "shrink speed", SHRUNK_TABLE),
    }


# Goals and peers


def _line(goal: Goal, model: ModelFigures | None) -> list[str]:
    if model is None or not (best := model.best(goal.ways, goal.level)):
        return ["", TITLES[goal.ways[0]], "", "", goal.wish, NOT_MEASURED]
    cells = [model.cell("dense", "", ends=False), TITLES[best], model.cell(best, goal.level)]
    return [*cells, model.beside(best, goal.level), goal.wish, goal.outcome(model, best)]


def increase(model: ModelFigures, way: str, level: str) -> float | None:
    """What a way adds to the log loss of its dense model, or takes off its accuracy: the mean over seeds."""
    if model.metric == "accuracy":
        return model.above(way, level)
    values, dense = model.values(way, level), model.values("dense", "")
    each = [math.log(value / dense[seed]) for seed, value in values.items() if seed in dense]
    return statistics.fmean(each) if each else None


def _peers(models: Sequence[ModelFigures]) -> str:
    """What the best of the others adds to the loss, and what shrink adds."""
    headings = ["model and level", "best of the others", "adds", "best with our refit", "adds"]
    headings += [f"{TITLES[way].strip('*')} adds" for way in OURS] + ["smallest of all"]
    refits, lines = [way for way in WAYS if way.endswith("-refit")], []
    for model, level in by_level(models):
        peer, refit, best = (model.best(ways, level) for ways in (PEERS, refits, [*WAYS]))
        if peer is not None:
            cells = [text for way in (peer, refit) for text in (TITLES[way] if way else "", _added(model, way, level))]
            cells += [_added(model, way, level, increase(model, peer, level)) for way in OURS]
            lines.append([model.title(level), *cells, TITLES[best] if best else ""])
    return markdown_table(headings, lines, words=(0, 1, 3, len(headings) - 1))


def _added(model: ModelFigures, way: str | None, level: str, beside: float | None = None) -> str:
    added = increase(model, way, level) if way else None
    if added is None:
        return ""
    share = f" ({added / beside:.0%})" if beside else ""
    return (f"{100 * added:.2f} points" if model.metric == "accuracy" else f"{added:.3f} nats") + share


# Tables by model


def _model(model: ModelFigures) -> str:
    settings, rows = model.settings, model.rows_of()
    versions = {row["torch_pruning"] for row in rows if "torch_pruning" in row}
    last = f" What learns reads {settings['batch']} a step." if any(row["steps"] for row in rows) else ""
    last += f" Torch-Pruning {joined(versions)}." if versions else ""
    table = model.table(TITLES, {"what is left": _left} | LEARNING)
    return model.section(table, first=f"Levels are shares {OF[settings['of']]}. ", last=last) + _mixtures(model)


def _left(model: ModelFigures, way: str) -> str:
    """What is left of the multiplications, or of the weights, by level."""
    dense, left = model.rows_of("dense")[0], []
    for level in model.levels:
        shares = []
        for row in model.rows.get((way, level), {}).values():
            if "multiplications" in row:
                shares.append(row["multiplications"] / dense["multiplications"])
            elif "weights_before" in row:
                shares.append(row["weights"] / row["weights_before"])
        left.append(" to ".join(f"{share:.1%}" for share in sorted({min(shares), max(shares)})) if shares else "-")
    return ", ".join(left)


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
    arms, lines = rows_of_study(studies / SMALLER), []
    for model, level in by_level(models):
        if model.name == "GPT-51M" and (arm := arms.get((TRAINED_SMALL.get(level, ""), 0.0))):
            best = model.best(LEARNED, level)
            ours = [TITLES[best], model.cell(best, level)] if best else ["", ""]
            lines.append([model.title(level), *ours, arm["arm"], f"{arm['mean']:.2f}"])
    headings = ["model and level", "way", "perplexity", "trained from the start", "perplexity"]
    return markdown_table(headings, lines, (1, 3))


def _texts(model: ModelFigures) -> str:
    """What the dense model and the best recovered ones write, of the first seed."""
    blocks = []
    for level in ("", *model.levels):
        way = (model.best(LEARNED, level) or "") if level else "dense"
        rows = sorted(model.rows.get((way, level), {}).items())
        if rows and "texts" in rows[0][1]:
            written = zip(PROMPTS, rows[0][1]["texts"], strict=True)
            quotes = "\n>\n".join(f"> **{prompt}**{_quoted(text)}" for prompt, text in written)
            title = f"{level_name(level)} removed, {TITLES[way]}" if level else "dense"
            blocks.append(f"{model.name}, {title}:\n\n{quotes}")
    return "\n\n".join(blocks)


def _quoted(text: str) -> str:
    """In one line, a sign for each run of line breaks."""
    text = re.sub(r"\s*\n\s*", " ⏎ ", text)
    return "".join(f"\\{letter}" if letter in "\\`*_<>|#[]" else letter for letter in f" {text}")


def _drawn(folder: Path, what: str, table: RecordTable) -> str:
    return "\n".join(map(table, newest_records(folder, what))) or NOTHING
