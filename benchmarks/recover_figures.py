"""The tables of ``docs/evidence/recover.md`` from the records of ``recover-study``."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from prunus.lab.study.tables import markdown_table
from prunus.recovery.plan import LONGER

from .benchmark import Row
from .figures import LEARNING, NOT_MEASURED, Goal, ModelFigures, by_level, figures_of, goals_table, joined
from .recover_study import STARTS, WAYS, WHAT
from .study import EVALUATIONS

BASE = "recover"  # the way that others are compared with
GIVEN, AT = "given", " at "  # the reason for a rate that no trials found, and what stands before it in a way's name
TITLES = STARTS | {name: way.title for name, way in WAYS.items()}
GOALS = [
    Goal("GPT-51M", "50", 0.002, (BASE,), is_share=True),
    Goal("GPT-51M", "80", 0.018, (BASE,), is_share=True),
    Goal("GPT-51M", "90", 0.06, (BASE,), is_share=True),
    Goal("GPT-51M", "80", 0.015, ("trained-recover",), is_share=True),
    Goal("SmolLM2-135M", "50", 41.5, (BASE,)),
    Goal("SmolLM2-135M", "70", 50.0, (BASE,)),
    Goal("ResNet-20", "80", 0.913, (BASE,)),
    Goal("ResNet-20", "90", 0.905, (BASE,)),
]


def read_figures(folder: Path) -> list[ModelFigures]:
    """The study, a model at a time; runs with a given learning rate are ways of their own, ``WAY at RATE``."""

    def way(row: Row) -> str:
        return f"{row['way']}{AT}{row['lr']:g}" if row.get("lr_reason") == GIVEN else row["way"]

    return figures_of(folder, WHAT, way)


def parts(folder: Path) -> dict[str, str]:
    models = read_figures(folder)
    return {
        "goals": _goals(models),
        "rates": _rates(models),
        "chosen": _chosen(models),
        "models": "\n".join(map(_model, models)),
        "choices": _choices(models),
        "curves": _curves(models),
        "budgets": _budgets(models),
    }


def _goals(models: Sequence[ModelFigures]) -> str:
    """What runs reach whose learning rates trials found, beside dense models and starts of the same seeds."""
    headings = ["dense", "start", "before", "beside dense", "recovered", "beside dense"]

    def line(goal: Goal, model: ModelFigures | None) -> list[str]:
        (way,), level = goal.ways, goal.level
        start = WAYS[way].start
        if model is None or not (seeds := model.values(way, level)):
            return ["", TITLES[start], "", "", "", "", goal.wish, NOT_MEASURED]
        records = [record | {"rows": [r for r in record["rows"] if r["seed"] in seeds]} for record in model.records]
        same = replace(model, records=[record for record in records if record["rows"]])
        before = [same.cell(start, level, ends=False), same.beside(start, level)]
        reached = [model.cell(way, level), model.beside(way, level)]
        dense = same.cell("dense", "", ends=False)
        return [dense, TITLES[start], *before, *reached, goal.wish, goal.outcome(model, way)]

    return goals_table(GOALS, models, headings, line, words=(0, 2))


def _rates(models: Sequence[ModelFigures]) -> str:
    """What given learning rates reach beside trials; the outcome is the best of those that the most seeds have."""
    names = {way for model in models for way, _ in model.rows if AT in way and "," not in way}  # the longest runs
    rates = sorted({name.partition(AT)[2] for name in names}, key=float)
    headings, lines = ["model and level", "way", "by trials", *rates, "goal", "outcome"], []
    goals = {(goal.model, goal.level, goal.ways): goal for goal in GOALS}
    for model in models:
        for way, level in product(WAYS, model.levels):
            ways = [way, *(f"{way}{AT}{rate}" for rate in rates)]
            losses = {one: loss for one in ways if (loss := model.above(one, level)) is not None}
            if given := losses.keys() & names:
                best = min(given, key=lambda one: (-len(model.values(one, level)), losses[one]))
                pairs = ((model.cell(one, level, ends=False), model.beside(one, level, 2)) for one in ways)
                cells = [", ".join(filter(None, pair)) for pair in pairs]
                goal = goals.get((model.name, level, (way,)))
                end = [goal.wish, goal.outcome(model, best)] if goal else ["", ""]
                lines.append([model.title(level), TITLES[way], *cells, *end])
    return markdown_table(headings, lines, words=(0, 1, len(headings) - 1))


def _chosen(models: Sequence[ModelFigures]) -> str:
    """What runs reach that took a multiple of the rate of their best trial, each beside its own dense model."""
    headings, lines = ["model and level", "way", "steps", "learning rate", "dense", "reached", "beside dense"], []
    for model in models:
        for way, level, steps in product(WAYS, ["", *model.levels], sorted({r["steps"] for r in model.rows_of()})):
            names = [name for name, at in model.rows if name.partition(",")[0] == way and at == level]
            rows = [row for name in names for row in model.rows[name, level].values() if row["steps"] == steps]
            rows = [row for row in rows if row.get("lr_reason", "").startswith(f"{LONGER:g} times")]
            if rows:
                dense = [row for row in model.rows_of("dense") if row["seed"] in {row["seed"] for row in rows}]
                same = replace(model, records=[{**model.records[0], "rows": [*dense, *rows]}])
                name, rates = rows[0]["way"], joined({row["lr"] for row in rows}, "g")
                cells = [same.cell("dense", "", ends=False), same.cell(name, level), same.beside(name, level)]
                lines.append([model.title(level) if level else model.name, TITLES[way], f"{steps:,}", rates, *cells])
    return markdown_table(headings, lines, words=(0, 1))


def _model(model: ModelFigures) -> str:
    learned = [row for row in model.rows_of() if "zeros_before" in row]
    num_kept = sum(row["zeros"] == row["zeros_before"] for row in learned)
    kept = f" The zeros before and after are equal in number and place in {num_kept} of {len(learned)} runs."
    learning = f", {model.settings['batch']} a step to learn from"
    return model.section(model.table(TITLES, LEARNING), learning=learning, last=kept)


def _choices(models: Sequence[ModelFigures]) -> str:
    """What other ways gain over repair and recovery by KL alone, seed by seed."""
    columns = [(model, level) for model, level in by_level(models) if model.values(BASE, level)]
    ways = {way: [model.gained(way, level, BASE, 2) for model, level in columns] for way in WAYS if way != BASE}
    lines = [[TITLES[way], *cells] for way, cells in ways.items() if any(cells)]
    return markdown_table(["way", *(model.title(level) for model, level in columns)], lines)


def _curves(models: Sequence[ModelFigures]) -> str:
    """Figures on the batches that choose the best state, means over seeds."""
    headings = ["model and level", "tokens or images", "before", *(f"{n}/{EVALUATIONS}" for n in range(1, EVALUATIONS))]
    lines = []
    for model in models:
        for way, level in product(WAYS, model.levels):
            rows = [*model.rows.get((way, level), {}).values()]
            if not (rows and WAYS[way].has_teacher):
                continue
            points = [*zip(*(row["curve"] for row in rows), strict=False), [row["teacher"] for row in rows]]
            is_text = model.metric == "perplexity"
            values = [[math.exp(p["loss"]) if is_text else p["accuracy"] for p in each] for each in points]
            cells = [model.number(statistics.fmean(each)) for each in values]
            lines.append([f"{model.title(level)}: {TITLES[way]}", f"{max(row['tokens'] for row in rows):,}", *cells])
    return markdown_table([*headings, "end", "teacher"], lines)


def _budgets(models: Sequence[ModelFigures]) -> str:
    """Separate runs of other lengths, each with its own schedule, as they are evaluated."""
    lines = []
    for model, level in by_level(models):
        ways = {way for way, at in model.rows if at == level and way.partition(",")[0] == BASE}
        runs = {next(iter(model.rows[way, level].values()))["steps"]: way for way in ways}
        if len(runs) > 1:
            cells = [f"{steps:,} steps: {model.cell(way, level)}" for steps, way in sorted(runs.items())]
            lines.append([model.title(level), model.cell("repair", level, ends=False), "; ".join(cells)])
    return markdown_table(["model and level", "repaired", "recovered"], lines, words=(0, 2))
