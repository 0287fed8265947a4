"""Which weights of a layer stay, and what they must be so that its outputs stay: ADMM, then least squares.

W (out, in) are the dense weights, X the inputs that the layer gets in the pruned model, X_d those it gets in the
dense one. Layers that read the same input are solved together. W' has an exact number of zeros and makes

    |W' X - W X_d|^2 + lam |W' - W|^2,    lam = damping * mean(diag X X^T)

small: the damped error. The iteration is that of ALPS (Meng et al. 2024, https://arxiv.org/abs/2406.07831).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..ops import bits
from ..ops.lazy import alike, stored
from ..select import Selector
from ..threshold import cut_each, num_kept_each
from .gram import Moments, float32_products
from .group import Candidate, Group
from .options import Repair
from .resources import Clock

Choose = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]  # (scores, live) -> masks
RHO = 0.1  # penalty of the first iterations
PANEL = 2048  # columns of a product that makes an inverse
LOOK = 3  # iterations between looks at how much the support still changes
ATTEMPTS = 4  # each with ten times the damping, until the Gram matrix can be factorised


@dataclass(frozen=True)
class Solution:
    """One layer, solved. Errors are ``|W' X - W X_d|^2 / |W X_d|^2``; own targets have X in place of X_d."""

    weight: Tensor  # (out, in), in the dtype of the dense weight
    mask: Tensor  # True where the weight stays
    mask_error: float  # of the first mask with dense weights
    error: float
    energy: float  # |W X_d|^2
    iterations: int  # of ADMM
    damping: float  # larger than asked for where the Gram matrix could not be factorised otherwise


def keep(select: Selector, sparsity: float) -> Choose:
    """What ``select`` keeps of the layers of a group."""
    return lambda scores, live: select(scores, sparsity, live)


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


@torch.no_grad()
def solve(
    weights: Mapping[str, Tensor],
    moments: Moments,
    choose: Choose,
    repair: Repair = Repair(),
    live: Mapping[str, Tensor] = MappingProxyType({}),
    clock: Clock | None = None,
) -> dict[str, Solution]:
    """Prune layers (out, in) that share their input: find which weights stay and their values together.

    ``live`` are masks of the weights that may stay, by default those that are not zero.
    """
    clock, damping = clock or Clock(moments.gram.device), repair.damping_for(moments.num_tokens, len(moments.gram))
    for _ in range(ATTEMPTS):
        with float32_products(moments.gram.device):
            group = Group.of(weights, moments, repair.targets == "dense", damping, live)
            if (found := _solved(group, choose, repair, clock)) is not None:
                return found
        damping = max(10 * damping, 0.01)
    raise ValueError(
        f"the Gram matrix of the inputs of {', '.join(weights)} has no Cholesky factor, even damped by {damping / 10:g}"
    )


@torch.no_grad()
def refine(
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    moments: Moments,
    repair: Repair = Repair(),
    clock: Clock | None = None,
) -> dict[str, Solution]:
    """Repair layers (out, in) that share their input and whose masks are known."""
    clock = clock or Clock(moments.gram.device)
    with float32_products(moments.gram.device), clock.part("refine"):
        damping = repair.damping_for(moments.num_tokens, len(moments.gram))
        group = Group.of(weights, moments, repair.targets == "dense", damping)
        support = torch.cat([masks[name] for name in weights]) & group.live
        return _solutions(group, group.masked(support), _refined(group, support, group.scaled(), repair.refine))


def _solved(group: Group, choose: Choose, repair: Repair, clock: Clock) -> dict[str, Solution] | None:
    """The better one of two supports, refined: the first, which is WANDA's, and ADMM's."""
    first = _support(group, group.scaled(), choose)
    mask = group.masked(first)
    if torch.equal(first, group.live):
        return _solutions(group, mask, mask)
    with clock.part("refine"):
        best, iterations = _refined(group, first, group.scaled(), repair.refine), 0
    if repair.iterations:
        with clock.part("iterations"):
            if (found := _admm(group, first, choose, repair, clock)) is None:
                return None
        support, values, iterations = found
        with clock.part("refine"):
            best = group.better(best, _refined(group, support, values, repair.refine), mask)
    return _solutions(group, mask, best, iterations)


def _support(group: Group, values: Tensor, choose: Choose) -> Tensor:
    """Where the largest values stand, within what is live; weights of inputs that were never seen go first."""
    scores = values.abs()
    if group.unseen is not None:
        scores = torch.where(group.unseen, -1 / (1 + scores), scores)
    masks = choose(group.split(scores), group.live_by_layer)
    return torch.cat([masks[name] for name in group.weights])


def _admm(
    group: Group, support: Tensor, choose: Choose, repair: Repair, clock: Clock
) -> tuple[Tensor, Tensor, int] | None:
    """Support and values that fit each other, and the iterations it took; None where the factorisation fails.

        B = (Y - V + rho D) (G + rho I)^-1,   D = the largest of B + V / rho,   V += rho (B - D)

    With U = rho B + V, rho D is U on the support and V is U off it, so U is all there is to remember.
    """
    rho = RHO
    state = group.scaled() * support * rho
    if (inverse := _inverse(group.gram, rho, clock)) is None:
        return None
    seen, iteration = support, 0
    for iteration in range(1, repair.iterations + 1):
        multiplier = state.masked_fill(support, 0)
        rhs = state.sub_(multiplier, alpha=2).add_(group.targets)
        with float32_products(rhs.device, repair.tf32):
            state = torch.addmm(multiplier, rhs, inverse, alpha=rho)
        support = _support(group, state, choose)
        if iteration % LOOK == 0:
            num_changed, num_kept = torch.stack([(support ^ seen).sum(), support.sum()]).tolist()
            if num_changed == 0:
                break
            factor = 1.3 if num_changed >= 0.1 * num_kept else 1.2 if num_changed >= 0.005 * num_kept else 1.1
            state = torch.where(support, state * factor, state)
            rho *= factor
            inverse = None  # frees its memory for the next one
            if (inverse := _inverse(group.gram, rho, clock)) is None:
                return None
            seen = support
    return support, state * support / rho, iteration


def _inverse(gram: Tensor, rho: float, clock: Clock) -> Tensor | None:
    """``(G + rho I)^-1``, or None where that has no Cholesky factor."""
    with clock.part("factorisations"):
        shifted = gram.clone()
        shifted.diagonal().add_(rho)
        factor, info = torch.linalg.cholesky_ex(shifted)
        del shifted
        if info.item():
            return None
        return inverse_by_panels(factor) if factor.is_cuda else torch.cholesky_inverse(factor)


def inverse_by_panels(factor: Tensor) -> Tensor:
    """``(L L^T)^-1``, where L is overwritten: products of panels, about half the work of CUDA's cholesky_inverse."""
    num = len(factor)
    panels = [slice(start, min(start + PANEL, num)) for start in range(0, num, PANEL)]
    for here in panels:  # L^-1, from the top
        left, size = slice(0, here.start), here.stop - here.start
        eye = torch.eye(size, dtype=factor.dtype, device=factor.device)
        factor[here, here] = torch.linalg.solve_triangular(factor[here, here], eye, upper=False)
        if here.start:
            factor[here, left] = factor[here, here] @ (factor[here, left] @ factor[left, left]).neg_()
    inverse = torch.empty_like(factor)
    for here in panels:  # L^-T L^-1
        below, left = slice(here.start, num), slice(0, here.start)
        inverse[here, : here.stop] = factor[below, here].T @ factor[below, : here.stop]
        inverse[left, here] = inverse[here, left].T
    return inverse


def _refined(group: Group, support: Tensor, values: Tensor, num_steps: int) -> Candidate:
    """Least squares on a support, from ``values`` on: conjugate gradients, each row with steps of its own.

    A row whose error would rise by it (a dtype rounds) keeps its dense weights on the support.
    """
    values = values * support
    residual = (group.targets - values @ group.gram).mul_(support)
    enough = 0.01 * torch.finfo(values.dtype).eps * (group.targets * support).square().sum(1, keepdim=True)
    direction, square = residual.clone(), residual.square().sum(1, keepdim=True)
    for _ in range(num_steps):
        if bool((square <= enough).all()):
            break
        image = (direction @ group.gram).mul_(support)
        curvature = (direction * image).sum(1, keepdim=True)
        step = torch.where((square > enough) & (curvature > 0), square / curvature, 0)
        values.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        square, before = residual.square().sum(1, keepdim=True), square
        direction = direction.mul_(torch.where(before > 0, square / before, 0)).add_(residual)
    return group.candidate(values, support)


def _solutions(group: Group, mask: Candidate, best: Candidate, iterations: int = 0) -> dict[str, Solution]:
    """The layers of a group, apart again."""
    weights, supports, energies = map(group.split, (best.weight, best.support, group.energy))
    errors = zip(group.weights, group.relative_errors(mask), group.relative_errors(best), strict=True)
    return {
        name: Solution(
            weight=weights[name].to(group.weights[name].dtype),
            mask=supports[name],
            mask_error=mask_error,
            error=error,
            energy=float(energies[name].sum() * group.unit),
            iterations=iterations,
            damping=group.damping,
        )
        for name, mask_error, error in errors
    }
