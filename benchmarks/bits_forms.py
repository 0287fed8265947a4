"""Forms of few bits that a study stores weights in: how each is made, and what it takes in a file."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from prunus.eligible import eligible
from prunus.grids import grid_of
from prunus.oneshot import quantize, quantize_step
from prunus.oneshot.originals import Originals
from prunus.ops.grid import Grid

from .clocks import timed
from .wanda import their_oneshot

OURS, GPTQ, NEAREST = "GPTQ and descent", "GPTQ", "nearest"  # how weights are rounded
GROUPS = {8: 128, 4: 128, 3: 64, 2: 64}  # bits: columns that share a scale
SCALE_BITS = PLAIN_BITS = 16  # of a scale, and of a weight that has no code


@dataclass(frozen=True)
class Form:
    """How weights are stored: codes of ``bits`` bits, and a scale for ``group`` columns of a row."""

    bits: int
    group: int = 128
    rounding: str = OURS
    learns: bool = False  # the scales, afterwards
    peer: str = ""  # the package that quantises in our place
    together: bool = False  # with pruning, layer by layer, by prune(bits=)

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group)


FORMS: dict[str, Form] = {
    **{f"{bits}": Form(bits, group) for bits, group in GROUPS.items()},
    **{f"{bits}-gptq": Form(bits, group, GPTQ) for bits, group in GROUPS.items()},
    **{f"{bits}-nearest": Form(bits, group, NEAREST) for bits, group in GROUPS.items()},
    "3-128": Form(3),
    "4-32": Form(4, 32, f"{OURS}, groups of 32"),
    "4-32-nearest": Form(4, 32, f"{NEAREST}, groups of 32"),
    **{f"{bits}-together": Form(bits, rounding=f"{OURS}, while pruning", together=True) for bits in (8, 4, 3)},
    "4-scales": Form(4, rounding=f"{OURS}, scales recovered", learns=True),
    "4-llmcompressor": Form(4, 32, "GPTQ of llm-compressor, groups of 32", peer="llmcompressor"),
    **{f"{bits}-torchao": Form(bits, rounding="nearest of torchao", peer="torchao") for bits in (8, 4)},
}


@contextmanager
def quantised(
    model: nn.Module, batches: Sequence[Any], form: Form, has_mask: bool
) -> Iterator[tuple[nn.Module, float]]:
    """The model in a form, or a copy by another package, and the seconds that it took; afterwards it is as before."""
    device = next(model.parameters()).device
    if form.peer:
        seconds, theirs = timed(lambda: PEERS[form.peer](deepcopy(model), batches, form), device)
        yield theirs, seconds
        return
    read = [] if form.rounding.startswith(NEAREST) else batches
    plain = mock.patch.object(quantize_step, "descended", lambda weight, values, scales, *rest: (values, scales))
    with plain if form.rounding == GPTQ else nullcontext():  # without the descent that follows GPTQ
        seconds, undo = timed(lambda: quantize_model(model, read, form.grid, has_mask), device)
    try:
        yield model, seconds
    finally:
        undo()


def stored_bits(model: nn.Module, has_mask: bool, others: Grid | None = None) -> dict[str, int]:
    """What the weights of the blocks take in a file; ``others`` is the grid of weights for which none is noted."""
    bits = {"kept": 0, "mask_bits": 0, "code_bits": 0, "scale_bits": 0}
    for weight in eligible(model).weights:
        num, on_grid = weight.parameter.numel(), grid_of(weight.module, weight.name.rpartition(".")[2])
        kept = int(weight.parameter.count_nonzero()) if has_mask else num
        grid = on_grid.grid if on_grid else others
        bits["kept"] += kept
        bits["mask_bits"] += num if has_mask else 0
        bits["code_bits"] += kept * (grid.bits if grid else PLAIN_BITS)
        bits["scale_bits"] += SCALE_BITS * math.prod(grid.scales_shape(weight.parameter.shape)) if grid else 0
    return bits


@contextmanager
@torch.no_grad()
def in_bfloat16(model: nn.Module) -> Iterator[nn.Module]:
    """The weights of the blocks are rounded to bfloat16; afterwards they are as before."""
    originals = Originals()
    for weight in eligible(model).weights:
        originals.save_all(weight.parameter)
        weight.parameter.copy_(weight.parameter.bfloat16())
    try:
        yield model
    finally:
        originals.restore_()


@torch.no_grad()
def quantize_model(model: nn.Module, batches: Sequence[Any], grid: Grid, has_mask: bool) -> Callable[[], None]:
    """Quantise the blocks in place, without batches to the nearest value; returns what undoes it.

    Without a mask no zero can be stored: zeros become the smallest numbers, and get codes as others do.
    """
    weights = [weight.parameter for weight in eligible(model).weights]
    zeros = [] if has_mask else [(weight, weight == 0) for weight in weights]
    for weight, where in zeros:
        weight[where] = torch.finfo(weight.dtype).tiny
    result = quantize(model, batches, grid, progress=False)

    @torch.no_grad()
    def undo() -> None:
        result.undo_()
        for weight, where in zeros:
            weight[where] = 0

    return undo


# Other packages


def _by_llmcompressor(model: nn.Module, batches: Sequence[Any], form: Form) -> nn.Module:
    # groups of 32 columns: it refuses rows that no group divides, and few models have a multiple of 128
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    their_oneshot(model, batches[0], "GPTQModifier", **groups)
    return model


def _by_torchao(model: nn.Module, batches: Sequence[Any], form: Form) -> nn.Module:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    blocks = {id(weight.module) for weight in eligible(model).weights}
    kind = getattr(torch, f"int{form.bits}")
    config = IntxWeightOnlyConfig(weight_dtype=kind, granularity=PerGroup(form.group))
    quantize_(model, config, filter_fn=lambda module, name: id(module) in blocks)
    return model


PEERS = {"llmcompressor": _by_llmcompressor, "torchao": _by_torchao}
