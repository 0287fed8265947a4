"""What a step of the loop is: a function of the layers of one group that returns their new values and masks.

A step is a frozen dataclass with ``__call__``. It knows no block, device, file or progress bar.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from .gram import Moments

Choose = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]  # (scores, live) -> masks


@dataclass(frozen=True)
class Layers:
    """Layers that read the same inputs, as matrices (out, in).

    ``moments`` are those of the inputs, None where no token arrives. Where there are several, the rows of every layer
    fall into as many parts of equal size: groups of a convolution, query, key and value, or experts (``are_experts``).
    """

    weights: Mapping[str, Tensor]
    moments: Sequence[Moments | None] = ()
    masks: Mapping[str, Tensor] | None = None  # of the weights that stay, where they are known before
    live: Mapping[str, Tensor] = field(default_factory=dict)  # of those that may; for a missing name all but zeros
    are_experts: bool = False
    is_routed: bool = False  # some tokens only are sent there


@dataclass(frozen=True)
class LayerRepair:
    """What a step found for one layer; errors are ``|W' X - W X_d|^2 / |W X_d|^2``, None where they are not known.

    X_d are the inputs in the dense model; for a repair with its own targets X stands in place of X_d.
    """

    mask_error: float | None = None  # of the first mask with dense weights
    error: float | None = None
    iterations: int = 0  # of ADMM
    damping: float | None = None  # larger than asked for where the Gram matrix could not be factorised otherwise
    not_repaired: str | None = None  # the reason


@dataclass(frozen=True)
class Change:
    """What becomes of one layer (out, in)."""

    mask: Tensor  # True where the weight stays
    weight: Tensor | None = None  # in the dtype of the dense weight; None: the dense values under the mask
    energy: float = 0.0  # |W X_d|^2
    repair: LayerRepair = LayerRepair()


class Step(Protocol):
    @property
    def targets(self) -> Literal["dense", "own"]:
        """Whether the step reads the dense model's inputs too, or only those of the compressed model."""

    def __call__(self, layers: Layers) -> dict[str, Change]: ...
