"""What recovery is worth: pruned models that learn from their dense one, on held-out data, beside controls.

Each run starts from a model that is dense, repaired, masked alone, or pruned while training, and learns for some steps.
A record is on disk after every figure, and records of one model become one table of ``recover.md``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from prunus import PerRow, prune
from prunus.eligible import eligible

from .benchmark import Row
from .clocks import timed
from .learning import Learning, LearningStudy, SeedCase
from .repair_study import BY_LAYER, REPAIR

WHAT = "recover quality"
STARTS: dict[str, tuple[str, dict[str, Any]]] = {  # title, how it is pruned
    "dense": ("dense", {}),
    "repair": ("repaired", {"score": None, "select": BY_LAYER, "repair": REPAIR}),
    "magnitude": ("magnitude by layer", {"score": "magnitude", "select": BY_LAYER, "repair": None}),
    "wanda": ("WANDA by row", {"score": "wanda", "select": PerRow(), "repair": None}),
    "trained": ("pruned while training", {}),
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
if TYPE_CHECKING:
    WayName = str
else:
    WayName = Literal[tuple(WAYS)]


@dataclass(frozen=True, kw_only=True)
class RecoverQuality(LearningStudy):
    """Prune a trained model, let it learn from the dense one, and evaluate it on held-out data, over several seeds.

    --model is a checkpoint of prunus, which knows its data ({seed} stands for the seed); a Hugging Face folder, with
    --tokens to calibrate on, --train-tokens, --held-out-tokens and --eval-tokens; or the weights of ResNet-20 (.th),
    with --images, a folder of CIFAR-10. The record is written after every figure, and the same command continues it.
    """

    what: ClassVar[str] = WHAT

    pruned: Path | None = None  # checkpoint of the same run, pruned while training, for trained-recover
    ways: tuple[WayName, ...] = ("control", "recover")  # what learns, and how
    levels: tuple[Literal["50", "70", "80", "90"], ...] = ("50", "80")  # percent removed

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        """The dense model is always evaluated."""
        runs: dict[tuple[str, str], list[Learning]] = {("dense", ""): []}
        for way in self.ways:
            start = WAYS[way].start
            for level in self.levels if start != "dense" else ("",):
                runs.setdefault((start, level), []).extend(Learning(way, level, steps) for steps in self.steps)
        return runs

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        trained = case.trained
        if start == "trained":
            if self.pruned is None:
                raise ValueError("trained-recover needs --pruned, the checkpoint of a run that pruned while training")
            trained = case.load(self.pruned)
        model, how, device = trained.model, STARTS[start][1], torch.device(self.device)
        settings: dict[str, Any] = {"loss": trained.loss, "progress": False} | how
        seconds, result = 0.0, None
        if how:
            seconds, result = timed(lambda: prune(model, trained.batches, int(level) / 100, **settings), device)
        try:
            row = {"way": start, "level": level, "steps": 0, "metric": trained.metric, "value": trained.evaluate(model)}
            yield row | _zeros(model) | {"seconds": seconds}
            for run in runs:
                way, before = WAYS[run.way], _masks(model)
                with case.recovered(model, run, hard=way.hard, has_teacher=way.has_teacher) as recovery:
                    if moved := [name for name, mask in _masks(model).items() if not torch.equal(mask, before[name])]:
                        raise RuntimeError(f"{run.way} {run.level}: zeros of {moved[0]} are not where they were")
                    after = {"way": run.way, "level": level, "metric": trained.metric, "value": trained.evaluate(model)}
                    after |= _zeros(model) | {"zeros_before": sum(int(mask.sum()) for mask in before.values())}
                    yield after | recovery.figures() | {"steps": run.steps, "before_value": row["value"]}
        finally:
            if result is not None:
                result.undo_()

    def count(self, row: Row) -> str:
        return f"{row['zeros']:,} zeros"


def _masks(model: nn.Module) -> dict[str, Tensor]:
    """True where a weight is zero."""
    return {weight.name: weight.parameter.detach() == 0 for weight in eligible(model).weights}


def _zeros(model: nn.Module) -> Row:
    masks = _masks(model).values()
    return {"zeros": sum(int(mask.sum()) for mask in masks), "num_weights": sum(mask.numel() for mask in masks)}
