"""How many weights of each layer go: decided once, before any of them changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..allocate import clipped
from ..select import Global, Quota, Selector, Shape
from .scoring import Packed, Scores
from .step import Choose, keep_all_but


@dataclass(frozen=True)
class Counted(Selector):
    """By layer, with numbers that are known."""

    num_drop: Mapping[str, int]
    group = "layer"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        return [Quota((shape.name,), shape.numel, self.num_drop[shape.name]) for shape in shapes]


@dataclass(frozen=True)
class Allocation:
    """What ``choose`` keeps of the scores of some layers; ``num_drop`` by layer where only the numbers matter."""

    choose: Choose
    num_drop: Mapping[str, int] = field(default_factory=dict)


def selector(scores: Scores, sparsity: float, live: Packed) -> Selector:
    """The selector of the method; for allocate="fisher" and "moments" one by layer, with the counts of a global one."""
    method = scores.method
    if method.allocate not in ("fisher", "moments"):
        return method.select
    masks = Global().packed(scores.allocating(), sparsity, live)
    sizes = [weight.parameter.numel() for weight in scores.weights.values()]
    wish, gone = ([scores.num_pruned(name, packed) for name in scores.weights] for packed in (masks, live))
    return Counted(dict(zip(scores.weights, clipped(wish, sizes, sparsity, gone), strict=True)))


def allocate(scores: Scores, select: Selector, sparsity: float, live: Packed) -> Allocation:
    """How many of each layer go, or of each row where rows or neighbours are compared by themselves."""
    if select.group == "all":
        masks = scores.keep(select, sparsity, live)
        num_drop = {name: scores.num_pruned(name, masks) for name in scores.weights}
        return Allocation(keep_all_but(num_drop), num_drop)
    gone = {name: scores.num_pruned(name, live) for name in scores.weights}
    quotas = select.quota(scores.shapes(), sparsity, gone)
    if select.group != "layer":
        return Allocation(lambda scores, live: select(scores, sparsity, live))
    num_drop = {quota.names[0]: quota.num_drop for quota in quotas}
    return Allocation(keep_all_but(num_drop), num_drop)
