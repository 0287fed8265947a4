"""Which units of a layer go: structured OBS, and the scores of other methods.

W (out, in) are the dense weights of the layer that reads the units, S the columns of one unit, and I the inverse of the
damped Gram matrix of its inputs. Removing a unit and refitting all other columns costs

    sum_i W_iS (I_SS)^-1 W_iS^T,    and then W -= W_S (I_SS)^-1 I_S:,    I -= I_:S (I_SS)^-1 I_S:

The cheapest unit goes, one after another; of equal ones the first (Hassibi and Stork 1993; ZipLM, Kurtic et al. 2023,
https://arxiv.org/abs/2302.04089). Costs do not change with the scale of a column, so scaled weights will do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gram import Moments

BLOCK = 256  # columns that go between two updates of the matrices
UnitScore = Callable[[Tensor, Moments], Tensor]  # (weight (out, in), moments) -> scores of the columns (in,)


def cheapest(weight: Tensor, inverse: Tensor, places: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The ``num`` units that go, in order, and what each costs; a cost is NaN or inf where rounding spoils the rest.

    A = W^T W is all that costs need of the weights. With R I_SS R^T = 1, the rows u = R I_S: and
    v = R A_S: - R A_SS R^T u / 2 make I -= u^T u, A -= u^T v + v^T u, and the cost is tr(R A_SS R^T).
    """
    columns = places.flatten()
    weight = weight[:, columns]
    pair = torch.stack([inverse[columns][:, columns], weight.T @ weight], 1)  # (in, 2, in): rows of I and A
    return _cheapest_columns(pair, num) if places.shape[1] == 1 else _cheapest_wide(pair, places.shape[1], num)


def _cheapest_wide(pair: Tensor, width: int, num: int) -> tuple[Tensor, Tensor]:
    """Units of ``width`` columns; the matrices are brought up to date after each removal."""
    eye = torch.eye(width, dtype=pair.dtype, device=pair.device)
    rows = pair.unflatten(0, (-1, width))  # (units, width, 2, in)
    blocks = rows.unflatten(3, (-1, width)).diagonal(dim1=0, dim2=3).permute(1, 3, 0, 2)  # (2, units, width, width)
    is_gone = torch.zeros(len(rows), dtype=torch.bool, device=pair.device)
    units, costs = [], []
    for _ in range(num):
        own = torch.where(is_gone.view(-1, 1, 1), eye, blocks[0])
        root = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(own).L, eye, upper=False)
        whitened = root @ blocks[1]
        cost, unit = (whitened * root).sum((1, 2)).masked_fill_(is_gone, math.inf).min(0, keepdim=True)
        one = root.index_select(0, unit)[0]
        u, v = (one @ row for row in rows.index_select(0, unit)[0].unbind(1))
        v = torch.addmm(v, whitened.index_select(0, unit)[0] @ one.T, u, alpha=-0.5)
        _update_(pair, u, v)
        is_gone.index_fill_(0, unit, True)
        units.append(unit)
        costs.append(cost)
    return torch.cat(units), torch.cat(costs)


def _cheapest_columns(pair: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Units of one column: the matrices are brought up to date, and smaller, after each ``BLOCK`` of removals.

    Here A and v are twice as large, so that one product of u with both rows changes both diagonals.
    """
    pair[:, 1].mul_(2)
    left = torch.arange(len(pair), device=pair.device)
    units, costs = [], []
    for start in range(0, num, BLOCK):
        unit, cost, rows = _next_columns(pair, min(BLOCK, num - start))
        units.append(left[unit])
        costs.append(cost)
        if start + BLOCK < num:
            stay = torch.ones_like(left).index_fill_(0, unit, 0).nonzero().squeeze(1)
            left, pair = left[stay], pair.index_select(0, stay).index_select(2, stay)
            _update_(pair, *rows.index_select(2, stay))
    return torch.cat(units), torch.cat(costs)


def _next_columns(pair: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns to remove, what each costs, and the rows u and v of all: (2, num, in). The host waits for nothing."""
    rows = pair.new_empty(2, num, len(pair))
    diagonals = pair.diagonal(dim1=0, dim2=2).contiguous()  # (2, in): of I, and of W^T W
    diagonals[1] /= 2
    never = pair.new_tensor([[1.0], [math.inf]])
    units, costs = [], []
    for k in range(num):
        cost, unit = (diagonals[1] / diagonals[0]).min(0, keepdim=True)
        before = rows[:, :k]
        here = before.index_select(2, unit).squeeze(2)
        row = torch.addmm(pair.index_select(0, unit)[0], here, before[0], alpha=-1)  # of I, and of A
        row[1:].addmm_(here[:1], before[1], alpha=-1)
        row[1].addcmul_(row[0], cost, value=-1)
        new = torch.mul(row, row[0].index_select(0, unit).rsqrt(), out=rows[:, k])
        diagonals.addcmul_(new[0], new, value=-1)
        diagonals.index_copy_(1, unit, never)
        units.append(unit)
        costs.append(cost)
    return torch.cat(units), torch.cat(costs), rows


def _update_(pair: Tensor, u: Tensor, v: Tensor) -> None:
    pair[:, 0].addmm_(u.T, u, alpha=-1)
    pair[:, 1].addmm_(u.T, v, alpha=-1).addmm_(v.T, u, alpha=-1)


@dataclass(frozen=True)
class RandomScore:
    """The same columns for layers of the same width."""

    seed: int = 0

    def __call__(self, weight: Tensor, moments: Moments) -> Tensor:
        return torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(self.seed)).to(weight.device)


def norm(weight: Tensor, moments: Moments) -> Tensor:
    return weight.square().sum(0)


def summed_wanda(weight: Tensor, moments: Moments) -> Tensor:
    """WANDA's scores, summed over outputs."""
    return weight.abs().sum(0) * moments.gram.diagonal().sqrt()


def flap(weight: Tensor, moments: Moments) -> Tensor:
    """Squared norm times the variance of the input (An et al. 2024, https://arxiv.org/abs/2312.11983)."""
    assert moments.mean is not None
    variance = moments.gram.diagonal() / moments.num_tokens - moments.mean.square()
    return norm(weight, moments) * variance.clamp_(min=0)


# scores that comparisons give to Shrink in place of OBS
UNIT_SCORES: dict[str, UnitScore] = {"random": RandomScore(), "norm": norm, "wanda": summed_wanda, "flap": flap}
