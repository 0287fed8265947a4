"""What studies share that compare ways to prune over seeds: a file that an interrupted run continues, and gains."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from prunus.files.json_file import read_json, write_json

from .benchmark import Record, Row

SLIGHT = 0.1  # percent of perplexity, or points of accuracy, that nobody would miss


class StudyFile:
    """The rows of a study, on disk after every step; ValueError where the file was made with other settings."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        if path.is_file():
            self.record = read_json(path)
            for name, value in record["settings"].items():
                if (old := self.record["settings"].get(name)) != value:
                    raise ValueError(f"{path} has {name} = {old}, not {value}; give another --results")

    def add(self, rows: list[Row]) -> None:
        self.record["rows"] += rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.record)


def share_of(level: str) -> Fraction:
    """What is removed at a level: percent, a share such as 1/3, or of 2:4 a half."""
    return Fraction(1, 2) if level == "2:4" else Fraction(level) / (1 if "/" in level else 100)


def level_name(level: str) -> str:
    return level if {*level} & {*":/"} else f"{level} %"


def finite(values: Mapping[int, Any], metric: str) -> dict[int, float]:
    """Values by seed; what is not finite, None in a file, counts as the worst there is."""
    worst = float("inf") if metric == "perplexity" else 0.0
    return {seed: worst if value is None else value for seed, value in values.items()}


def gains(values: Mapping[int, float], beside: Mapping[int, float], metric: str) -> list[float]:
    """Percent of perplexity, or points of accuracy, by which values are better, over the seeds that both have."""
    pairs = [(values[seed], beside[seed]) for seed in values if seed in beside]
    return [100 * (a - b) if metric == "accuracy" else 100 * (1 - a / b) for a, b in pairs]
