"""The steps of the loop: which weights of a group are pruned, and what the others become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..ranks import Ranks
from .gram import Moments
from .options import Repair
from .resources import Clock
from .row_share import choose_for
from .shared_work import divided
from .solver import refine, solve
from .step import Change, Choose, LayerRepair, Layers, keep_all_but, mean_error

FEW = 0.25  # tokens an input below which an expert is not repaired


@dataclass(frozen=True)
class Mask:
    """Prunes by known masks, or chooses by magnitude; weights that stay keep their dense values."""

    choose: Choose | None = None

    def __call__(self, layers: Layers) -> dict[str, Change]:
        masks = layers.masks
        if masks is None:
            assert self.choose is not None
            live = {name: layers.live.get(name, weight != 0) for name, weight in layers.weights.items()}
            masks = self.choose({name: weight.abs().float() for name, weight in layers.weights.items()}, live)
        return {name: Change(masks[name]) for name in layers.weights}


@dataclass(frozen=True)
class Solve:
    """Solves for the weights that stay, and which these are if masks are not known; experts share ``num_drop``."""

    repair: Repair
    choose: Choose | None = None  # where masks are not known
    num_drop: Mapping[str, int] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    ranks: Ranks | None = None  # that divide the work: rows of a part, or whole parts where there are several

    @property
    def targets(self) -> Literal["dense", "own"]:
        return self.repair.targets

    def __call__(self, layers: Layers) -> dict[str, Change]:
        if not any(layers.moments):
            return {}
        some = next(iter(layers.weights.values()))
        num_inputs, tokens = some.shape[1], [part.num_tokens if part else 0 for part in layers.moments]
        is_few = [(layers.is_routed or layers.are_experts) and num < FEW * num_inputs for num in tokens]
        masks = layers.masks
        if masks is None and len(tokens) > 1 and not layers.are_experts:
            masks = self._by_wanda(layers)
        by_score = replace(self.repair, iterations=0, refine=0, damping=1.0)

        def part(i: int) -> dict[str, Change]:
            how = by_score if is_few[i] else self.repair
            return self._part(layers, masks, i, layers.moments[i] or _no_moments(some), how)

        parts = divided(self.ranks if len(tokens) > 1 else None, len(tokens), part, some.device)
        reason = None
        if layers.are_experts and any(is_few):
            reason = f"{sum(is_few)} of {len(is_few)} experts got too few tokens to be repaired"
        elif any(is_few):
            reason = f"it has {num_inputs} inputs, but only {tokens[0]} tokens reached it"
        return {name: _joined([part[name] for part in parts], reason) for name in layers.weights}

    def _by_wanda(self, layers: Layers) -> dict[str, Tensor]:
        """Masks of a grouped convolution or an attention: WANDA's choice over all its parts."""
        assert self.choose is not None
        some = next(iter(layers.weights.values()))
        norms = torch.stack([(part or _no_moments(some)).gram.diagonal().sqrt() for part in layers.moments])
        scores = {
            name: weight.abs() * norms.repeat_interleave(len(weight) // len(norms), 0)
            for name, weight in layers.weights.items()
        }
        return self.choose(scores, layers.live or {name: weight != 0 for name, weight in layers.weights.items()})

    def _part(
        self, layers: Layers, masks: Mapping[str, Tensor] | None, i: int, moments: Moments, repair: Repair
    ) -> dict[str, Change]:
        num_parts = len(layers.moments)
        ranks = self.ranks if num_parts == 1 else None

        def rows(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: matrix.chunk(num_parts)[i] for name, matrix in matrices.items()}

        if masks is not None:
            return refine(rows(layers.weights), rows(masks), moments, repair, self.clock, ranks)
        choose, (name, *_) = self.choose, layers.weights
        if layers.are_experts and name in self.num_drop:
            num_drop = self.num_drop[name] // num_parts + (i < self.num_drop[name] % num_parts)
            choose = keep_all_but({name: num_drop})
        assert choose is not None
        weights = rows(layers.weights)
        choose = choose_for(choose, self.num_drop, weights, ranks)
        return solve(weights, moments, choose, repair, rows(layers.live), self.clock, ranks)


def _no_moments(weight: Tensor) -> Moments:
    """Moments of an expert that no token reached."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return Moments(weight.new_zeros(weight.shape[1], weight.shape[1], dtype=dtype), None, None, 0)


def _joined(parts: Sequence[Change], reason: str | None) -> Change:
    """The parts of a layer as one; errors are means, weighted by what the parts should give."""
    energy, repairs = sum(part.energy for part in parts) or 1.0, [part.repair for part in parts]
    repair = LayerRepair(
        mean_error([one.mask_error for one in repairs], parts),
        mean_error([one.error for one in repairs], parts),
        repairs[0].iterations,
        max(one.damping or 0.0 for one in repairs),
        reason,
    )
    weights = [part.weight for part in parts if part.weight is not None]
    return Change(torch.cat([part.mask for part in parts]), torch.cat(weights), energy, repair)
