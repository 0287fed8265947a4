"""Masks that the study compares with those of ``prune``: a veto with replacements, and a veto by lot."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...eligible import Weight
from ...oneshot.decide import within
from ...oneshot.prune import Job
from ...oneshot.result import Result, prune_
from ...oneshot.session import Originals
from ...ops import bits
from ...ops.lazy import Lazy
from ...select import Global, Selector

Masks = Mapping[str, Tensor]  # True where the weight stays
BEYOND, OUTSIDE = 2.0, 4.0  # where candidates beyond tau, and all that are none, begin; scores are at most 1


def replaced_veto(result: Result, sources: Sequence[Lazy], tau: float, select: Selector, sparsity: float) -> Masks:
    """Exactly ``sparsity`` of the weights, in the strategy's scope: of its candidates those within ``tau`` first.

    The lowest scores go first. Where too few are within tau, the lowest scores beyond it follow, so that the count is
    exact whatever the probe says.
    """
    where = {source.name: bits.unpack(result.candidates[source.name], source.shape) for source in sources}
    scores = {source.name: source.all()[where[source.name]].float() for source in sources}
    top = max(float(each.max()) for each in scores.values() if len(each)) or 1.0
    order = {}
    for name, mask in where.items():
        passes = within(result.ratios[name].q, tau)
        order[name] = torch.full(mask.shape, OUTSIDE, device=mask.device)
        order[name][mask] = scores[name] / top + torch.where(passes, 0.0, BEYOND)
    return select(order, sparsity)


def share_beyond(result: Result, masks: Masks, tau: float) -> float:
    """Fraction of what the masks prune that the probe would have kept."""
    num_beyond = num_pruned = 0
    for name, mask in masks.items():
        where = bits.unpack(result.candidates[name], mask.shape)
        num_beyond += int((~within(result.ratios[name].q, tau) & ~mask[where]).sum())
        num_pruned += int((~mask).sum())
    return num_beyond / max(1, num_pruned)


def vetoed_by_lot(result: Result, generator: torch.Generator) -> Masks:
    """As many candidates of each weight kept as the probe kept, drawn at random: what its choice is worth."""
    found = {}
    for name, mask in result.masks.items():
        where = bits.unpack(result.candidates[name], mask.shape)
        found[name] = torch.ones_like(mask)
        found[name][where] = ~_lots(int(where.sum()), int((where & ~mask).sum()), generator)
    return found


def exactly(job: Job, sparsity: float, generator: torch.Generator) -> Masks:
    """The strategy's masks with exactly that sparsity over all weights.

    Scopes round by row or layer, which can shift the sparsity by more than the effect that is looked for. Here every
    row or layer gives the whole number below its share, and lots decide which of them give one more.
    """
    select, sources = job.strategy.select, job.strategy.sources(sparsity, {})
    if select.group == "all":
        return _unpacked(sources, select.packed(sources, sparsity, {}))
    quotas = [replace(quota, num_drop=int(sparsity * quota.size)) for quota in select.quota_of(sources, sparsity)]
    one_more = [replace(quota, num_drop=min(quota.num_drop + 1, quota.size)) for quota in quotas]
    many, few = (_unpacked(sources, select.cut(sources, each, {})) for each in (quotas, one_more))
    between = {name: many[name] & ~few[name] for name in many}
    missing = round(sparsity * sum(source.numel for source in sources)) - sum(int((~m).sum()) for m in many.values())
    counts = [int(each.sum()) for each in between.values()]
    gone = _lots(sum(counts), missing, generator)
    for (name, where), part in zip(between.items(), gone.split(counts), strict=True):
        many[name][where] = ~part
    return many


def _unpacked(sources: Sequence[Lazy], packed: Masks) -> dict[str, Tensor]:
    return {source.name: bits.unpack(packed[source.name], source.shape) for source in sources}


def _lots(num: int, num_drawn: int, generator: torch.Generator) -> Tensor:
    """True at ``num_drawn`` of ``num`` places."""
    found = torch.zeros(num, dtype=torch.bool, device=generator.device)
    found[torch.rand(num, generator=generator, device=generator.device).argsort()[:num_drawn]] = True
    return found


def drawn(weights: Sequence[Weight], sparsity: float, generator: torch.Generator) -> Masks:
    """Weights of all layers by lot."""
    draw = {w.name: torch.rand(w.parameter.shape, generator=generator, device=w.parameter.device) for w in weights}
    return Global()(draw, sparsity)


@contextmanager
def pruned_by(job: Job, masks: Masks) -> Iterator[float]:
    """The job's model, pruned by masks for a while, and its sparsity."""
    originals = Originals()
    try:
        for name, mask in masks.items():
            prune_(job.weights[name].parameter, ~mask, originals)
        yield sum(int((~mask).sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    finally:
        job.undo_(originals)
