"""Units of a model that has no configuration: neurons of MLPs, inner channels of convolution blocks, heads.

A pass shows the order in which layers are called. Layers that follow each other and fit in size are candidates, and a
check decides: the model without some of the units must compute what it does where nothing reads them. So the channels
of a residual stream, which other layers read too, stay.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from .calibration import Calibration
from .call_order import Calls, Candidate
from .plain_heads import HEADS, head_candidates
from .unit_check import UnitCheck, drawn
from .unit_layouts import places_of
from .units import Kind, Number, Plan, Slices

# attributes that count the channels of a norm, an activation or a depthwise convolution
WIDTHS = ("num_features", "num_parameters", "in_channels", "out_channels", "groups")


def plain_plan(calibration: Calibration) -> Plan:
    """The units of the model, each layer with a width of its own.

    Candidates come from its calls on the first sample, on which they are tried too.
    """
    assert not calibration.is_open, "its blocks may be on another device"
    calls = Calls.of(calibration)
    heads = list(head_candidates(calibration.model, calls))
    right = _right(UnitCheck.of(calibration), [*heads, *_neurons(calls)])
    order = [calls.layers[module].name for module in calls.order if module in calls.layers]
    reasons = _reasons(calibration.model, bool(heads))
    for candidate in right:
        reasons.pop(candidate.layer.kind, None)
    return _plan(sorted(right, key=lambda candidate: order.index(candidate.layer.consumer)), reasons)


def _reasons(model: nn.Module, has_candidates: bool) -> dict[Kind, str]:
    """Why there are no units of a kind, if there are none."""
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
