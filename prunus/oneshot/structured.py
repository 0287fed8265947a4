"""Which units of a layer go: structured OBS, and the scores of other methods.

W (out, in) are the dense weights of the layer that reads the units, S the columns of one unit, and I the inverse of the
damped Gram matrix of its inputs. Removing a unit and refitting all other columns costs

    sum_i W_iS (I_SS)^-1 W_iS^T,    and then W -= W_S (I_SS)^-1 I_S:,    I -= I_:S (I_SS)^-1 I_S:

The cheapest unit goes, one after another; of equal ones the first (Hassibi and Stork 1993; ZipLM, Kurtic et al. 2023,
https://arxiv.org/abs/2302.04089). Costs do not change with the scale of a column, so scaled weights will do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gram import Moments

UnitScore = Callable[[Tensor, Moments], Tensor]  # (weight (out, in), moments) -> scores of the columns (in,)


def remove_by_definition(
    weight: Tensor, inverse: Tensor, places: Tensor, num: int
) -> tuple[list[int], list[float], Tensor]:
    """The units that go, in order, what each costs, and the weights at the end."""
    weight, inverse, gone, costs = weight.clone(), inverse.clone(), [], []
    for _ in range(num):
        cost_of = {}
        for unit in set(range(len(places))) - set(gone):
            columns = places[unit]
            solved = torch.linalg.solve(inverse[columns][:, columns], weight[:, columns].T)
            cost_of[unit] = (weight[:, columns] * solved.T).sum().item()
        unit = min(sorted(cost_of), key=cost_of.__getitem__)
        columns = places[unit]
        rows = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])
        weight -= weight[:, columns] @ rows
        inverse -= inverse[:, columns] @ rows
        gone.append(unit)
        costs.append(cost_of[unit])
    return gone, costs, weight


def cheapest(weight: Tensor, inverse: Tensor, places: Tensor, num: int) -> Tensor | None:
    """The ``num`` units that go; None where rounding spoils the matrices."""
    gone, _, _ = remove_by_definition(weight, inverse, places, num)
    return torch.tensor(gone, dtype=torch.long, device=places.device)


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
