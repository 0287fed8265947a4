"""The tables of ``docs/evidence/recover.md`` from the records of ``recover-study``."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .benchmark import Record, Row
from .learning import EVALUATIONS
from .recover_study import STARTS, WAYS, WHAT
from .repair_figures import ModelFigures, figures_of, outcome_of
from .study import gains, level_name

BASE = "recover"  # the way that others are compared with
TITLES = {start: title for start, (title, _) in STARTS.items()} | {name: way.title for name, way in WAYS.items()}


@dataclass(frozen=True)
class Goal:
    """What a model should reach: a perplexity or accuracy, or a share above its teacher's perplexity."""

    model: str
    level: str
    value: float
    way: str = BASE
    is_share: bool = False


GOALS = [
    Goal("GPT-51M", "50", 0.002, is_share=True),
    Goal("GPT-51M", "80", 0.018, is_share=True),
    Goal("GPT-51M", "90", 0.06, is_share=True),
    Goal("GPT-51M", "80", 0.015, "trained-recover", is_share=True),
    Goal("SmolLM2-135M", "50", 41.5),
    Goal("SmolLM2-135M", "70", 50.0),
    Goal("ResNet-20", "80", 0.913),
    Goal("ResNet-20", "90", 0.905),
]


def read_figures(folder: Path) -> list[ModelFigures]:
    """The study, a model at a time."""
    return [longest(model) for model in figures_of(folder, WHAT)]


def longest(model: ModelFigures) -> ModelFigures:
    """Of each way and level the runs with the most steps, others as ``WAY, STEPS``."""
    most: dict[tuple[str, str], int] = {}
    for row in (row for record in model.records for row in record["rows"]):
        key = row["way"], row["level"]
        most[key] = max(most.get(key, 0), row["steps"])
    return replace(model, records=[_named(record, most) for record in model.records])


def _named(record: Record, most: dict[tuple[str, str], int]) -> Record:
    def way(row: Row) -> str:
        is_longest = row["steps"] == most[row["way"], row["level"]]
        return row["way"] if is_longest else f"{row['way']}, {row['steps']}"

    return record | {"rows": [row | {"way": way(row)} for row in record["rows"]]}


def parts(folder: Path) -> dict[str, str]:
    """What the page shows between its marks."""
    models = read_figures(folder)
    return {
        "goals": _goals(models),
        "models": "\n".join(map(_model, models)),
        "choices": _choices(models),
        "curves": _curves(models),
        "budgets": _budgets(models),
    }


def above(model: ModelFigures, way: str, level: str) -> float | None:
    """The mean share by which a way's perplexity is above that of its own dense model, or the points of accuracy."""
    pairs = gains(model.values(way, level), model.values("dense", ""), model.metric)
    return -statistics.fmean(pairs) / 100 if pairs else None


def beside(model: ModelFigures, way: str, level: str) -> str:
    share = above(model, way, level)
    if share is None:
        return ""
    return f"{share:+.1%}" if model.metric == "perplexity" else f"{-100 * share:+.2f} points"


def _goals(models: Sequence[ModelFigures]) -> str:
    headings = ["model and level", "dense", "start", "before", "beside dense"]
    headings += ["recovered", "beside dense", "goal", "outcome"]
    by_name, lines = {model.name: model for model in models}, []
    for goal in GOALS:
        start, model = WAYS[goal.way].start, by_name.get(goal.model)
        wish = f"{goal.value:+.1%}" if goal.is_share else f"{goal.value:.1%}" if goal.value < 1 else f"{goal.value:g}"
        cells = [f"{goal.model}, {level_name(goal.level)}", "", STARTS[start][0], "", "", "", "", wish]
        mean = model.mean(goal.way, goal.level) if model else None
        outcome = "**not measured**"
        if model is not None and mean is not None:
            cells[1] = model.cell("dense", "", ends=False)
            cells[3:5] = model.cell(start, goal.level, ends=False), beside(model, start, goal.level)
            cells[5:7] = model.cell(goal.way, goal.level), beside(model, goal.way, goal.level)
            reached = above(model, goal.way, goal.level) if goal.is_share else mean
            assert reached is not None
            missed = (reached - goal.value) * (1 if model.metric == "perplexity" else -1)
            far = f"{100 * missed:.1f} points" if goal.value < 1 else f"{missed / goal.value:.1%}"
            outcome = "met" if missed <= 0 else f"**missed by {far}**"
        lines.append([*cells, outcome])
    return markdown_table(headings, lines, words=(0, 2, len(headings) - 1))


def _model(model: ModelFigures) -> str:
    settings, levels = model.settings, model.levels
    unit = settings["unit"]
    seeds = ", ".join(map(str, sorted({seed for rows in model.rows.values() for seed in rows})))
    about = f"{settings['about']}. " if settings["about"] else ""
    about += f"Calibrated on {settings['samples']} {unit}, {settings['batch']} a step to learn from, seeds {seeds}; "
    learned = [row for rows in model.rows.values() for row in rows.values() if "zeros_before" in row]
    num_kept = sum(row["zeros"] == row["zeros_before"] for row in learned)
    about += f"{model.metric} on {settings['held_out']:,} held-out {unit}. "
    about += f"The zeros before and after are equal in number and place in {num_kept} of {len(learned)} runs."
    headings, lines = ["way", *map(level_name, levels), "steps", "learning rate", "s"], []
    for way in (way for way in TITLES if any(way == measured for measured, _ in model.rows)):
        cells = [model.cell(way, level) or model.cell(way, "") for level in levels]
        lines.append([TITLES[way], *cells, *_cost(model, way)])
    return f"### {model.name}\n\n{about}\n\n{model.origins}\n\n{markdown_table(headings, lines)}\n"


def _cost(model: ModelFigures, way: str) -> list[str]:
    """Steps, learning rates and the median of the seconds; dense models take none."""
    rows = [row for (name, _), by_seed in model.rows.items() if name == way for row in by_seed.values()]
    if way == "dense":
        return ["", "", ""]
    steps = sorted({row["steps"] for row in rows if row["steps"]})
    rates = sorted({row["lr"] for row in rows if "lr" in row})
    seconds = f"{statistics.median(row['seconds'] for row in rows):.1f}" if way != "trained" else ""
    return [", ".join(f"{num:,}" for num in steps), ", ".join(f"{rate:g}" for rate in rates), seconds]


def _choices(models: Sequence[ModelFigures]) -> str:
    """What other ways gain over repair and recovery by KL alone, seed by seed."""
    columns = [(model, level) for model in models for level in model.levels if model.mean(BASE, level) is not None]
    lines = []
    for way in (way for way in WAYS if way != BASE):
        cells = []
        for model, level in columns:
            values = model.values(way, level) or model.values(way, "")
            each = gains(values, model.values(BASE, level), model.metric)
            sign = {"better": "**", "worse": "*"}.get(outcome_of(each), "")
            cells.append(f"{sign}{statistics.fmean(each):+.2f}{sign}" if each else "")
        if any(cells):
            lines.append([TITLES[way], *cells])
    return markdown_table(["way", *(f"{model.name}, {level_name(level)}" for model, level in columns)], lines)


def _curves(models: Sequence[ModelFigures]) -> str:
    """Figures on the batches that choose the best state, means over seeds."""
    headings = ["model and level", "tokens or images", "before", *(f"{n}/{EVALUATIONS}" for n in range(1, EVALUATIONS))]
    lines = []
    for model in models:
        key = "accuracy" if model.metric == "accuracy" else "perplexity"
        for way, level in ((way, level) for way in WAYS for level in model.levels if WAYS[way].has_teacher):
            rows = [*model.rows.get((way, level), {}).values()]
            if not rows:
                continue
            curves = [[_figure(point, key) for point in row["curve"]] for row in rows]
            teacher = statistics.fmean(_figure(row["teacher"], key) for row in rows)
            means = [statistics.fmean(points) for points in zip(*curves, strict=False)]
            cells = [model.number(mean) for mean in [*means, teacher]]
            name = f"{model.name}, {level_name(level)}: {TITLES[way]}"
            lines.append([name, f"{max(row['tokens'] for row in rows):,}", *cells])
    return markdown_table([*headings, "end", "teacher"], lines)


def _figure(point: Row, key: str) -> float:
    return point["accuracy"] if key == "accuracy" else math.exp(point["loss"])


def _budgets(models: Sequence[ModelFigures]) -> str:
    """Separate runs of other lengths, each with its own schedule, as they are evaluated."""
    lines = []
    for model in models:
        for level in model.levels:
            ways = sorted({way for way, at in model.rows if at == level and way.partition(",")[0] == BASE})
            runs = {next(iter(model.rows[way, level].values()))["steps"]: way for way in ways}
            if len(runs) < 2:
                continue
            cells = [f"{steps:,} steps: {model.cell(way, level)}" for steps, way in sorted(runs.items())]
            before = model.cell("repair", level, ends=False)
            lines.append([f"{model.name}, {level_name(level)}", before, "; ".join(cells)])
    return markdown_table(["model and level", "repaired", "recovered"], lines, words=(0, 2))
