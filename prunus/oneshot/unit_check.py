"""Whether a plan of units is right: a model without some units computes what it does where nothing reads them.

The consumers' columns of the units are zeroed and the model runs; then the units are cut and it runs again. A tensor
that was forgotten, a wrong layout, a norm over all units, and a second reader all show as a difference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..input_statistics import eagerly
from .calibration import Calibration
from .cut import Cuts
from .forward import outputs, swapped
from .layers import Reader
from .resources import is_out_of_memory
from .units import Number, UnitLayer, tensor_of

# relative: sums without their zeros round differently, and layers after them magnify it; a wrong plan is of order 1
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
Numbers = Callable[[Mapping[str, int]], Iterable[Number]]


def is_right(calibration: Calibration, layers: Sequence[UnitLayer], numbers: Numbers) -> bool:
    """Whether these layers can lose any units: tried with one unit of each, then with a quarter, drawn at random.

    ``numbers`` are those of the plan. One unit alone shows heads that a reshape would mix up, where more may fit.
    """
    by_field: dict[str, list[int]] = {}
    for layer in layers:
        by_field.setdefault(layer.field, []).append(layer.num)
    if any(len(set(nums)) > 1 or nums[0] < 2 for nums in by_field.values()):
        return False
    limit = max(TOLERANCE.get(p.dtype, 0.0) for p in calibration.model.parameters())
    for share in (0.0, 0.25):
        rng = torch.Generator().manual_seed(0)  # torch's draws belong to the user
        num_gone = {field: max(1, int(share * nums[0])) for field, nums in by_field.items()}
        gone = {layer: torch.randperm(layer.num, generator=rng)[: num_gone[layer.field]] for layer in layers}
        left = {field: nums[0] - num_gone[field] for field, nums in by_field.items()}
        if not difference(calibration, gone, numbers(left)) <= limit:
            return False
    return True


@torch.no_grad()
def difference(calibration: Calibration, gone: Mapping[UnitLayer, Tensor], numbers: Iterable[Number]) -> float:
    """How far the model without the units ``gone`` is from the one whose consumers' columns of them are zero.

    The largest difference, on the first sample, of an output of the model or an input of a consumer, relative to the
    largest value there; inf where the cut model does not run. The calibration is open; the model is as before at the
    end. Inputs of consumers show what outputs hide, where a layer adds little to them.
    """
    model = calibration.model
    zeroed = {}
    for layer, units in gone.items():
        weight, slices = tensor_of(model, layer.consumer), layer.slices[layer.consumer]
        places = slices.places[units].flatten().to(weight.device)
        zeroed[weight] = zeroed.get(weight, weight.data).index_fill(slices.dim, places, 0)
    cuts = Cuts.of_units(model, gone, numbers)
    try:
        cuts.apply_()
        values = _seen(calibration, gone, is_cut=True)
    except Exception as error:  # what a forward raises for shapes that do not fit is not known
        if is_out_of_memory(error):
            raise
        return float("inf")
    finally:
        cuts.undo_()
    with swapped(zeroed):
        expected = _seen(calibration, gone, is_cut=False)
    if [value.shape for value in values] != [value.shape for value in expected]:
        return float("inf")
    return max((_distance(a, b) for a, b in zip(values, expected, strict=True)), default=float("inf"))


def _seen(calibration: Calibration, gone: Mapping[UnitLayer, Tensor], is_cut: bool) -> list[Tensor]:
    """Outputs of the model for the first sample, and what its consumers read of the units that stay."""
    model, device, inputs = calibration.model, calibration.device, []

    def hook(dim: int, drop: Tensor | None) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter(args or kwargs.values()))
            if drop is not None:
                stays = torch.ones(x.shape[dim], dtype=torch.bool)
                stays[drop] = False
                x = x.index_select(dim, stays.nonzero().squeeze(1).to(x.device))
            inputs.append(x.cpu() if calibration.offload else x.clone())

        return see

    with ExitStack() as stack:
        # a model that draws at random draws the same in both passes
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(eagerly())
        for layer, units in gone.items():
            path, _, key = layer.consumer.rpartition(".")
            reader = Reader(model.get_submodule(path), key)
            if reader.is_known and not reader.is_attention:
                drop = None if is_cut else layer.slices[layer.consumer].places[units].flatten()
                see = hook(1 - tensor_of(model, layer.consumer).ndim, drop)
                stack.callback(reader.module.register_forward_pre_hook(see, with_kwargs=True).remove)
        output = outputs(model, calibration.batch(next(calibration.samples.chunks(1))))
    leaves = pytree.tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()] + inputs


def _distance(value: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements, relative to the largest finite one expected; inf where one is NaN."""
    apart = (value.double() - expected.double()).abs().masked_fill(value == expected, 0).nan_to_num(torch.inf)
    if not apart.any():
        return 0.0
    return float(apart.max() / expected.double().abs().masked_fill(~expected.isfinite(), 0).max())
