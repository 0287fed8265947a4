"""Whether units can be cut from a model: what is left must compute what the model does where nothing reads them.

Units are chosen at random, different ones in each layer. First their columns of the consumer are set to zero, and what
produces them is made several times larger, which nothing may notice; then they are cut. Wrong places, position biases
that layers share and norms over all units give other outputs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..input_statistics import eagerly
from .built_twice import unlike
from .calibration import Calibration
from .cuts import Cuts, to_the_end
from .disk_offload import disk_offload_of
from .forward import outputs
from .resources import reason_of
from .samples import Chunk, Tree, num_tokens, shortened
from .units import Number, UnitLayer, role, tensor_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative to a norm
COARSE = 0.1  # for 16-bit types; what is wrong gives a difference of order 1
NUM_TOKENS = 64  # of a sample are enough
LARGER = -3.0  # a product of two producers stays within 16-bit types
Gone = Mapping[UnitLayer, Tensor]  # units that go, by their numbers
Traces = dict[str, list[Tensor]]  # outputs of consumers, call by call, and of the model


def drawn(nums: Mapping[UnitLayer, int]) -> Gone:
    """So many units of each layer at random, different ones in each."""
    rng = torch.Generator().manual_seed(0)  # torch's draws belong to the user
    return {layer: torch.randperm(layer.num, generator=rng)[:num] for layer, num in nums.items()}


@dataclass(frozen=True)
class UnitCheck:
    """A model and the one sample that every check runs on."""

    model: nn.Module
    sample: Tree
    offload: torch.device | None

    @staticmethod
    def of(calibration: Calibration) -> "UnitCheck":
        """On the first sample, of a configured model its first tokens; ValueError where its outputs are no numbers."""
        with calibration.open(), eagerly():
            calibration.check_model()
        model, sample = calibration.model, calibration.samples.tree(Chunk(0, 0, 1))
        if hasattr(model, "config") and num_tokens(sample) > NUM_TOKENS:  # others may read one length alone
            sample = shortened(sample, NUM_TOKENS)
        check = UnitCheck(model, sample, calibration.offload.device if calibration.offload else None)
        if any(bool(output.isnan().any()) for output in check._traces([])[""]):
            problem = f"{type(model).__name__} gives NaN for the first sample"
            raise ValueError(f"{problem}; check that its inputs and the model's weights are finite")
        return check

    def fault(self, gone: Gone, numbers: Sequence[Number], less: nn.Module | None = None) -> str:
        """What is wrong without the units ``gone``, beside ``less``, as the class builds it; empty if nothing is."""
        cuts = Cuts.of_units(self.model, gone, numbers)
        try:
            cuts.apply_()
            if less is not None and (name := unlike(self.model, less)):
                return f"{name} has not the shape that the class builds"
            traces = self._traces(gone)
        except Exception as error:  # what a forward raises for shapes that do not fit is not known
            return f"the smaller model fails: {reason_of(error, 120)}"
        finally:
            cuts.undo_()
        with _unread(self.model, gone):
            wanted = self._traces(gone)
        if name := _unreached(wanted):
            return f"the first sample does not reach {name}"
        return _difference(wanted, traces, max(TOLERANCE.get(p.dtype, COARSE) for p in self.model.parameters()))

    def _traces(self, layers: Collection[UnitLayer]) -> Traces:
        """Outputs of the layers' consumers and of the model; the last name is empty."""
        calibration = Calibration(self.model, [self.sample], offload=self.offload, takes_frozen=True)
        traces: Traces = {}
        devices = [calibration.device] if calibration.device.type == "cuda" else []
        # a consumer that writes units of another layer loses outputs itself; who reads those is traced
        written = {name for layer in layers for name in layer.slices if name != layer.consumer}
        rng = torch.random.fork_rng(devices)
        with rng, calibration.open(), eagerly(), torch.no_grad(), ExitStack() as stack:
            for layer in (layer for layer in layers if layer.consumer not in written):
                module = self.model.get_submodule(layer.consumer.rpartition(".")[0])
                traces[layer.consumer] = seen = []
                stack.enter_context(module.register_forward_hook(partial(_append, seen)))
            traces[""] = list(_tensors(outputs(self.model, calibration.batch(Chunk(0, 0, 1)))))
        return traces


def _tensors(tree: Any) -> Iterator[Tensor]:
    tree = list(tree.values()) if isinstance(tree, Mapping) else tree
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf.detach().to("cpu", copy=True)


def _append(seen: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    """Store what a layer adds to its bias, which may be large."""
    bias = module._parameters.get("bias")
    seen.extend(_tensors(output if bias is None or output.shape[-1:] != bias.shape else output - bias))


def _unreached(traces: Traces) -> str:
    """A consumer that ran in no layer; of experts, some may get no token of one sample."""
    reached = {role(name) for name, seen in traces.items() if seen}
    return next((name for name in traces if role(name) not in reached), "")


def _difference(wanted: Traces, traces: Traces, tolerance: float) -> str:
    for name, tensors in wanted.items():
        if len(tensors) != len(traces[name]):
            return f"{name or 'the model'} gives another number of outputs"
        for one, other in zip(tensors, traces[name], strict=True):
            if one.shape != other.shape or not _are_near(one, other, tolerance):
                where = name.rpartition(".")[0] or "the model"
                return f"the outputs of {where} change, as where a norm reads all units or layers share a bias"
    return ""


def _are_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Norms are compared, not elements: rounding may send a few tokens to other experts."""
    one, other = one.double(), other.double()
    finite = one.isfinite()  # logits of what is forbidden are infinite
    if one.isnan().any() or not torch.equal(finite, other.isfinite()):
        return False
    one, other = one[finite], other[finite]
    return bool((one - other).norm() <= tolerance * one.norm())


@contextmanager
def _unread(model: nn.Module, gone: Gone) -> Iterator[None]:
    """The model with units that no consumer reads, and that are larger than they were."""
    saved: list[tuple[Tensor, int, Tensor, Tensor]] = []
    disk, viewed = disk_offload_of(model), list[str]()

    def restore() -> None:
        while disk and viewed:
            disk.drop_view(viewed.pop())
        for tensor, dim, places, values in reversed(saved):
            tensor.index_copy_(dim, places, values.to(tensor.device))

    try:
        for layer, units in gone.items():
            for name, slices in layer.slices.items():
                tensor = tensor_of(model, name).data
                places = slices.places[units].flatten().to(tensor.device)
                if tensor.ndim < 2:  # a variance that is negative gives NaN
                    continue
                factor = 0.0 if name == layer.consumer else LARGER
                if disk and name in disk.names:
                    disk.put_view(name, partial(_scaled, slices.dim, places, factor))
                    viewed.append(name)
                    continue
                values = tensor.index_select(slices.dim, places)
                saved.append((tensor, slices.dim, places, values.cpu()))
                tensor.index_copy_(slices.dim, places, values * factor)
        yield
    finally:
        to_the_end(restore)


def _scaled(dim: int, places: Tensor, factor: float, tensor: Tensor) -> Tensor:
    return tensor.index_copy(dim, places, tensor.index_select(dim, places) * factor)
