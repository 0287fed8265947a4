"""Figures of the study from its files: means over seeds, comparisons at equal sparsity, and a verdict in words."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .probe_study import STRATEGIES, UNPROBED, Row

Key = tuple[str, float, str, float | None]  # strategy, level, way, tau
SLIGHT = 0.1  # percent of perplexity, or points of accuracy, that nobody would miss
USABLE = {"perplexity": 2.0, "accuracy": 0.9}  # times the dense model's: what a pruned one may have at most, at least


@dataclass(frozen=True)
class Comparison:
    """One model against another of the same sparsity; ``gains`` are percent, a seed each, and positive is better."""

    strategy: str
    level: float
    tau: float | None
    gains: tuple[float, ...]
    usable: bool  # the better of both is

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def outcome(self) -> str:
        """Better or worse where all of several seeds agree and the mean is two standard errors away from zero.

        A mean below ``SLIGHT`` is neither.
        """
        if len(self.gains) < 2 or abs(self.gain) < SLIGHT:
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
    unfinished: tuple[int, ...] = ()  # seeds whose runs were interrupted
    notes: tuple[str, ...] = ()  # what a reader of its files must know

    @property
    def name(self) -> str:
        return self.settings["case"]

    @property
    def dense(self) -> float:
        return self.mean("random", 0.0, "alone")

    def of(self, strategy: str, level: float, way: str, tau: float | None = None) -> list[Row]:
        return list(self.rows[strategy, level, way, tau].values())

    def mean(self, strategy: str, level: float, way: str, tau: float | None = None) -> float:
        """Mean over seeds; the worst there is where one is not finite."""
        worst = float("inf") if self.metric == "perplexity" else 0.0
        return statistics.fmean(worst if r.value is None else r.value for r in self.of(strategy, level, way, tau))

    def number(self, value: float) -> str:
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return "not finite" if value == float("inf") else f"{value:.4g}" if value < 1e4 else f"{value:.1e}"

    def mean_and_spread(self, key: Key) -> str:
        rows = self.of(*key)
        finite = [row.value for row in rows if row.value is not None]
        mean = self.number(self.mean(*key))
        mean += f" (n = {len(rows)})" if len(rows) < len(self.seeds) else ""
        if len(finite) < len(rows) or len(set(finite)) < 2:
            return mean
        return f"{mean} ± {100 * spread(finite):.2f}" if self.metric == "accuracy" else f"{mean} ± {spread(finite):.2g}"

    def compared(self, key: Key, beside: Key) -> Comparison | None:
        """Both over the seeds that have both; None where a model of either side gave no finite value."""
        ours, theirs = self.rows[key], self.rows[beside]
        gains = []
        for seed in sorted(ours.keys() & theirs.keys()):
            a, b = ours[seed].value, theirs[seed].value
            if a is None or b is None:
                return None
            gains.append(100 * (1 - a / b) if self.metric == "perplexity" else 100 * (a - b))
        usable = self.is_usable(self.mean(*key)) or self.is_usable(self.mean(*beside))
        return Comparison(key[0], key[1], key[3], tuple(gains), usable)

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
        raise ValueError(f"there are no figures in {folder}; python -m benchmarks evidence run makes them")
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
    unfinished = tuple(seed for seed, c in zip(seeds, contents, strict=True) if len(c["done"]) != c["num_steps"])
    if unfinished == seeds:
        raise ValueError(
            f"no file of {common[0]['case']} is complete; python -m benchmarks evidence run does what is missing"
        )
    notes = tuple(dict.fromkeys(content["note"] for content in contents if "note" in content))
    environments, dates = [c["environment"] for c in contents], [c["date"] for c in contents]
    return Figures(common[0], first["metric"], seeds, environments, dates, rows, unfinished, notes)


# The verdict: words that follow from the figures

PAIRS = {  # title: way, what stands beside it
    "at exactly the level, its veto with replacements": ("exact", "alone"),
    "at exactly the level, by the smallest ratios": ("target", "alone"),
    "as it is defined, beside the strategy alone as sparse": ("probed", "alone, as sparse"),
}


def verdict(cases: Sequence[Figures]) -> str:
    """The answer in a sentence, and a line for every model."""
    found = [each for case in cases for way, beside in PAIRS.values() for each in case.against(way, beside)]
    lines = [_answer(found) + _exceptions(cases)]
    for case in cases:
        lines.append(f"- **{case.name}.** {_line(case)}")
    return "\n".join(lines) + "\n"


def _answer(found: Sequence[Comparison]) -> str:
    every, usable = _counts(found), _counts([each for each in found if each.usable])
    counts = usable if sum(usable.values()) else every
    total = max(1, sum(counts.values()))
    better, worse = counts["better"] / total, counts["worse"] / total
    if not (better or worse):
        answer = "No clear effect of the probe is seen"
    elif better > 2 * worse and better > 0.5:
        answer = "The probe helps in most cases"
    elif worse > 2 * better and worse > 0.5:
        answer = "The probe does not help: at equal sparsity it makes most models worse"
    elif better > worse:
        answer = "The probe helps more often than it hurts, but not in most cases"
    else:
        answer = "The probe does not help: it hurts at least as often as it helps"
    return f"{answer}. Of all comparisons with the strategy alone at equal sparsity {_clear(every)}; of those in which \
one of both models is still usable, {_clear(usable)}."


def _exceptions(cases: Sequence[Figures]) -> str:
    """Where the probe as it is defined is clearly better at most levels and taus, and nowhere clearly worse."""
    parts = []
    for case in cases:
        for strategy, counts in _by_strategy(case).items():
            total = sum(counts.values())
            if not counts["worse"] and 2 * counts["better"] > total:
                share = f"{counts['better']} of {total} better, ruined models counted in"
                parts.append(f"{case.name}, {strategy}, {case.settings['schedule']} ({share})")
    return f" As it is defined it helps at most levels, and hurts at none, in: {'; '.join(parts)}.\n" if parts else "\n"


def _line(case: Figures) -> str:
    parts = []
    for title, (way, beside) in PAIRS.items():
        every = case.against(way, beside)
        found = [each for each in every if each.usable]
        counts = _counts(every)
        all_ = f"ruined models counted in, {counts['better']} better and {counts['worse']} worse of {len(every)}"
        parts.append(f"{title.capitalize()}: {_clear(_counts(found))}{_extremes(case, found)}; {all_}.")
    by_strategy = [
        f"{strategy} {counts['better']} better and {counts['worse']} worse of {sum(counts.values())}"
        for strategy, counts in _by_strategy(case).items()
    ]
    parts.append(f"By strategy, as it is defined and at all levels: {'; '.join(by_strategy)}.")
    lot = [each for each in case.against("probed", "by lot") if each.usable]
    parts.append(f"Beside a veto by lot of as many weights: {_clear(_counts(lot))}.")
    return " ".join([*parts, _best_strategies(case)])


def _by_strategy(case: Figures) -> dict[str, Counter[str]]:
    """Outcomes of the probe as it is defined."""
    found = case.against("probed", "alone, as sparse")
    return {name: _counts([each for each in found if each.strategy == name]) for name in STRATEGIES}


def _extremes(case: Figures, found: Sequence[Comparison]) -> str:
    """The largest clear gain and loss."""
    unit = "%" if case.metric == "perplexity" else "points"
    parts = []
    for outcome, pick in (("better", max), ("worse", min)):
        clear = [each for each in found if each.outcome == outcome]
        if clear:
            most = pick(clear, key=lambda each: each.gain)
            where = f"{most.strategy} at {most.level:.0%}" + ("" if most.tau is None else f", tau {most.tau:g}")
            parts.append(f"at most {abs(most.gain):.2g} {unit} {outcome} ({where})")
    return f"; {' and '.join(parts)}" if parts else ""


def _best_strategies(case: Figures) -> str:
    """The best and the worst strategy without the probe at each level."""
    parts = []
    for level in case.settings["levels"]:
        keys: list[Key] = [(name, level, "alone", None) for name in (*STRATEGIES, *UNPROBED)]
        best, worst = (pick(keys, key=lambda key: case.mean(*key)) for pick in (min, max))
        if case.metric == "accuracy":
            best, worst = worst, best
        if case.is_usable(case.mean(*best)):
            figures = f"{case.mean_and_spread(best)}; {worst[0]} {case.mean_and_spread(worst)}"
            parts.append(f"{level:.0%}: {best[0]} ({figures})")
    if not parts:
        return "No strategy leaves a usable model at any level."
    return f"What helps is the choice of the strategy, of which the best and the worst are, at {'; '.join(parts)}."


def _counts(found: Sequence[Comparison]) -> Counter[str]:
    return Counter(each.outcome for each in found)


def _clear(counts: Counter[str]) -> str:
    total = sum(counts.values())
    if not total:
        return "there is none"
    return f"{counts['better']} of {total} are clearly better, {counts['worse']} clearly worse"
