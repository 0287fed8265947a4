"""Options of a repair: how the weights that stay make up for those that go."""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Distill:
    """How kept weights, biases and norms learn the outputs of the dense model, by Adam over the calibration samples.

    First every block for itself, ``epochs`` times over the samples: it reads what the pruned model gives it, and its
    outputs should be those of the dense block in the dense model. Then, with ``whole_epochs``, the model as a whole:
    the loss is the KL divergence of its distribution from the dense model's, over tokens or classes, or of each single
    logit; if the outputs are not logits, it is their mean squared difference (``result.tuned_whole.loss`` says which).
    Rates fall to zero. A tenth of the samples is held out: the best epoch there stays, none if none is better.
    """

    epochs: int = 8
    rate: float = 3e-4
    whole_epochs: int = 16
    whole_rate: float = 1e-4
    batch: int = 8  # samples of a step

    def __post_init__(self) -> None:
        _check_counts(self, "epochs", "whole_epochs", "batch")
        if self.batch < 1:
            raise ValueError(f"batch is a number of samples, at least 1, got {self.batch}")
        for name in ("rate", "whole_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")


def _check_counts(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number and not negative, got {value!r}")


@dataclass(frozen=True)
class Repair:
    """How the weights that stay make up for those that go.

    ``targets``: reproduce the outputs of the dense model (``"dense"``), or those of the dense weights on the inputs
    that the pruned model gives them (``"own"``). ``damping`` holds weights near their dense values, the more the
    larger it is; None takes what suits the number of tokens. At most ``iterations`` of ADMM find which weights stay, at
    most ``refine`` steps of conjugate gradients their values. With ``tune``, True or ``Distill(...)``, each block then
    learns the outputs of the dense one, and the whole model those of the dense model. ``batch_norm`` changes the
    running statistics of batch norms at the end as those of the samples changed. ``tf32`` lets the products of ADMM use
    TF32 on CUDA; factorisation, refinement and errors never do.
    """

    targets: Literal["dense", "own"] = "dense"
    damping: float | None = None
    iterations: int = 300
    refine: int = 10
    tune: bool | Distill = False
    batch_norm: bool = True
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.targets not in ("dense", "own"):
            raise ValueError(f"targets must be dense or own, got {self.targets!r}")
        if self.damping is not None and not 0 <= self.damping < math.inf:
            raise ValueError(f"damping must be a finite number and not negative, got {self.damping}")
        if not isinstance(self.tune, bool | Distill):
            raise ValueError(f"tune is True, False or Distill(...), got {self.tune!r}")
        if self.tune and self.targets != "dense":
            raise ValueError("tune learns the outputs of the dense model; it needs targets='dense'")
        _check_counts(self, "iterations", "refine")

    @property
    def distill(self) -> Distill | None:
        return Distill() if self.tune is True else self.tune or None

    def damping_for(self, num_tokens: int, num_inputs: int) -> float:
        """``0.8 / sqrt(tokens an input)``: the fewer there are, the nearer weights should stay to their dense values.

        A compromise: of models with about as many tokens an input, one did better with less and one with more
        (docs/evidence/repair.md).
        """
        if self.damping is not None:
            return self.damping
        return min(max(0.8 * math.sqrt(num_inputs / max(1, num_tokens)), 0.01), 1.0)
