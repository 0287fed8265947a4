"""The tables of ``docs/evidence/repair.md`` from the records of ``repair`` and ``repair-quality``."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from prunus.lab.study.tables import markdown_table

from .benchmark import Record, Row, newest_records, table_of
from .costs import PARTS
from .figures import NOT_MEASURED, Goal, ModelFigures, by_level, figures_of, goals_table, joined, outcome_of
from .repair_study import WAYS, WHAT
from .study import share_of

BASE = "repair"  # the way that choices are compared with
CHOICES = [way for way in WAYS if way not in ("magnitude", "wanda", "llmc-wanda", "llmc-sparsegpt", BASE)]
TITLES = {"dense": "dense"} | {name: way.title for name, way in WAYS.items()}
SOLVING = ("factorisations", "iterations", "refine")
GOALS = [  # of GPT-51M times the dense model's
    Goal("stories15M", "50", 3.3),
    Goal("stories15M", "70", 6.0),
    Goal("stories15M", "2:4", 4.2),
    Goal("SmolLM2-135M", "50", 46.0),
    Goal("SmolLM2-135M", "70", 90.0),
    Goal("ResNet-20", "70", 0.9),
    Goal("GPT-51M", "80", 1.06),
]
SEVEN_B, SEVENTY_B = "32 blocks of Mistral-7B's shape", "4 blocks of Llama-3-70B's shape"
DEPTHS = {"Mistral-7B": 32, "Llama-3-70B": 80}  # blocks of the whole models
TIME_GOALS: dict[tuple[str, ...], dict[str, float]] = {  # model, with options that it may be run with: at most
    (SEVEN_B, f"{SEVEN_B}, offload"): {"seconds": 240, "peak_gib": 24},
    (f"{SEVEN_B}, tune", f"{SEVEN_B}, tune, offload", f"{SEVEN_B}, tune blocks"): {"seconds": 600},
    (SEVENTY_B, f"{SEVENTY_B}, offload"): {"seconds": 160, "peak_gib": 40},
    ("stories15M",): {"seconds": 40, "solving": 1 / 3},
}
FORMS = {"seconds": "{:g} s", "peak_gib": "{:g} GiB", "solving": "solving at most {:.0%}"}


def read_figures(folder: Path) -> list[ModelFigures]:
    return figures_of(folder, WHAT)


def parts(folder: Path) -> dict[str, str]:
    models = read_figures(folder)
    timings = newest_records(folder, "repair")
    return {
        "goals": _goals(models),
        "models": "\n".join(map(_model, models)),
        "choices": _choices(models),
        "times": _times(timings),
        "blocks": table_of([*block_rows(timings)], BLOCK_COLUMNS),
    }


def _goals(models: Sequence[ModelFigures]) -> str:
    ways = ["wanda", "llmc-sparsegpt", "repair", "tuned"]

    def line(goal: Goal, model: ModelFigures | None) -> list[str]:
        if model is None:
            return [*[""] * 5, goal.wish, NOT_MEASURED]
        if model.name == "GPT-51M":
            goal = replace(goal, value=goal.value * model.dense)
        best = model.best((*CHOICES, BASE), goal.level)
        outcome = goal.outcome(model, best) if best else NOT_MEASURED
        if best:
            by = f"{TITLES[best]}: {model.number(model.mean(best, goal.level) or 0.0)}"
            outcome = f"met by {by}" if outcome == "met" else f"{outcome}; best is {by}"
        cells = [model.cell(way, goal.level, ends=False) for way in ways]
        return [model.number(model.dense), *cells, model.number(goal.value), outcome]

    return goals_table(GOALS, models, ["dense", *(TITLES[way] for way in ways)], line)


def _model(model: ModelFigures) -> str:
    versions = {row["llmcompressor"] for row in model.rows_of() if "llmcompressor" in row}
    last = f" llm-compressor {joined(versions)}." if versions else ""
    cost = {"zeros too many": _zeros_too_many, "s": _seconds}
    cost["record"] = lambda model, way: joined({row["record"] for row in model.rows_of(way)})
    return model.section(model.table(TITLES, cost), seeds="draws", last=last)


def _zeros_too_many(model: ModelFigures, way: str) -> str:
    """Zeros beyond the exact count, by level."""
    too_many = []
    for level in model.levels:
        here = model.rows.get((way, level), {}).values()
        counts = sorted({row["zeros"] - round(share_of(level) * row["num_weights"]) for row in here})
        ends = dict.fromkeys(f"{count:+,}" if count else "0" for count in (counts[:1] + counts[-1:]))
        too_many.append(" to ".join(ends) or "-")
    return ", ".join(too_many)


def _seconds(model: ModelFigures, way: str) -> str:
    """Of the newest record."""
    rows = model.rows_of(way)
    newest = max(row["record"] for row in rows)
    is_cpu = model.records[newest - 1]["settings"]["device"] == "cpu"
    key = "cpu_seconds" if is_cpu else "seconds"
    seconds = statistics.median(row[key] for row in rows if row["record"] == newest)
    return f"{seconds:.1f}{' of a CPU' * is_cpu}"


def _choices(models: Sequence[ModelFigures]) -> str:
    """Gains over plain repair, marked where they are clear, and how many are."""
    columns = [(model, level) for model, level in by_level(models) if model.values(BASE, level)]
    lines = []
    for way in CHOICES:
        gains = [model.gains(way, level, BASE) for model, level in columns]
        outcomes = [outcome_of(each) for each in gains if each]
        counts = [str(outcomes.count("better")), str(outcomes.count("worse")), str(len(outcomes))]
        if outcomes:
            lines.append([TITLES[way], *(model.gained(way, level, BASE, 1) for model, level in columns), *counts])
    headings = ["choice", *(model.title(level) for model, level in columns)]
    return markdown_table([*headings, "clearly better", "clearly worse", "of"], lines)


def _times(records: Sequence[Record]) -> str:
    headings = ["model", "machine", "s", "CPU s", "peak GiB", *PARTS, "other", "bound by", "solving", "goal", "outcome"]
    lines, goals = [], {weights: goal for names, goal in TIME_GOALS.items() for weights in names}
    for record in records:
        settings, weights, row = record["settings"], record["settings"]["weights"], record["rows"][0]
        row |= {"solving": sum(row.get(part, 0.0) for part in SOLVING) / row["seconds"]}
        name = f"{weights}, {settings['windows']} windows of {settings['length']}, {settings['dtype']}"
        measured = [f"{row[key]:.1f}" for key in ("seconds", "cpu_seconds", "peak_gib")]
        measured += [f"{row[part]:.1f}" if part in row else "" for part in (*PARTS, "other")]
        bound = max((*PARTS, "other"), key=lambda part: row.get(part, 0.0))
        measured += [f"{bound}, {row[bound] / row['seconds']:.0%}", f"{row['solving']:.0%}"]
        goal = goals.get(weights, {})
        missed = [key for key, limit in goal.items() if row[key] > limit]
        outcome = f"**missed**: {', '.join(missed)}" if missed else "met" if goal else ""
        lines.append([name, record["environment"]["machine"], *measured, _goal_words(goal), outcome])
    for names, goal in TIME_GOALS.items():
        if not {record["settings"]["weights"] for record in records} & {*names}:
            lines.append([names[0], *[""] * (len(headings) - 3), _goal_words(goal), NOT_MEASURED])
    return markdown_table(headings, lines, words=(1, len(headings) - 1))


def _goal_words(goal: dict[str, float]) -> str:
    return ", ".join(FORMS[key].format(limit) for key, limit in goal.items())


BLOCK_COLUMNS = (
    "model | repair, s a block = repair:.2f | tuning, s a block = tune:.2f | peak GiB = peak_gib:.1f | "
    "blocks of the whole model = depth | s at that rate = whole:,.0f"
)


def block_rows(records: Sequence[Record]) -> Iterator[Row]:
    """What a block takes, in models of different numbers of them."""
    for record in records:
        if num := record["settings"].get("blocks"):
            row = record["rows"][0]
            repair, tune = (row["seconds"] - row.get("tune", 0.0)) / num, row["tune"] / num if "tune" in row else None
            weights = record["settings"]["weights"]
            depth = next(depth for shape, depth in DEPTHS.items() if shape in weights)
            rates = {"repair": repair, "tune": tune, "depth": depth, "whole": depth * row["seconds"] / num}
            yield {"blocks": num, "model": weights, "peak_gib": row["peak_gib"], **rates}
