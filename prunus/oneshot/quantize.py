"""Quantise a trained model that is sparse: its kept weights become codes of few bits, and its zeros stay zeros."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..eligible import Weight
from ..input_statistics import eagerly
from ..ops.compact import nonzero
from ..ops.grid import Grid
from .calibration import Calibration, Patterns
from .journal import Folder, Journal
from .layers import matrix_layout
from .level import Level, level_of
from .loop import Loop
from .progress import Progress, progress_line
from .quantizer import Nearest, Quantize
from .result import QuantizeResult
from .shared_work import RankGroup, joined, silent
from .step import LayerRepair

BITS = (8, 4, 3)


def quantize(
    model: nn.Module,
    batches: Iterable[Any] = (),
    bits: int | Grid = 4,
    *,
    include: Patterns = (),
    exclude: Patterns = (),
    only: Patterns = (),
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    state: Folder | None = None,
    progress: Progress | bool | None = None,
    group: RankGroup = None,
) -> QuantizeResult:
    """Round the non-zero weights of ``model`` to a grid of ``bits`` bits (8, 4 or 3) in place; return what was done.

    A non-zero weight becomes ``scale * (c - (2^bits - 1) / 2)``, with a code c and one scale for 128 weights of a row.
    No code stands for zero, so the zeros stay exactly as they are. With batches, weights are rounded column by column,
    and later columns make up for the error (GPTQ); then coordinate descent improves each scale and
    each code in turn. Without batches each weight is rounded to the nearest code.

    The weights stay ordinary parameters, and each layer holds its scales beside them: ``save_model`` then writes codes,
    ``save_pretrained`` ordinary values, and ``recover`` trains the scales. Training weights takes them off their grid.
    Embeddings, heads, norms and biases stay as they are. Dense models can be quantised in memory, for comparison;
    to store or run them in few bits, use other tools.

    The other arguments are those of ``prune``. After an exception the model is as before.
    """
    ranks, grid = joined(group, locals()), checked_grid(bits)
    if getattr(model, "peft_config", None):
        raise ValueError("the model has adapters; merge them first: model = model.merge_and_unload(), then quantize")
    which: dict[str, Any] = {"include": include, "exclude": exclude, "only": only}
    how: dict[str, Any] = {"batch_size": batch_size, "offload": offload, "ranks": ranks}
    with silent(ranks) as is_silent:
        calibration = Calibration(model, batches, takes_frozen=True, **which, **how)
        if calibration.disk and state is None:
            raise ValueError("a model on disk is quantised block by block: give state=, a folder for finished blocks")
        live = {weight.name: nonzero(weight.parameter.detach()) for weight in calibration.each_weight()}
        level = level_of(calibration.weights, live, calibration.disk)
        try:
            level.leave_grids_(calibration.model)
            with (
                calibration.open(),
                progress_line(False if is_silent else progress, "quantize") as report,
                calibration.measured(report, len(level.weights)) as cost,
            ):
                level.cost = cost
                if calibration.has_batches:
                    calibration.check_model()
                quantize_level_(calibration, level, grid, state)
        except BaseException:
            if calibration.offload is not None:
                calibration.offload.unload()
            level.undo_()
            raise
        return QuantizeResult(level, calibration.model)


def checked_grid(bits: int | Grid) -> Grid:
    """The grid of so many bits; comparisons give one of their own."""
    if isinstance(bits, Grid):
        return bits
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits must be {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}, got {bits!r}")
    return Grid(int(bits))


@torch.no_grad()
def quantize_level_(calibration: Calibration, level: Level, grid: Grid, state: Folder | None = None) -> None:
    """Put all weights of an open model that are not zero onto a grid, and note it in the level."""
    check_finite(calibration)
    own = Level(level.weights, level.live, grids=level.grids, num_zeros=level.num_zeros, originals=level.originals)
    skipped = without_grid(level.weights)
    journal = None
    if (calibration.has_batches or calibration.disk) and state is not None:
        settings: dict[str, Any] = {"grid": grid}
        settings |= {"samples": calibration.samples.digest()} if calibration.has_batches else {}
        journal = Journal(state, settings, calibration.each_weight(), "quantization", calibration.ranks)

    def finished(names: Sequence[str]) -> None:
        calibration.meter.step(f"quantised {names[-1]}", len(names))

    loop = Loop(calibration, own, Nearest(grid, skipped), journal=journal)
    with eagerly():
        step = Quantize(grid, None, skipped, calibration.clock, calibration.ranks)
        loop.run(step if calibration.has_batches else None, finished)
    level.packed = level.packed or own.packed
    for name, done in own.repairs.items():
        why = done.not_repaired if name in level.grids else None
        before = level.repairs.get(name, LayerRepair())
        level.repairs[name] = replace(before, bits_error=done.bits_error, only_rounded=why)


def without_grid(weights: Mapping[str, Weight]) -> list[str]:
    """Weights without elements, and those whose shape does not tell their rows: of grouped transposed convolutions."""
    return [
        name
        for name, weight in weights.items()
        if not weight.parameter.numel()
        or not weight.outputs
        or tuple(matrix_layout(weight)[0]) != tuple(weight.parameter.shape)
    ]


def check_finite(calibration: Calibration) -> None:
    for weight in calibration.each_weight():
        if not bool(weight.parameter.float().isfinite().all()):
            said = f"{weight.name} has values that are not finite in float32"
            raise ValueError(f"{said}; fix them before you quantise")
