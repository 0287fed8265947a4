"""How many weights of each layer go: decided once, before any of them changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..allocate import clipped
from ..ops import bits
from ..ops.lazy import alike, stored
from ..select import Global, Quota, Selector, Shape
from ..threshold import cut_each, num_kept_each
from .scoring import Packed, Scores
from .step import Choose


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


def keep_all_but(num_drop: Mapping[str, int]) -> Choose:
    """All but the ``num_drop`` smallest of each layer; weights that are zero already count as dropped."""

    def choose(scores: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if next(iter(scores.values())).is_cuda:
            sources = alike([stored(name, score) for name, score in scores.items()])
            packed = {name: bits.pack(mask) for name, mask in live.items()}
            masks = cut_each(sources, num_drop, packed, num_kept_each(sources, packed))
            return {name: bits.unpack(masks[name], score.shape) for name, score in scores.items()}
        return {name: _largest(score, score.numel() - num_drop[name], live.get(name)) for name, score in scores.items()}

    return choose


def _largest(scores: Tensor, num_keep: int, live: Tensor | None) -> Tensor:
    """Where the ``num_keep`` largest of the live scores stand; of equal ones the last in order."""
    flat = scores.reshape(-1) if live is None else scores[live]
    keep = torch.ones_like(flat, dtype=torch.bool)
    if num_keep <= 0:
        keep.fill_(False)
    elif num_keep < len(flat):
        threshold = flat.kthvalue(len(flat) - num_keep).values
        keep = flat > threshold
        if num_equal := num_keep - int(keep.sum()):
            keep[(flat == threshold).nonzero().squeeze(1)[-num_equal:]] = True
    if live is None:
        return keep.view_as(scores)
    return torch.zeros_like(live).masked_scatter_(live, keep)
