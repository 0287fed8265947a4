"""The picture of models that were pruned while they trained beside smaller dense ones."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drawing import dot, line, svg, text


@dataclass(frozen=True)
class Series:
    """Models of one kind, the whole dense one first: a label and an arm with its sparsity for each."""

    name: str
    colour: str
    models: tuple[tuple[str, str, float], ...]


def _pruned(*levels: int) -> Series:
    return Series("pruned", "plum", tuple((f"{level} %", "bitter7 rate 1", level / 100) for level in levels))


SIZES = {  # title, study: what its models are compared with
    ("51 M weights, books", "gpt2-rates"): (
        Series("fewer blocks", "sand", (("4 blocks", "dense, 4 blocks", 0.0), ("2 blocks", "dense, 2 blocks", 0.0))),
        Series("narrower", "slate", (("448", "dense, width 448", 0.0), ("384", "dense, width 384", 0.0))),
        _pruned(50, 80, 90),
    ),
    ("0.8 M weights, Python's source", "gpt2-tiny-rates"): (
        Series("fewer blocks", "sand", (("2 blocks", "dense, 2 blocks", 0.0), ("1 block", "dense, 1 block", 0.0))),
        Series("narrower", "slate", (("96", "dense, width 96", 0.0), ("64", "dense, width 64", 0.0))),
        _pruned(50, 80),
    ),
}


def sizes(studies: Path) -> str:
    """Perplexity over stored bytes: a GPT that was pruned while it trained, and dense ones that are smaller."""
    title, top, bottom = "Pruned, or smaller from the start?", 112, 330
    parts = [text(24, 34, title, "ink h")]
    about = "perplexity on held-out text over megabytes in a file, lower is better; equal tokens"
    parts.append(text(24, 58, about, "soft"))
    for panel, ((name, study), series) in enumerate(SIZES.items()):
        parts += _panel(studies / study, name, series, (72 + 316 * panel, 340 + 316 * panel, top, bottom))
    return svg(bottom + 92, title, [*parts, *_footer(bottom)])


def _panel(study: Path, name: str, series: Sequence[Series], box: tuple[float, float, float, float]) -> Iterator[str]:
    rows = {(row["arm"], row["sparsity"]): row for row in json.loads((study / "study_result.json").read_text())["rows"]}
    stored = _megabytes(study)
    whole = ("dense", 0.0)
    keys = [whole, *((arm, level) for each in series for _, arm, level in each.models)]
    left, right, top, bottom = box
    values = [value for key in keys for value in rows[key]["values"]]
    low, high = _wider(min(values), max(values))
    least, most = _wider(min(stored[key] for key in keys), max(stored[key] for key in keys))

    def x(key: tuple[str, float]) -> float:
        return left + (right - left) * (stored[key] - least) / (most - least)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    yield text(left, top - 20, name, "ink b")
    for value in _round_ticks(low, high):
        yield line([(left, y(value)), (right, y(value))], "line")
        yield text(left - 8, y(value) + 5, f"{value:g}", "soft", "end")
    for value in _round_ticks(least, most):
        place = left + (right - left) * (value - least) / (most - least)
        yield text(place, bottom + 22, f"{value:g}", "soft", "middle")
    for each in series:
        own = [whole, *((arm, level) for _, arm, level in each.models)]
        yield line([(x(key), y(rows[key]["mean"])) for key in own], each.colour, 2)
        for label, arm, level in each.models:
            places = [y(value) for value in rows[arm, level]["values"]]
            yield from (dot(x((arm, level)), place, each.colour, 3) for place in places)
            height = {"plum": max(places) + 17, "sand": min(places) - 8}.get(each.colour, max(places) + 5)
            side = ("end", -8) if each.colour == "slate" else ("middle", 0)
            yield text(x((arm, level)) + side[1], height, label, f"{each.colour} small", side[0])
    places = [y(value) for value in rows[whole]["values"]]
    yield from (dot(x(whole), place, "moss", 3) for place in places)
    yield text(x(whole), max(places) + 17, "dense", "moss small b", "middle")


def _wider(low: float, high: float) -> tuple[float, float]:
    """Both, moved apart for a margin."""
    return low - 0.12 * (high - low), high + 0.1 * (high - low)


def _megabytes(study: Path) -> dict[tuple[str, float], float]:
    """What a model of an arm and sparsity takes in a file in bfloat16: the values that are not zero, a bit a weight."""
    found = {}
    for text_of_run in (study / "runs.jsonl").read_text().splitlines():
        run = json.loads(text_of_run)
        cell, result = run["cell.json"], run["result.json"]
        mask = result["num_prunable"] / 8 if cell["sparsity"] else 0
        values = result["num_parameters"] - result["sparsity"] * result["num_prunable"]
        found[cell["arm"], cell["sparsity"]] = (2 * values + mask) / 1e6
    return found


def _round_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two others."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _footer(bottom: float) -> Iterator[str]:
    for index, each in enumerate(next(iter(SIZES.values()))):
        yield line([(24 + 150 * index, bottom + 47), (44 + 150 * index, bottom + 47)], each.colour, 3)
        yield text(50 + 150 * index, bottom + 52, each.name, each.colour)
    yield text(24, bottom + 76, "A dot is a seed. Pruned by bitter7, rate 1. More: docs/results.md", "soft small")
