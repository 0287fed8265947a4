"""The order in which a pass calls the modules of a model, and what their tensors are."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..eligible import CONVOLUTIONS, TRANSPOSED, Weight
from ..input_statistics import eagerly
from .calibration import Calibration
from .forward import outputs
from .layers import Reader
from .units import Kind, Slices, UnitLayer

INPUTS = ("in_features", "in_channels", "nx")
OUTPUTS = ("out_features", "out_channels", "nf")
Count = tuple[nn.Module, str, int]  # a module, its attribute, and how much of it belongs to each unit


@dataclass(frozen=True)
class Candidate:
    """Units that a model may have; ``layout`` tells it from others of the same tensors."""

    layer: UnitLayer
    counts: Sequence[Count]
    layout: str = ""

    @property
    def pattern(self) -> str:
        """What equal blocks share: the names of its tensors without numbers of blocks."""
        names = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in self.layer.slices]
        return " ".join([self.layer.kind, self.layout, *names])


@dataclass(frozen=True)
class Calls:
    """Leaf modules in the order of calls, named ``tensors`` of those that may be cut, plain ``layers`` among them."""

    order: list[nn.Module]
    tensors: dict[nn.Module, dict[str, Tensor]]
    layers: dict[nn.Module, Weight]

    @staticmethod
    @torch.no_grad()
    def of(calibration: Calibration) -> "Calls":
        """Those of a pass over the first sample."""
        model, order = calibration.model, []
        leaves = {module: path for path, module in model.named_modules() if next(module.children(), None) is None}
        devices = [calibration.device] if calibration.device.type == "cuda" else []
        with torch.random.fork_rng(devices), calibration.open(), eagerly(), ExitStack() as stack:
            calibration.check_model()
            for module in leaves:
                stack.enter_context(module.register_forward_pre_hook(lambda m, _: order.append(m)))
            outputs(model, calibration.batch(next(calibration.samples.chunks(1))))
        prunable = {weight.parameter for weight in calibration.weights.values()}
        num_calls, own = Counter(order), {module: _own_tensors(module) for module in model.modules()}
        num_holders = Counter(tensor for tensors in own.values() for tensor in tensors.values())
        tensors = {
            module: {f"{path}.{key}".removeprefix("."): tensor for key, tensor in own[module].items()}
            for module, path in leaves.items()
            if num_calls[module] == 1
            and all(num_holders[t] == 1 and (t.ndim < 2 or t in prunable) for t in own[module].values())
        }
        weights = {weight.module: weight for weight in calibration.weights.values()}
        layers = {m: w for m, w in weights.items() if m in tensors and w.name in tensors[m] and _is_layer(m)}
        return Calls(order, tensors, layers)

    def num_inputs(self, module: nn.Module) -> int:
        """0 where it is not a layer that may be cut."""
        weight = self.layers.get(module)
        return weight.parameter.shape[self.input_dim(module)] if weight else 0

    def num_outputs(self, module: nn.Module) -> int:
        weight = self.layers.get(module)
        return weight.parameter.shape[1 - self.input_dim(module)] if weight else 0

    def input_dim(self, module: nn.Module) -> int:
        return 0 if self.layers[module].outputs == (1,) else 1

    def candidate(
        self,
        kind: Kind,
        consumer: nn.Module,
        columns: Tensor,
        rows: Mapping[nn.Module, Tensor],
        slices: Mapping[str, Slices],
        counts: Iterable[Count],
        layout: str = "",
    ) -> Candidate:
        """Units of the outputs (unit, row) of some layers that ``columns`` (unit, column) of another one read."""
        name, places = self.layers[consumer].name, dict(slices)
        numbers = [*counts, *((consumer, key, columns.shape[1]) for key in INPUTS if hasattr(consumer, key))]
        for module, own in rows.items():
            dim = 1 - self.input_dim(module)
            places |= {key: Slices(dim if tensor.ndim > 1 else 0, own) for key, tensor in self.tensors[module].items()}
            numbers += [(module, key, own.shape[1]) for key in OUTPUTS if hasattr(module, key)]
        places[name] = Slices(self.input_dim(consumer), columns)
        return Candidate(UnitLayer(kind, name, name, places), numbers, layout)

    def can_lie_between(self, module: nn.Module, num: int) -> bool:
        """Whether it may act on each of ``num`` channels by itself: norms, activations, depthwise convolutions."""
        if isinstance(module, CONVOLUTIONS) and module.groups == module.in_channels == module.out_channels == num:
            return module in self.tensors
        tensors = _own_tensors(module).values()
        return not tensors or (module in self.tensors and all(tensor.ndim < 2 for tensor in tensors))


def _is_layer(module: nn.Module) -> bool:
    is_conv = isinstance(module, CONVOLUTIONS)
    return Reader(module).is_known and not isinstance(module, TRANSPOSED) and not (is_conv and module.groups > 1)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in own.items() if tensor is not None}
