"""Units of a model that has no configuration: neurons of MLPs, inner channels of convolution blocks, heads.

A pass shows the order in which layers are called. Layers that follow each other and fit in size are candidates, and a
check decides: the model without some of the units must compute what it does where nothing reads them. So the channels
of a residual stream, which other layers read too, stay.

A unit of heads is a head of keys and values with the heads of queries that read it. Sizes do not say how a layer that
computes query, key and value in one orders them, nor which attributes its module reads: each way is a candidate of its
own.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from ..eligible import CONVOLUTIONS, TRANSPOSED, Weight
from ..input_statistics import eagerly
from .calibration import Calibration
from .forward import outputs
from .layers import Reader
from .unit_check import UnitCheck, drawn
from .units import Kind, Number, Plan, Slices, UnitLayer, places_of

INPUTS = ("in_features", "in_channels", "nx")
OUTPUTS = ("out_features", "out_channels", "nf")
HEADS = ("num_heads", "n_heads", "n_head", "nheads", "heads", "num_attention_heads", "n_local_heads")
GROUPS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads", "n_local_kv_heads")
# attributes that count the channels of a norm, an activation or a depthwise convolution
WIDTHS = ("num_features", "num_parameters", "in_channels", "out_channels", "groups")
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


def plain_plan(calibration: Calibration) -> Plan:
    """The units of the model, each layer with a width of its own, found and tried on the first sample."""
    assert not calibration.is_open, "its blocks may be on another device"
    calls = Calls.of(calibration)
    heads = list(_head_candidates(calibration.model, calls))
    right = _right(UnitCheck.of(calibration), [*heads, *_neurons(calls)])
    order = [calls.layers[module].name for module in calls.order if module in calls.layers]
    reasons = _reasons(calibration.model, bool(heads))
    for candidate in right:
        reasons.pop(candidate.layer.kind, None)
    return _plan(sorted(right, key=lambda candidate: order.index(candidate.layer.consumer)), reasons)


def _reasons(model: nn.Module, has_candidates: bool) -> dict[Kind, str]:
    name = type(model).__name__
    heads = f"no module of {name} counts its heads ({', '.join(HEADS[:-1])}) beside layers for query, key and value"
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        heads = "nn.MultiheadAttention ties the number of heads to its width"
    if has_candidates:
        heads = f"the attention of {name} does not compute the same with fewer heads: it ties their number to its width"
    return {"neurons": f"no layer of {name} is the only reader of another layer's outputs", "heads": heads}


def _plan(candidates: Sequence[Candidate], reasons: Mapping[Kind, str]) -> Plan:
    nums = {candidate.layer.field: candidate.layer.num for candidate in candidates}

    def numbers(left: Mapping[str, int]) -> list[Number]:
        counts = ((left[one.layer.field], one.counts) for one in candidates if one.layer.field in left)
        return [(module, key, num * stay) for stay, each in counts for module, key, num in each]

    return Plan([one.layer for one in candidates], reasons, lambda field: range(1, nums[field] + 1), numbers)


def _right(check: UnitCheck, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that pass the check together; those of equal blocks are tried at once, then one by one."""

    def fit(*some: Candidate) -> bool:
        plan = _plan(some, {})
        cut = [(name, slices.dim) for layer in plan.layers for name, slices in layer.slices.items()]
        if len(set(cut)) < len(cut) or any(layer.num < 2 for layer in plan.layers):
            return False
        one, quarter = ([max(1, int(share * layer.num)) for layer in plan.layers] for share in (0.0, 0.25))
        return _fits(check, plan, one) and (quarter == one or _fits(check, plan, quarter))

    by_pattern: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_pattern.setdefault(candidate.pattern, []).append(candidate)
    right: list[Candidate] = []
    for alike in by_pattern.values():
        consumers = {candidate.layer.consumer for candidate in right}
        alike = [candidate for candidate in alike if candidate.layer.consumer not in consumers]
        if alike:
            right += alike if fit(*alike) else [one for one in alike if len(alike) > 1 and fit(one)]
    if len(by_pattern) == 1 or not right or fit(*right):
        return right
    together: list[Candidate] = []
    for candidate in right:
        together += [candidate] if fit(*together, candidate) else []
    return together


def _fits(check: UnitCheck, plan: Plan, nums: Sequence[int]) -> bool:
    """Whether so many units of each layer can go; one of each alone shows heads that a reshape would mix up."""
    gone = drawn(dict(zip(plan.layers, nums, strict=True)))
    left = {layer.field: layer.num - len(units) for layer, units in gone.items()}
    return not check.fault(gone, plan.numbers(left))


def _neurons(calls: Calls) -> Iterator[Candidate]:
    """Inputs of a layer that may be the outputs of the layer called before it, or of two that gate each other."""
    for position, consumer in enumerate(calls.order):
        num, between, producers = calls.num_inputs(consumer), [], []
        for module in reversed(calls.order[:position] if num > 1 else []):
            if calls.can_lie_between(module, num):
                between.append(module)
                continue
            producers.append(module)
            size = calls.num_outputs(module)
            layouts = {"": (1,)} if size == num else {}
            if size == 2 * num and len(producers) == 1:
                layouts = {"halves": (1, 1), "pairs": (2,)}
            one_each = places_of(num, (1,))
            inside = [item for m in between for item in calls.tensors.get(m, {}).items()]
            slices = {name: Slices(0, one_each) for name, tensor in inside if tensor.shape[:1] == (num,)}
            counts = [(m, key, 1) for m in between for key in WIDTHS if getattr(m, key, None) == num]
            for layout, parts in layouts.items():
                rows = dict.fromkeys(producers, places_of(num, parts))
                yield calls.candidate("neurons", consumer, one_each, rows, slices, counts, layout)
            if size != num or len(producers) == 2:
                break


def _head_candidates(model: nn.Module, calls: Calls) -> Iterator[Candidate]:
    """Of modules with an attribute that counts heads, the innermost first."""
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for module in reversed([*model.modules()]):
        counts = {key: value for key, value in vars(module).items() if type(value) is int and value > 1}
        num = next((counts[key] for key in HEADS if key in counts), 0)
        num_groups = next((counts[key] for key in GROUPS if key in counts), num)
        if not num or num % num_groups or isinstance(module, nn.MultiheadAttention):
            continue
        parts = set(module.modules())
        layers = [part for part in calls.order if part in calls.layers and part in parts]
        for place, consumer in enumerate(layers):
            dim, rest = divmod(calls.num_inputs(consumer), num)
            for producers in (layers[place - n : place] for n in (1, 2, 3) if n <= place and not rest):
                if sum(map(calls.num_outputs, producers)) == (num + 2 * num_groups) * dim:
                    attention = _Attention(calls, module, names, num, num_groups, dim)
                    yield from attention.candidates(producers, consumer)


@dataclass(frozen=True)
class _Attention:
    """A module with ``num`` heads of queries, ``num_groups`` of keys and values, and ``dim`` channels in each."""

    calls: Calls
    module: nn.Module
    names: Mapping[Tensor, str]  # of the model's tensors
    num: int
    num_groups: int
    dim: int

    @property
    def num_queries(self) -> int:
        """Heads of queries in a group."""
        return self.num // self.num_groups

    def candidates(self, producers: Sequence[nn.Module], consumer: nn.Module) -> Iterator[Candidate]:
        columns = torch.arange(self.calls.num_inputs(consumer)).view(self.num_groups, -1)
        ways = product(self._by_head(), self._numbers(), product(*map(self._layouts, producers)))
        for number, (by_head, numbers, layouts) in enumerate(ways):
            rows, layout = dict(zip(producers, layouts, strict=True)), f"{type(self.module).__name__} {number}"
            yield self.calls.candidate("heads", consumer, columns, rows, by_head, numbers, layout)

    def _by_head(self) -> Iterator[dict[str, Slices]]:
        """Tensors beside those of layers that have a place for each head: none, or all that can (position biases)."""
        yield {}
        layers = {tensor for layer in self.calls.layers for tensor in self.calls.tensors[layer].values()}
        one_each = torch.arange(self.num)[:, None]
        by_head = {
            self.names[tensor]: Slices(tensor.shape.index(self.num), one_each)
            for tensor in (*self.module.parameters(), *self.module.buffers())
            if tensor not in layers and tensor.shape.count(self.num) == 1 and self.num == self.num_groups
        }
        if by_head:
            yield by_head

    def _numbers(self) -> Iterator[list[Count]]:
        """Attributes that count heads, then beside them those that may count the channels of all heads."""
        values = {key: value for key, value in vars(self.module).items() if type(value) is int}
        counts = [(self.module, key, self.num_queries) for key in HEADS if values.get(key) == self.num]
        counts += [(self.module, key, 1) for key in GROUPS if values.get(key) == self.num_groups]
        widths = {self.num * self.dim: self.num_queries * self.dim, self.num_groups * self.dim: self.dim}
        others = {key: widths[value] for key, value in values.items() if value in widths}
        others = [(self.module, key, width) for key, width in others.items() if key not in HEADS + GROUPS]
        yield counts
        if others:
            yield counts + others
        if len(others) > 1:
            yield from ([*counts, other] for other in others)

    def _layouts(self, producer: nn.Module) -> Iterator[Tensor]:
        """Rows of each group, (group, row), where a layer computes some of query, key and value."""
        q, size = self.num_queries, self.calls.num_outputs(producer)
        for parts in dict.fromkeys([(q,), (1,), (q, 1, 1), (1, 1)]):  # heads of a group in each
            if size == sum(parts) * self.num_groups * self.dim:
                for sizes in dict.fromkeys([tuple(part * self.dim for part in parts), (sum(parts) * self.dim,)]):
                    yield places_of(self.num_groups, sizes)
