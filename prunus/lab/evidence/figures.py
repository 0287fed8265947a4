"""Figures of the study from its files: means over seeds, and comparisons of two models that are equally sparse."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .study import Row

Key = tuple[str, float, str, float | None]  # strategy, level, way, tau
USABLE = {"perplexity": 2.0, "accuracy": 0.9}  # times the dense model's: what a pruned one may have at most, at least


@dataclass(frozen=True)
class Comparison:
    """One model against another of the same sparsity; ``gains`` are percent, a seed each, and positive is better."""

    strategy: str
    level: float
    tau: float | None
    values: tuple[float, ...]
    beside: tuple[float, ...]
    gains: tuple[float, ...]
    usable: bool  # the better of both is

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def outcome(self) -> str:
        """Better or worse where all of several seeds agree and the mean is two standard errors away from nothing."""
        if len(self.gains) < 2:
            return "unclear"
        error = 2 * spread(self.gains) / len(self.gains) ** 0.5
        if min(self.gains) > 0 and self.gain > error:
            return "better"
        return "worse" if max(self.gains) < 0 and self.gain < -error else "unclear"


@dataclass(frozen=True)
class Figures:
    """All files of one case."""

    settings: dict[str, Any]
    metric: str
    seeds: tuple[int, ...]
    environments: list[dict[str, Any]]
    dates: list[str]
    rows: dict[Key, dict[int, Row]]  # by seed
    unfinished: tuple[int, ...] = ()  # seeds that were broken off
    notes: tuple[str, ...] = ()  # what a reader of its files must know

    @property
    def name(self) -> str:
        return self.settings["case"]

    @property
    def dense(self) -> float:
        return self.mean("random", 0.0, "alone")

    def of(self, strategy: str, level: float, way: str, tau: float | None = None) -> list[Row]:
        return list(self.rows[strategy, level, way, tau].values())

    def values(self, strategy: str, level: float, way: str, tau: float | None = None) -> list[float | None]:
        return [row.value for row in self.of(strategy, level, way, tau)]

    def mean(self, strategy: str, level: float, way: str, tau: float | None = None) -> float:
        """Mean over seeds; the worst there is where one is not finite."""
        found = self.values(strategy, level, way, tau)
        worst = float("inf") if self.metric == "perplexity" else 0.0
        return statistics.fmean(worst if value is None else value for value in found)

    def best(self, names: Iterable[Key]) -> Key:
        """The arm with the best mean."""
        return min(names, key=lambda name: self._badness(self.mean(*name)))

    def worst(self, names: Iterable[Key]) -> Key:
        return max(names, key=lambda name: self._badness(self.mean(*name)))

    def _badness(self, value: float) -> float:
        return value if self.metric == "perplexity" else -value

    def number(self, value: float) -> str:
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return "not finite" if value == float("inf") else f"{value:.4g}" if value < 1e4 else f"{value:.1e}"

    def said(self, key: Key) -> str:
        """Mean and spread over the seeds."""
        values = self.values(*key)
        finite = [value for value in values if value is not None]
        mean = self.number(self.mean(*key))
        mean += f" (n = {len(values)})" if len(values) < len(self.seeds) else ""
        if len(finite) < len(values) or len(finite) < 2 or len(set(finite)) == 1:
            return mean
        return f"{mean} ± {100 * spread(finite):.2f}" if self.metric == "accuracy" else f"{mean} ± {spread(finite):.2g}"

    def compared(self, key: Key, beside: Key) -> Comparison | None:
        """Both over the seeds that have both; None where a model of either side gave no number."""
        ours, theirs = self.rows[key], self.rows[beside]
        both = [(ours[seed].value, theirs[seed].value) for seed in ours if seed in theirs]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        if len(pairs) < len(both):
            return None
        gains = tuple(self._gain(a, b) for a, b in pairs)
        usable = self.is_usable(self.mean(*key)) or self.is_usable(self.mean(*beside))
        return Comparison(key[0], key[1], key[3], tuple(a for a, _ in pairs), tuple(b for _, b in pairs), gains, usable)

    def _gain(self, value: float, beside: float) -> float:
        """Percent of perplexity, or points of accuracy."""
        return 100 * (1 - value / beside) if self.metric == "perplexity" else 100 * (value - beside)

    def is_usable(self, value: float) -> bool:
        limit = USABLE[self.metric] * self.dense
        return value <= limit if self.metric == "perplexity" else value >= limit

    def against(self, way: str, beside: str) -> list[Comparison]:
        """Every model of one way beside its own of another; a way that has no tau stands beside every tau."""
        found = []
        for strategy, level, which, tau in self.rows:
            if which == way:
                other = (strategy, level, beside, tau if (strategy, level, beside, tau) in self.rows else None)
                found.append(self.compared((strategy, level, which, tau), other))
        return [each for each in found if each is not None]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_figures(folder: Path) -> list[Figures]:
    """All cases in a folder; ValueError where no seed is finished, or seeds differ in more than the seed."""
    files: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("probe_*.json")):
        content = json.loads(path.read_text())
        files.setdefault(content["settings"]["case"], []).append(content | {"path": path})
    if not files:
        raise ValueError(f"there are no figures in {folder}; prunus evidence run makes them")
    return [_figures(contents) for contents in files.values()]


def _figures(contents: list[dict[str, Any]]) -> Figures:
    first = contents[0]
    common = [{k: v for k, v in content["settings"].items() if k != "seed"} for content in contents]
    rows: dict[Key, dict[int, Row]] = {}
    for content, settings in zip(contents, common, strict=True):
        if settings != common[0]:
            raise ValueError(f"{content['path']} and {first['path']} differ in their settings; run one of them anew")
        for row in (Row(**row) for row in content["rows"]):
            key = (row.strategy, row.level, row.way, row.tau)
            rows.setdefault(key, {})[content["settings"]["seed"]] = row
    seeds = tuple(content["settings"]["seed"] for content in contents)
    open_ = tuple(seed for seed, c in zip(seeds, contents, strict=True) if len(c["done"]) != c["num_steps"])
    if open_ == seeds:
        raise ValueError(f"no file of {common[0]['case']} is complete; prunus evidence run does what is missing")
    notes = tuple(dict.fromkeys(content["note"] for content in contents if "note" in content))
    environments, dates = [c["environment"] for c in contents], [c["date"] for c in contents]
    return Figures(common[0], first["metric"], seeds, environments, dates, rows, open_, notes)
