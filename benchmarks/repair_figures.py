"""The tables of ``docs/evidence/repair.md`` from the records of ``repair`` and ``repair-quality``."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prunus.lab.study.tables import markdown_table, measured_on

from .benchmark import Record, Row, all_records, newest_records, table_of
from .repair import PARTS
from .repair_study import WAYS, WHAT
from .study import SLIGHT, finite, gains, level_name, share_of

BASE = "repair"  # the way that choices are compared with
CHOICES = [way for way in WAYS if way not in ("magnitude", "wanda", "llmc-wanda", "llmc-sparsegpt", BASE)]
SOLVING = ("factorisations", "iterations", "refine")
GOALS = {  # model, level: what it should reach; of GPT-51M times the dense model's
    ("stories15M", "50"): 3.3,
    ("stories15M", "70"): 6.0,
    ("stories15M", "2:4"): 4.2,
    ("SmolLM2-135M", "50"): 46.0,
    ("SmolLM2-135M", "70"): 90.0,
    ("ResNet-20", "70"): 0.9,
    ("GPT-51M", "80"): 1.06,
}
SEVEN_B = "32 blocks of Mistral-7B's shape"
TIME_GOALS: dict[tuple[str, ...], dict[str, float]] = {  # model, with options that it may be run with: at most
    (SEVEN_B, f"{SEVEN_B}, offload"): {"seconds": 240, "peak_gib": 24},
    (f"{SEVEN_B}, tune", f"{SEVEN_B}, tune, offload", f"{SEVEN_B}, tune blocks"): {"seconds": 600},
    ("stories15M",): {"seconds": 90, "solving": 1 / 3},
}
FORMS = {"seconds": "{:g} s", "peak_gib": "{:g} GiB", "solving": "solving at most {:.0%}"}


@dataclass(frozen=True)
class ModelFigures:
    """All records of one model; of several figures of one way, level and seed the newest counts."""

    name: str
    records: Sequence[Record]

    @cached_property
    def rows(self) -> dict[tuple[str, str], dict[int, Row]]:
        rows: dict[tuple[str, str], dict[int, Row]] = {}
        for number, record in enumerate(self.records, 1):
            for row in record["rows"]:
                rows.setdefault((row["way"], row["level"]), {})[row["seed"]] = row | {"record": number}
        return rows

    @property
    def settings(self) -> dict[str, Any]:
        return self.records[0]["settings"]

    @property
    def metric(self) -> str:
        return self.records[0]["rows"][0]["metric"]

    @property
    def dense(self) -> float:
        return next(iter(self.rows["dense", ""].values()))["value"]

    @property
    def levels(self) -> list[str]:
        return sorted({level for way, level in self.rows if level}, key=lambda level: (level == "2:4", share_of(level)))

    @property
    def num_seeds(self) -> int:
        return max(len(rows) for rows in self.rows.values())

    @property
    def origins(self) -> str:
        """The machine, day and file of each record, numbered."""
        return "\n".join(
            f"{number}. {measured_on(record['environment'])}; {record['date']}, commit "
            f"{record['environment']['commit']}; `{record['file']}`"
            + (f"; {record['settings']['note']}" if "note" in record["settings"] else "")
            for number, record in enumerate(self.records, 1)
        )

    def values(self, way: str, level: str) -> dict[int, float]:
        """By seed; a figure that is not finite counts as the worst there is."""
        rows = self.rows.get((way, level), {})
        return finite({seed: row["value"] for seed, row in rows.items()}, self.metric)

    def mean(self, way: str, level: str) -> float | None:
        values = self.values(way, level)
        return statistics.fmean(values.values()) if values else None

    def number(self, value: float) -> str:
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"

    def cell(self, way: str, level: str, ends: bool = True) -> str:
        """Mean, the number of seeds where some are missing, and the range over them."""
        values = [*self.values(way, level).values()]
        if not values:
            return ""
        low, high = self.number(min(values)), self.number(max(values))
        notes = [f"n = {len(values)}"] if len(values) < self.num_seeds else []
        notes += [f"{low} to {high}"] if low != high and ends else []
        return self.number(statistics.fmean(values)) + (f" ({', '.join(notes)})" if notes else "")

    def gains(self, way: str, level: str) -> list[float]:
        """What a way is better than repair, seed by seed."""
        return gains(self.values(way, level), self.values(BASE, level), self.metric)


def figures_of(folder: Path, what: str = WHAT) -> list[ModelFigures]:
    """A study, a model at a time; records of one model must have been made with the same data."""
    by_model: dict[str, list[Record]] = {}
    for record in all_records(folder):
        if record["what"] == what and record["rows"]:
            by_model.setdefault(record["settings"]["weights"], []).append(record)
    for name, (first, *others) in by_model.items():
        for record in others:
            for key in ("samples", "length", "held_out"):
                values = [each["settings"].get(key) for each in (first, record)]
                if values[0] != values[1]:
                    differ = f"{first['file']} and {record['file']} differ in {key}: {values[0]} and {values[1]}"
                    raise ValueError(f"{name}: {differ}; remove one of them")
    order = [*dict.fromkeys(model for model, _ in GOALS)]
    names = sorted(by_model, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [ModelFigures(name, by_model[name]) for name in names]


def outcome_of(gains: Sequence[float]) -> str:
    """Better or worse where all of several seeds agree and the mean is not slight."""
    if len(gains) < 2 or abs(statistics.fmean(gains)) < SLIGHT:
        return ""
    return "better" if min(gains) > 0 else "worse" if max(gains) < 0 else ""


def parts(folder: Path) -> dict[str, str]:
    """What the page shows between its marks."""
    models = figures_of(folder)
    timings = [record for record in newest_records(folder) if record["what"] == "repair"]
    return {
        "goals": _goals(models),
        "models": "\n".join(map(_model, models)),
        "choices": _choices(models),
        "times": _times(timings),
        "blocks": table_of([*block_rows(timings)], BLOCK_COLUMNS),
    }


def _goals(models: Sequence[ModelFigures]) -> str:
    ways = ["wanda", "llmc-sparsegpt", "repair", "tuned"]
    headings = ["model and level", "dense", *(WAYS[way].title for way in ways), "goal", "outcome"]
    by_name, lines = {model.name: model for model in models}, []
    for (name, level), goal in GOALS.items():
        cells = [*[""] * 5, f"{goal:g}", "**not measured**"]
        if model := by_name.get(name):
            limit = goal * model.dense if name == "GPT-51M" else goal
            means = [model.cell(way, level, ends=False) for way in ways]
            cells = [model.number(model.dense), *means, model.number(limit), _outcome(model, level, limit)]
        lines.append([f"{name}, {level_name(level)}", *cells])
    return markdown_table(headings, lines, words=(len(headings) - 1,))


def _outcome(model: ModelFigures, level: str, limit: float) -> str:
    """Which way comes nearest, and by how much the goal is missed."""
    sign = -1 if model.metric == "accuracy" else 1
    means = {way: mean for way in (*CHOICES, BASE) if (mean := model.mean(way, level)) is not None}
    if not means:
        return "**not measured**"
    best = min(means, key=lambda way: sign * means[way])
    if sign * (means[best] - limit) <= 0:
        return f"met by {WAYS[best].title}: {model.number(means[best])}"
    far = f"{100 * (limit - means[best]):.1f} points" if sign < 0 else f"{means[best] / limit - 1:.1%}"
    return f"**missed by {far}**; best is {WAYS[best].title}: {model.number(means[best])}"


def _model(model: ModelFigures) -> str:
    settings, levels = model.settings, model.levels
    unit = f"windows of {settings['length']} tokens" if "length" in settings else "samples"
    seeds = ", ".join(map(str, sorted({seed for rows in model.rows.values() for seed in rows})))
    about = f"{settings['about']}. " if settings["about"] else ""
    about += f"Calibrated on {settings['samples']} {unit}, draws {seeds}; {model.metric} on "
    about += f"{settings['held_out']:,} held-out {unit}."
    versions = {row["llmcompressor"] for rows in model.rows.values() for row in rows.values() if "llmcompressor" in row}
    about += f" llm-compressor {', '.join(sorted(versions))}." if versions else ""
    headings = ["way", *map(level_name, levels), "zeros too many", "s", "record"]
    measured = {way for way, _ in model.rows}
    lines = [["dense", *[model.number(model.dense)] * len(levels), "", "", ""]]
    for way in (way for way in WAYS if way in measured):
        lines.append([WAYS[way].title, *(model.cell(way, level) for level in levels), *_cost(model, way)])
    return f"### {model.name}\n\n{about}\n\n{model.origins}\n\n{markdown_table(headings, lines)}\n"


def _cost(model: ModelFigures, way: str) -> list[str]:
    """Zeros beyond the exact count by level, seconds, and the records the figures come from."""
    rows = [row for (name, _), by_seed in model.rows.items() if name == way for row in by_seed.values()]
    too_many = []
    for level in model.levels:
        here = model.rows.get((way, level), {}).values()
        counts = sorted({row["zeros"] - round(share_of(level) * row["num_weights"]) for row in here})
        ends = dict.fromkeys(f"{count:+,}" if count else "0" for count in (counts[:1] + counts[-1:]))
        too_many.append(" to ".join(ends) or "-")
    newest = max(row["record"] for row in rows)
    is_cpu = model.records[newest - 1]["settings"]["device"] == "cpu"
    key = "cpu_seconds" if is_cpu else "seconds"
    seconds = statistics.median(row[key] for row in rows if row["record"] == newest)
    sources = ", ".join(map(str, sorted({row["record"] for row in rows})))
    return [", ".join(too_many), f"{seconds:.1f}{' of a CPU' * is_cpu}", sources]


def _choices(models: Sequence[ModelFigures]) -> str:
    """Gains over plain repair, marked where they are clear, and how many are."""
    columns = [(model, level) for model in models for level in model.levels if model.mean(BASE, level) is not None]
    headings = ["choice", *(f"{model.name}, {level_name(level)}" for model, level in columns)]
    lines = []
    for way in CHOICES:
        gains = [model.gains(way, level) for model, level in columns]
        outcomes = [outcome_of(each) for each in gains if each]
        signs = [{"better": "**", "worse": "*"}.get(outcome_of(each), "") for each in gains]
        cells = [f"{s}{statistics.fmean(g):+.1f}{s}" if g else "" for s, g in zip(signs, gains, strict=True)]
        counts = [str(outcomes.count("better")), str(outcomes.count("worse")), str(len(outcomes))]
        if outcomes:
            lines.append([WAYS[way].title, *cells, *counts])
    return markdown_table([*headings, "clearly better", "clearly worse", "of"], lines)


def _times(records: Sequence[Record]) -> str:
    headings = ["model", "machine", "s", "CPU s", "peak GiB", *PARTS, "other", "bound by", "solving", "goal", "outcome"]
    lines, goals = [], {weights: goal for names, goal in TIME_GOALS.items() for weights in names}
    for record in records:
        settings, weights = record["settings"], record["settings"]["weights"]
        row = record["rows"][0] | {"solving": _solving(record["rows"][0])}
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
            lines.append([names[0], *[""] * (len(headings) - 3), _goal_words(goal), "**not measured**"])
    return markdown_table(headings, lines, words=(1, len(headings) - 1))


def _goal_words(goal: dict[str, float]) -> str:
    return ", ".join(FORMS[key].format(limit) for key, limit in goal.items())


def _solving(row: Row) -> float:
    return sum(row.get(part, 0.0) for part in SOLVING) / row["seconds"]


BLOCK_COLUMNS = (
    "model | repair, s a block = repair:.2f | tuning, s a block = tune:.2f | peak GiB = peak_gib:.1f | "
    "s of 32 blocks at that rate = whole:.0f"
)


def block_rows(records: Sequence[Record]) -> Iterator[Row]:
    """What a block takes, in models of different numbers of them."""
    for record in records:
        if num := record["settings"].get("blocks"):
            row = record["rows"][0]
            repair, tune = (row["seconds"] - row.get("tune", 0.0)) / num, row["tune"] / num if "tune" in row else None
            rates = {"repair": repair, "tune": tune, "whole": 32 * row["seconds"] / num}
            yield {"blocks": num, "model": record["settings"]["weights"], "peak_gib": row["peak_gib"], **rates}
