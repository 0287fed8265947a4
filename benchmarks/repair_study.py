"""What pruning with repair is worth: ways to prune one trained model, compared on held-out data.

Every way prunes the same model with the same calibration samples, over several draws of them. A record is on disk after
every figure, and records of one model, from other machines or of other ways, become one table of ``repair.md``.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from prunus import NofM, PerLayer, PerRow, Repair, prune, shrink
from prunus.eligible import eligible
from prunus.oneshot import Result
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.level import Level
from prunus.oneshot.loop import Loop
from prunus.oneshot.step import Change, Layers, keep_all_but
from prunus.oneshot.steps import Mask
from prunus.ops import bits
from prunus.select import Selector
from prunus.trained.model import TrainedModel

from .benchmark import Row
from .clocks import timed
from .study import Learning, SeedCase, Study, share_of
from .wanda import their_oneshot

WHAT = "repair quality"
LevelName = Literal["50", "60", "70", "80", "90", "2:4"]
BY_LAYER, REPAIR, TUNED = PerLayer(), Repair(), Repair(tune=True)


@dataclass(frozen=True)
class PruneWay:
    """How a model is pruned; 2:4 takes the place of ``select``, which leaves out ways that differ in it alone."""

    title: str
    score: str | None = None  # None: the solver finds which weights stay
    select: Selector = BY_LAYER
    repair: Repair | None = REPAIR
    theirs: str | None = None  # the modifier of llm-compressor that prunes instead
    at_2_4: bool = True


WAYS: dict[str, PruneWay] = {
    "magnitude": PruneWay("magnitude by layer", "magnitude", repair=None),
    "wanda": PruneWay("WANDA by row", "wanda", PerRow(), None),
    "sparsegpt": PruneWay("SparseGPT, our implementation", at_2_4=False),
    "llmc-wanda": PruneWay("WANDA of llm-compressor", theirs="WandaPruningModifier"),
    "llmc-sparsegpt": PruneWay("SparseGPT of llm-compressor", theirs="SparseGPTModifier"),
    "wanda-repaired": PruneWay("WANDA's mask, repaired", "wanda", PerRow()),
    "own-targets": PruneWay("repair, own targets", repair=Repair("own")),
    "damping-0.01": PruneWay("repair, damping 0.01", repair=Repair(damping=0.01)),
    "damping-0.1": PruneWay("repair, damping 0.1", repair=Repair(damping=0.1)),
    "by-row": PruneWay("repair, by row", select=PerRow(), at_2_4=False),
    "fisher": PruneWay("repair, fisher allocation", select=PerLayer("fisher"), at_2_4=False),
    "old-batch-norm": PruneWay("repair, batch-norm statistics kept", repair=Repair(batch_norm=False)),
    "repair": PruneWay("repair"),
    "tuned": PruneWay("repair, tuned", repair=TUNED),
    "fisher-tuned": PruneWay("repair, fisher, tuned", None, PerLayer("fisher"), TUNED, at_2_4=False),
}
WayName = Literal[tuple(WAYS)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class RepairQuality(Study):
    """Prune a trained model by several ways and evaluate each on held-out data, over several calibration draws.

    The record is written after every figure, and the same command continues it. Ways of llm-compressor are left out
    where it is not installed.
    """

    what: ClassVar[str] = WHAT

    ways: tuple[WayName, ...] = ("magnitude", "wanda", "llmc-wanda", "llmc-sparsegpt", "wanda-repaired", "repair")
    levels: tuple[LevelName, ...] = ("50", "70", "2:4")  # percent removed, or 2:4
    windows: int = 96  # calibration windows or images
    eval_windows: int = 24  # held-out windows or images

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        return {(way, level): [] for way in self.ways for level in self.levels if WAYS[way].at_2_4 or level != "2:4"}

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        is_theirs = start in WAYS and bool(WAYS[start].theirs)
        if is_theirs and not (find_spec("llmcompressor") and hasattr(case.trained.model, "config")):
            print(f"{start}: left out, since it needs llm-compressor and a Hugging Face model", flush=True)
            return
        version = {"llmcompressor": metadata.version("llmcompressor")} if is_theirs else {}
        with started(case, start, level) as (trained, took, _):
            yield case.evaluated(trained, start, level) | zeros(trained.model) | took | version

    def settings(self) -> dict[str, Any]:
        return super().settings() | ({} if self.tokens is None else {"length": self.length})


@contextmanager
def started(
    case: SeedCase, name: str, level: str, checkpoints: Mapping[str, Path | None] | None = None
) -> Iterator[tuple[TrainedModel, Row, Any]]:
    """A model made by a way or read from a checkpoint ({level}: the percent), what that took, and its result."""
    trained = case.trained  # read before all others
    if checkpoints and name in checkpoints:
        if (path := checkpoints[name]) is None:
            raise ValueError(f"{name} needs --{'small' if name == 'small' else 'pruned'}, a checkpoint")
        yield case.load(Path(str(path).replace("{level}", level))), {"seconds": 0.0}, None
        return
    if name == "dense":
        yield trained, {"seconds": 0.0}, None
        return
    cpu = time.process_time()
    seconds, made = timed(lambda: changed(trained, name, level), torch.device(case.options.device))
    took = {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}
    if isinstance(made, nn.Module):
        yield replace(trained, model=made), took, None
        return
    try:
        yield trained, took, made
    finally:
        made.undo_()


def changed(trained: TrainedModel, name: str, level: str, bits: int | None = None) -> Any:
    """The result of pruning by a way, or of ``shrink``; of llm-compressor a pruned copy of the model."""
    share = float(share_of(level))
    if name == "shrink":
        return shrink(trained.model, trained.batches, size=1 - share, tune=True, progress=False)
    if name == "sparsegpt":
        return sparsegpt(trained.model, trained.batches, share)
    way = WAYS[name]
    if way.theirs:
        return by_llm_compressor(trained, way.theirs, level)
    select = NofM(2, 4) if level == "2:4" else way.select
    settings: dict[str, Any] = {"score": way.score, "select": select, "repair": way.repair, "bits": bits}
    return prune(trained.model, trained.batches, share, **settings, loss=trained.loss, progress=False)


def by_llm_compressor(trained: TrainedModel, modifier: str, level: str) -> nn.Module:
    (windows,), model = trained.batches, deepcopy(trained.model)
    structure = "2:4" if level == "2:4" else "0:0"
    their_oneshot(model, windows, modifier, sparsity=float(share_of(level)), mask_structure=structure)
    return model


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """True where a weight is zero."""
    return {weight.name: weight.parameter.detach() == 0 for weight in eligible(model).weights}


def zeros(model: nn.Module) -> Row:
    masks = masks_of(model).values()
    return {"zeros": sum(int(mask.sum()) for mask in masks), "num_weights": sum(mask.numel() for mask in masks)}


BLOCK = 128  # columns
DAMPING = 0.01  # of the mean of the Gram matrix's diagonal


@dataclass(frozen=True)
class SparseGPT:
    """SparseGPT (Frantar and Alistarh 2023, https://arxiv.org/abs/2301.00774) as a step of our loop, for comparisons.

    Columns are pruned one after the other, and each error is spread over the columns that follow. Which weights go is
    chosen for 128 columns at a time, by ``w^2 / [H^-1]^2`` over all rows.
    """

    sparsity: float

    @property
    def targets(self) -> Literal["own"]:
        return "own"

    def __call__(self, layers: Layers) -> dict[str, Change]:
        (moments,) = layers.moments
        if moments is None:
            return {}
        factor = inverse_factor(moments.gram)
        return {name: self.pruned(weight, factor) for name, weight in layers.weights.items()}

    def pruned(self, dense: Tensor, factor: Tensor) -> Change:
        weight, keep = dense.float().clone(), torch.ones_like(dense, dtype=torch.bool)
        for first in range(0, weight.shape[1], BLOCK):
            inner = slice(first, min(first + BLOCK, weight.shape[1]))
            part, scale = weight[:, inner], factor.diagonal()[inner]
            until = round(self.sparsity * len(weight) * inner.stop)  # exact over all columns so far
            going = (part / scale).abs().flatten().argsort()[: until - int((~keep).sum())]
            keep[:, inner] = keep[:, inner].flatten().index_fill(0, going, False).view_as(part)
            errors = torch.zeros_like(part)
            for column in range(inner.start, inner.stop):
                values, at = weight[:, column], column - first
                errors[:, at] = values.masked_fill(keep[:, column], 0) / factor[column, column]
                weight[:, column : inner.stop] -= errors[:, at, None] * factor[column, column : inner.stop]
            weight[:, inner.stop :] -= errors @ factor[inner, inner.stop :]
        return Change(keep, (weight * keep).to(dense.dtype))


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Gram matrix."""
    gram = gram.clone().float()
    gram.diagonal().add_(DAMPING * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)


def sparsegpt(model: nn.Module, batches: Sequence[Any], sparsity: float) -> Result:
    """Prune a model in place, each layer to the same sparsity."""
    calibration = Calibration(model, batches)
    weights = {name: weight.parameter for name, weight in calibration.weights.items()}
    choose = keep_all_but({name: round(sparsity * weight.numel()) for name, weight in weights.items()})
    level = Level(calibration.weights, live={name: bits.pack(weight != 0) for name, weight in weights.items()})
    with calibration.open(), torch.no_grad():
        Loop(calibration, level, Mask(choose)).run(SparseGPT(sparsity), finished=lambda names: None)
    return Result(level, model)
