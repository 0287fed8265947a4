"""What the pages of all studies share: the figures of a model from its records, goals, and the tables of a page."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from prunus.files.json_file import read_json
from prunus.lab.study.tables import markdown_table

from .benchmark import Record, Row, all_records, origin_of
from .study import SLIGHT, finite, gains, level_name, share_of

MODELS = ("stories15M", "SmolLM2-135M", "ResNet-20", "GPT-51M")  # in the order of the pages; others follow
NOT_MEASURED, NOTHING = "**not measured**", "Nothing is measured yet."
SIGNS = {"better": "**", "worse": "*"}  # around what is clear


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
    def sign(self) -> int:
        """1 where lower is better, and -1 where higher is."""
        return -1 if self.metric == "accuracy" else 1

    @property
    def dense(self) -> float:
        return next(iter(self.rows["dense", ""].values()))["value"]

    @property
    def levels(self) -> list[str]:
        return sorted({level for way, level in self.rows if level}, key=lambda level: (level == "2:4", share_of(level)))

    @property
    def num_seeds(self) -> int:
        return max(len(rows) for rows in self.rows.values())

    def rows_of(self, way: str | None = None) -> list[Row]:
        """Those of one way at all levels, or of all ways."""
        return [row for (name, _), by_seed in self.rows.items() if way in (None, name) for row in by_seed.values()]

    def values(self, way: str, level: str) -> dict[int, float]:
        """By seed; a figure that is not finite counts as the worst there is."""
        rows = self.rows.get((way, level), {})
        return finite({seed: row["value"] for seed, row in rows.items()}, self.metric)

    def mean(self, way: str, level: str) -> float | None:
        values = self.values(way, level)
        return statistics.fmean(values.values()) if values else None

    def best(self, ways: Sequence[str], level: str) -> str | None:
        """The way with the best mean, of those that were measured."""
        means = {way: mean for way in ways if (mean := self.mean(way, level)) is not None}
        return min(means, key=lambda way: self.sign * means[way], default=None)

    def gains(self, way: str, level: str, base: str = "dense") -> list[float]:
        """By how much a way is better than another, seed by seed; one without levels stands for all of them."""
        values, others = (self.values(each, level) or self.values(each, "") for each in (way, base))
        return gains(values, others, self.metric)

    def above(self, way: str, level: str, base: str = "dense") -> float | None:
        """The mean share by which a way's perplexity is above another's of equal seeds, or its accuracy is below."""
        each = self.gains(way, level, base)
        return -statistics.fmean(each) / 100 if each else None

    # As text

    def title(self, level: str) -> str:
        return f"{self.name}, {level_name(level)}"

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

    def beside(self, way: str, level: str, digits: int = 1) -> str:
        """How far a way is from the dense model."""
        share = self.above(way, level)
        if share is None:
            return ""
        return f"{share:+.{digits}%}" if self.metric == "perplexity" else f"{-100 * share:+.2f} points"

    def gained(self, way: str, level: str, base: str, digits: int) -> str:
        """The mean gain over another way, marked where it is clear."""
        each = self.gains(way, level, base)
        sign = SIGNS.get(outcome_of(each), "")
        return f"{sign}{statistics.fmean(each):+.{digits}f}{sign}" if each else ""

    def section(self, table: str, *, first: str = "", learning: str = "", seeds: str = "seeds", last: str = "") -> str:
        """The model's name, what its figures were made with, the machine, day and file of each record, and a table."""
        settings, made = self.settings, "images" if self.metric == "accuracy" else self.settings.get("unit")
        unit = made or (f"windows of {settings['length']} tokens" if "length" in settings else "samples")
        numbers = joined({row["seed"] for row in self.rows_of()})
        about = f"{settings['about']}. " if settings["about"] else ""
        about += f"{first}Calibrated on {settings['samples']} {unit}{learning}, {seeds} {numbers}; "
        about += f"{self.metric} on {settings['held_out']:,} held-out {unit}.{last}"
        return f"### {self.name}\n\n{about}\n\n{origins_of(self.records)}\n\n{table}\n"

    def table(self, titles: Mapping[str, str], more: "Mapping[str, Callable[[ModelFigures, str], str]]") -> str:
        """A line for each way that was measured: its figures by level, and ``more`` of all but the dense model."""
        lines = []
        for way in (way for way in titles if self.rows_of(way)):
            cells = [self.cell(way, level) or self.cell(way, "") for level in self.levels]
            lines.append([titles[way], *cells, *("" if way == "dense" else cell(self, way) for cell in more.values())])
        return markdown_table(["way", *map(level_name, self.levels), *more], lines)


def figures_of(
    folder: Path, what: str, way_of: Callable[[Row], str] = lambda row: row["way"], order: Sequence[str] = MODELS
) -> list[ModelFigures]:
    """A study, a model at a time.

    Of each way and level the runs with the most steps bear its name; that of the others is ``WAY, STEPS``.
    """
    by_model = records_by_model(folder, what, ("samples", "length", "held_out"))
    for records in by_model.values():
        runs = [(row, way_of(row), row.get("steps", 0)) for record in records for row in record["rows"]]
        most: dict[tuple[str, str], int] = {}
        for row, way, steps in runs:
            most[way, row["level"]] = max(most.get((way, row["level"]), 0), steps)
        for row, way, steps in runs:
            row["way"] = way if steps == most[way, row["level"]] else f"{way}, {steps}"
    names = sorted(by_model, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [ModelFigures(name, by_model[name]) for name in names]


def records_by_model(folder: Path, what: str, same: Sequence[str]) -> dict[str, list[Record]]:
    """The records of a study; those of one model must have been made with the ``same`` settings."""
    by_model: dict[str, list[Record]] = {}
    for record in all_records(folder):
        if record["what"] == what and record["rows"]:
            by_model.setdefault(record["settings"]["weights"], []).append(record)
    for name, (first, *others) in by_model.items():
        for record, key in product(others, same):
            values = [each["settings"].get(key) for each in (first, record)]
            if values[0] != values[1]:
                differ = f"{first['file']} and {record['file']} differ in {key}: {values[0]} and {values[1]}"
                raise ValueError(f"{name}: {differ}; remove one of them")
    return by_model


def by_level(models: Sequence[ModelFigures]) -> list[tuple[ModelFigures, str]]:
    return [(model, level) for model in models for level in model.levels]


def outcome_of(gains: Sequence[float]) -> str:
    """Better or worse where all of several seeds agree and the mean is not slight."""
    if len(gains) < 2 or abs(statistics.fmean(gains)) < SLIGHT:
        return ""
    return "better" if min(gains) > 0 else "worse" if max(gains) < 0 else ""


def rows_of_study(folder: Path) -> dict[tuple[str, float], Row]:
    """The figures of a finished study of training, by arm and sparsity; each row has the metric too."""
    result = read_json(folder / "study_result.json")
    return {(row["arm"], row["sparsity"]): row | {"metric": result["metric"]["name"]} for row in result["rows"]}


def runs_of_study(folder: Path) -> list[tuple[Row, Row]]:
    """What each of its runs was, and what came out."""
    runs = map(json.loads, (folder / "runs.jsonl").read_text().splitlines())
    return [(run["cell.json"], run["result.json"]) for run in runs]


def origins_of(records: Sequence[Record]) -> str:
    """A numbered line for each record, with its note."""
    parts = [(origin_of(record), record["settings"].get("note")) for record in records]
    return "\n".join(f"{i}. {'; '.join(filter(None, part))}" for i, part in enumerate(parts, 1))


def joined(values: set[Any], form: str = "") -> str:
    return ", ".join(f"{value:{form}}" for value in sorted(values))


@dataclass(frozen=True)
class Goal:
    """What the best of some ways should reach: a perplexity or accuracy, or a share that the dense model is better."""

    model: str
    level: str
    value: float
    ways: tuple[str, ...] = ()
    is_share: bool = False

    @property
    def wish(self) -> str:
        if not self.is_share:
            return f"{self.value:.1%}" if self.value < 1 else f"{self.value:g}"
        return f"{-100 * self.value:+.1f} points" if self.model.startswith("ResNet") else f"{self.value:+.1%}"

    def outcome(self, model: ModelFigures, way: str) -> str:
        """Whether a way reaches it, and by how much it is missed."""
        reached = model.above(way, self.level) if self.is_share else model.mean(way, self.level)
        assert reached is not None
        missed = (reached - self.value) * (1 if self.is_share else model.sign)
        points = f"{100 * missed:.{1 if missed >= 5e-4 else 2}f} points"
        return "met" if missed <= 0 else f"**missed by {points if self.value < 1 else f'{missed / self.value:.1%}'}**"


def goals_table(
    goals: Sequence[Goal],
    models: Sequence[ModelFigures],
    headings: Sequence[str],
    line: Callable[[Goal, ModelFigures | None], Sequence[str]],
    words: Sequence[int] = (),
) -> str:
    """A line for each goal, of the model's figures where there are some: its cells, the goal and the outcome."""
    by_name = {model.name: model for model in models}
    lines = [[f"{goal.model}, {level_name(goal.level)}", *line(goal, by_name.get(goal.model))] for goal in goals]
    headings = ["model and level", *headings, "goal", "outcome"]
    return markdown_table(headings, lines, words=(*words, len(headings) - 1))


# Cells of a way in the table of a model


def seconds_of(model: ModelFigures, way: str) -> str:
    """The median; models that are loaded take none."""
    seconds = statistics.median(row["seconds"] for row in model.rows_of(way))
    return f"{seconds:.1f}" if seconds else ""


LEARNING: dict[str, Callable[[ModelFigures, str], str]] = {
    "steps": lambda model, way: joined({row["steps"] for row in model.rows_of(way) if row["steps"]}, ","),
    "learning rate": lambda model, way: joined({row["lr"] for row in model.rows_of(way) if "lr" in row}, "g"),
    "s": seconds_of,
}
