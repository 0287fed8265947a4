"""What recovery is worth: pruned models that learn from their dense one, on held-out data, beside controls.

Each run starts from a model that is dense, repaired, masked alone, or pruned while training, and learns for some steps.
A record is on disk after every figure, and records of one model become one table of ``recover.md``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from .benchmark import Row
from .repair_study import masks_of, started, zeros
from .study import Learning, LearningStudy, SeedCase

WHAT = "recover quality"
STARTS = {  # ways of the study of repair among them
    "dense": "dense",
    "repair": "repaired",
    "magnitude": "magnitude by layer",
    "wanda": "WANDA by row",
    "trained": "pruned while training",
}


@dataclass(frozen=True)
class RecoverWay:
    """A model to start from, and what it learns by."""

    start: str
    title: str
    hard: float = 0.0
    has_teacher: bool = True


WAYS: dict[str, RecoverWay] = {
    "control": RecoverWay("dense", "dense, trained on by cross-entropy", 1.0, has_teacher=False),
    "recover": RecoverWay("repair", "repaired, recovered"),
    "hard": RecoverWay("repair", "repaired, recovered by KL and half the cross-entropy", 0.5),
    "magnitude-recover": RecoverWay("magnitude", "magnitude by layer, recovered"),
    "wanda-recover": RecoverWay("wanda", "WANDA by row, recovered"),
    "trained-recover": RecoverWay("trained", "pruned while training, recovered"),
}
WayName = Literal[tuple(WAYS)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class RecoverQuality(LearningStudy):
    """Prune a trained model, let it learn from the dense one, and evaluate it on held-out data, over several seeds.

    The record is written after every figure, and the same command continues it.
    """

    what: ClassVar[str] = WHAT

    pruned: Path | None = None  # checkpoint of the same run, pruned while training, for trained-recover
    ways: tuple[WayName, ...] = ("control", "recover")  # what learns, and how
    levels: tuple[Literal["50", "70", "80", "90"], ...] = ("50", "80")  # percent removed

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        runs: dict[tuple[str, str], list[Learning]] = {}
        for way in self.ways:
            start = WAYS[way].start
            for level in self.levels if start != "dense" else ("",):
                runs.setdefault((start, level), []).extend(Learning(way, level, steps) for steps in self.steps)
        return runs

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        with started(case, start, level, {"trained": self.pruned}) as (trained, took, _):
            model = trained.model
            row = case.evaluated(trained, start, level)
            yield row | zeros(model) | took
            for run in runs:
                way, before = WAYS[run.way], masks_of(model)
                with case.recovered(model, run, hard=way.hard, has_teacher=way.has_teacher) as recovery:
                    if moved := [name for name, mask in masks_of(model).items() if not torch.equal(mask, before[name])]:
                        raise RuntimeError(f"{run.way} {run.level}: zeros of {moved[0]} are not where they were")
                    after = {"zeros_before": sum(int(mask.sum()) for mask in before.values())} | recovery.figures()
                    yield after | case.evaluated(trained, *run) | zeros(model) | {"before_value": row["value"]}
