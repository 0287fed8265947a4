"""How many multiplications a model takes for a sample, in convolutions and linear layers, and what leaves fewer."""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunus.oneshot.calibration import Calibration
from prunus.oneshot.cuts import Cuts
from prunus.oneshot.forward import frozen, outputs
from prunus.oneshot.shrink import plan_of
from prunus.oneshot.widths import Wanted, Widths


@torch.no_grad()
def multiplications(model: nn.Module, sample: Any) -> int:
    """Multiplications of convolutions and matrix products for a batch of one sample; biases and norms aside.

    A convolution multiplies its whole kernel at each place of its output, beyond the edges of the image too.
    """
    with frozen(model), FlopCounterMode(display=False) as counter:
        outputs(model, sample)
    return counter.get_total_flops() // 2  # which counts additions too


def neurons_for(model: nn.Module, images: Tensor, removed: Fraction) -> float:
    """The smallest share of inner channels without which the model has that share of multiplications less."""
    calibration = Calibration(model, [images])
    plan = plan_of(calibration)
    widths = Widths(model, plan, calibration.weights)

    @cache
    def left(thousandths: int) -> int:
        stay = widths.by_hand(Wanted(neurons=thousandths / 1000))
        gone = {layer: torch.arange(stay[layer.field], layer.num) for layer in plan.layers if layer.field in stay}
        cuts = Cuts.of_units(model, gone, plan.numbers(stay))  # how many go counts, not which
        try:
            cuts.apply_()
            return multiplications(model, images[:1])
        finally:
            cuts.undo_()

    return smallest_share(left, multiplications(model, images[:1]), removed) / 1000


def smallest_share(left: Callable[[int], int], dense: int, removed: Fraction) -> int:
    """The smallest of 1 to 999 thousandths with which at most ``1 - removed`` of ``dense`` is left."""
    low, high = 1, 999
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= (1 - removed) * dense else (middle + 1, high)
    if left(low) > (1 - removed) * dense:
        raise ValueError(f"without {low / 1000:.1%} of the units, {left(low) / dense:.1%} of the products are left")
    return low
