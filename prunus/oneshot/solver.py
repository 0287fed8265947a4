"""Which weights of a layer stay, and what they must be so that its outputs stay: ADMM, then least squares.

W (out, in) are the dense weights, X the inputs that the layer gets in the pruned model, X_d those it gets in the
dense one. Layers that read the same input are solved together. W' has an exact number of zeros and makes

    |W' X - W X_d|^2 + lam |W' - W|^2,    lam = damping * mean(diag X X^T)

small: the damped error. The iteration is that of ALPS (Meng et al. 2024, https://arxiv.org/abs/2406.07831).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..ranks import Ranks
from .gram import Moments, float32_products
from .options import Repair
from .problem import Candidate, Problem
from .resources import Clock
from .row_share import RowShare
from .step import Change, Choose, LayerRepair

RHO = 0.1  # penalty of the first iterations
PANEL = 2048  # columns of a product that makes an inverse
LOOK = 3  # iterations between looks at how much the support still changes
FACTORED = 1024  # inputs of a layer from which ranks solve by the factor, as an inverse takes longer
ATTEMPTS = 4  # each with ten times the damping, until the Gram matrix can be factorised


@torch.no_grad()
def solve(
    weights: Mapping[str, Tensor],
    moments: Moments,
    choose: Choose,
    repair: Repair = Repair(),
    live: Mapping[str, Tensor] = MappingProxyType({}),
    clock: Clock | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Change]:
    """Prune layers (out, in) that share their input: which weights stay, and their values; ``ranks`` share the rows."""
    clock, damping = clock or Clock(moments.gram.device), repair.damping_for(moments.num_tokens, len(moments.gram))

    rows = RowShare(weights, ranks)

    def attempt(damping: float) -> dict[str, Change] | None:
        problem = Problem.of(rows.own(weights), moments, repair.targets == "dense", damping, rows.own(live), ranks)
        return _attempt(problem, choose, repair, clock)

    return rows.whole_changes(damped_enough(attempt, damping, weights, moments))


def damped_enough(
    attempt: Callable[[float], dict[str, Change] | None],
    damping: float,
    weights: Mapping[str, Tensor],
    moments: Moments,
) -> dict[str, Change]:
    """What ``attempt`` returns for a damping; where it returns None, the next attempt has ten times as much."""
    for _ in range(ATTEMPTS):
        with float32_products(moments.gram.device):
            if (changes := attempt(damping)) is not None:
                return changes
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
    ranks: Ranks | None = None,
) -> dict[str, Change]:
    """Repair layers (out, in) that share their input and whose masks are known."""
    clock, rows = clock or Clock(moments.gram.device), RowShare(weights, ranks)
    with float32_products(moments.gram.device), clock.part("refine"):
        damping = repair.damping_for(moments.num_tokens, len(moments.gram))
        problem = Problem.of(rows.own(weights), moments, repair.targets == "dense", damping, ranks=ranks)
        own = rows.own(masks)
        support = torch.cat([own[name] for name in weights]) & problem.live
        best = least_squares(problem, support, problem.scaled(), repair.refine)
        return rows.whole_changes(changes_of(problem, problem.masked(support), best))


def _attempt(problem: Problem, choose: Choose, repair: Repair, clock: Clock) -> dict[str, Change] | None:
    """The better one of two supports, refined: the first, which is WANDA's, and ADMM's."""
    first = _support(problem, problem.scaled(), choose)
    mask = problem.masked(first)
    if not bool(problem.total((first ^ problem.live).any().int())):
        return changes_of(problem, mask, mask)
    with clock.part("refine"):
        best, iterations = least_squares(problem, first, problem.scaled(), repair.refine), 0
    if repair.iterations:
        with clock.part("iterations"):
            if (solution := _admm(problem, first, choose, repair, clock)) is None:
                return None
        support, values, iterations = solution
        with clock.part("refine"):
            best = problem.better(best, least_squares(problem, support, values, repair.refine), mask)
    return changes_of(problem, mask, best, iterations)


def _support(problem: Problem, values: Tensor, choose: Choose) -> Tensor:
    """Where the largest values stand, within what is live; weights of inputs that were never seen go first."""
    scores = values.abs()
    if problem.unseen is not None:
        scores = torch.where(problem.unseen, -1 / (1 + scores), scores)
    masks = choose(problem.split(scores), problem.live_by_layer)
    return torch.cat([masks[name] for name in problem.weights])


def _admm(
    problem: Problem, support: Tensor, choose: Choose, repair: Repair, clock: Clock
) -> tuple[Tensor, Tensor, int] | None:
    """Support and values that fit each other, and the iterations it took; None where the factorisation fails.

        B = (Y - V + rho D) (G + rho I)^-1,   D = the largest of B + V / rho,   V += rho (B - D)

    With U = rho B + V, rho D is U on the support and V is U off it, so U is all there is to remember.
    """
    rho = RHO
    state = problem.scaled() * support * rho
    # for few rows two triangular solves take the time of one product, and each rank is spared the inverse
    by_factor = problem.ranks is not None and state.is_cpu and len(state) < len(problem.gram) >= FACTORED
    prepared = cholesky_of if by_factor else inverse_of
    if (matrix := prepared(problem.gram, rho, clock)) is None:
        return None
    seen, iteration = support, 0
    for iteration in range(1, repair.iterations + 1):
        multiplier = _without(state, support)
        rhs = state.sub_(multiplier, alpha=2).add_(problem.targets)
        with float32_products(rhs.device, repair.tf32):
            if by_factor:
                state = multiplier.add_(_solved_by(matrix, rhs), alpha=rho)
            else:
                state = multiplier.addmm_(rhs, matrix, alpha=rho)
        del rhs
        support = _support(problem, state, choose)
        if iteration % LOOK == 0:
            num_changed, num_kept = problem.total(torch.stack([(support ^ seen).sum(), support.sum()])).tolist()
            if num_changed == 0:
                break
            factor = 1.3 if num_changed >= 0.1 * num_kept else 1.2 if num_changed >= 0.005 * num_kept else 1.1
            torch.where(support, state * factor, state, out=state)
            rho *= factor
            matrix = None  # frees its memory for the next one
            if (matrix := prepared(problem.gram, rho, clock)) is None:
                return None
            seen = support
    return support, state.mul_(support).div_(rho), iteration


def _without(values: Tensor, support: Tensor) -> Tensor:
    """Zero on the support; on the CPU by a product, since torch's ``where`` takes twice the time there."""
    if values.is_cpu:
        return torch.addcmul(values, values, support.to(values.dtype), value=-1)
    return torch.where(support, 0, values)


def cholesky_of(gram: Tensor, rho: float, clock: Clock) -> Tensor | None:
    """``L`` of ``L L^T = G + rho I``, or None where that has no Cholesky factor."""
    with clock.part("factorisations"):
        shifted = gram.clone()
        shifted.diagonal().add_(rho)
        factor, info = torch.linalg.cholesky_ex(shifted)
        return None if info.item() else factor


def inverse_of(gram: Tensor, rho: float, clock: Clock) -> Tensor | None:
    """``(G + rho I)^-1``, or None where that has no Cholesky factor."""
    with clock.part("factorisations"):
        if (factor := cholesky_of(gram, rho, clock)) is None:
            return None
        return inverse_by_panels(factor) if factor.is_cuda else torch.cholesky_inverse(factor)


def _solved_by(factor: Tensor, rows: Tensor) -> Tensor:
    """``R (L L^T)^-1``"""
    half = torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)


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


def least_squares(problem: Problem, support: Tensor, values: Tensor, num_steps: int) -> Candidate:
    """Least squares on a support, from ``values`` on; a row whose error would rise, by rounding, stays dense there."""
    return problem.candidate(descended(problem.gram, problem.targets, support, values, num_steps), support)


def descended(gram: Tensor, targets: Tensor, support: Tensor, values: Tensor, num_steps: int) -> Tensor:
    """Scaled values on a support after conjugate gradients, each row with steps of its own."""
    values = values * support
    residual = torch.sub(targets, image := values @ gram, out=image).mul_(support)
    enough = 0.01 * torch.finfo(values.dtype).eps * (targets * support).square_().sum(1, keepdim=True)
    direction, square = residual.clone(), residual.square().sum(1, keepdim=True)
    image, product = torch.empty_like(values), torch.empty_like(values)
    for _ in range(num_steps):
        if bool((square <= enough).all()):
            break
        torch.mm(direction, gram, out=image).mul_(support)
        curvature = torch.mul(direction, image, out=product).sum(1, keepdim=True)
        step = torch.where((square > enough) & (curvature > 0), square / curvature, 0)
        values.addcmul_(step, direction)
        residual.addcmul_(step, image, value=-1)
        square, before = torch.mul(residual, residual, out=product).sum(1, keepdim=True), square
        direction = direction.mul_(torch.where(before > 0, square / before, 0)).add_(residual)
    return values


def changes_of(problem: Problem, mask: Candidate, best: Candidate, iterations: int = 0) -> dict[str, Change]:
    weights, supports = map(problem.split, (best.weight, best.support))
    energies = (problem.layer_sums(problem.energy) * problem.unit).tolist()
    errors = zip(problem.weights, energies, problem.relative_errors(mask), problem.relative_errors(best), strict=True)
    changes = {}
    for name, energy, mask_error, error in errors:
        weight = weights[name].to(problem.weights[name].dtype)
        repair = LayerRepair(mask_error, error, iterations, problem.damping)
        changes[name] = Change(supports[name], weight, energy, repair)
    return changes
