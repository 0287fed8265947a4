"""How much each weight matters.

A score has the shape of its weight, and a larger score is kept longer. Scores are pure: they read
tensors and return a new one. What a score reads is named in its row of SCORES.

``eps`` is None by default: nothing is added under roots, where moments may be far smaller than any
constant, and Adam's own eps guards denominators. Given, it is added in both places, as older
scripts did with 1e-8, which drowns the moments of a clipped model and leaves nearly plain magnitude.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ops.hash import mixed, start_of

ROOT = 0.5  # a power that torch computes as the square root itself; its sqrt() is twenty times slower on zeros on x86


def magnitude(weight: Tensor) -> Tensor:
    """``|w|``"""
    return weight.abs()


def bitter0(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: float | None = None, adam_eps: float = 1e-8
) -> Tensor:
    """``w^2 |m| / (sqrt(v) + eps)``: momentum that is large against its noise."""
    return weight.square() * direction(exp_avg, exp_avg_sq, eps, adam_eps).abs_()


def bitter3(weight: Tensor, exp_avg: Tensor, *, eps: float | None = None) -> Tensor:
    """``|w| sqrt(|m| + eps)``"""
    return guarded(exp_avg.abs(), eps).pow_(ROOT).mul_(weight.abs())


def bitter5(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: float | None = None, adam_eps: float = 1e-8
) -> Tensor:
    """``sign(w) m / (sqrt(v) + eps) + 0.1 |w|``: low where Adam pushes the weight away from zero; may be negative."""
    return weight.sign() * direction(exp_avg, exp_avg_sq, eps, adam_eps) + 0.1 * weight.abs()


def bitter6(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: float | None = None, adam_eps: float = 1e-8
) -> Tensor:
    """``|w| sqrt(|m| + eps) sqrt(m^2 / (v + eps))``: bitter3 times the coherence of the gradient."""
    if eps is None:
        coherence = direction(exp_avg, exp_avg_sq, eps, adam_eps).abs_()
    else:
        coherence = exp_avg.abs() / (exp_avg_sq + eps).pow_(ROOT)
    return bitter3(weight, exp_avg, eps=eps) * coherence


def bitter7(weight: Tensor, exp_avg_sq: Tensor, *, eps: float | None = None) -> Tensor:
    """``|w| (v + eps)^(1/4)``: magnitude, weighed by how strongly the loss reacts. The recommended one."""
    return guarded(exp_avg_sq, eps).pow(ROOT).pow_(ROOT).mul_(weight.abs())


def bitter8(weight: Tensor, exp_avg: Tensor, step: float, *, beta1: float = 0.9, eps: float | None = None) -> Tensor:
    """``|w| sqrt(|m_hat| + eps)``, ``m_hat = m / (1 - beta1^t)``: bitter3 without Adam's cold start."""
    return bitter3(weight, exp_avg / (1 - beta1**step), eps=eps)


def bitter9(
    weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: float | None = None, adam_eps: float = 1e-8
) -> Tensor:
    """``|w| sqrt(|m| + eps) - 0.1 movement``, ``movement = -sign(w) m / (sqrt(v) + eps)``; may be negative."""
    return bitter3(weight, exp_avg, eps=eps) + 0.1 * weight.sign() * direction(exp_avg, exp_avg_sq, eps, adam_eps)


def fisher(weight: Tensor, exp_avg_sq: Tensor, step: float, *, beta2: float = 0.999, q: float | None = None) -> Tensor:
    """``w^2 v_hat``, ``v_hat = v / (1 - beta2^t)``: the loss that removal costs by a diagonal Hessian.

    With ``q``: ``|w| v_hat^q``, the family that runs from magnitude (0) over bitter7's exponent
    (1/4) to the ranking of ``w^2 v_hat`` (1/2).
    """
    corrected = exp_avg_sq / (1 - beta2**step)
    if q is None:
        return corrected.mul_(weight.square())
    roots = {0.0: torch.ones_like, 0.25: lambda v: v.pow(ROOT).pow_(ROOT), 0.5: lambda v: v.pow(ROOT)}
    return roots.get(q, lambda v: v**q)(corrected) * weight.abs()


def movement(movement: Tensor) -> Tensor:
    """``-sum lr g w`` over the steps so far (Sanh et al. 2020, https://arxiv.org/abs/2005.07683)."""
    return movement.clone()


def random(position: Tensor, *, name: str = "", seed: int = 0) -> Tensor:
    """Uniform noise in [0, 1): a hash of (seed, name, position), the same on every rank and at every event."""
    uniform = (mixed(position + start_of(name, seed)) >> 11 & (1 << 53) - 1).double().mul_(2.0**-53)
    return uniform.float().clamp_(max=1 - 2.0**-24)  # rounding to float32 may reach 1


def wanda(weight: Tensor, input_norm: Tensor) -> Tensor:
    """``|w_ij| ||x_j||``  (Sun et al. 2023, https://arxiv.org/abs/2306.11695).

    ``input_norm`` holds the L2 norm of each input feature, in a shape that broadcasts to the weight:
    (in,) for a weight (out, in).
    """
    return weight.abs() * input_norm


def snr(exp_avg: Tensor, exp_avg_sq: Tensor, *, adam_eps: float = 1e-8) -> Tensor:
    """``|m| / (sqrt(v) + eps)``: how sure Adam is of where a pruned weight would go."""
    return direction(exp_avg, exp_avg_sq, None, adam_eps).abs_()


def momentum(exp_avg: Tensor) -> Tensor:
    """``|m|``"""
    return exp_avg.abs()


def gradient(grad: Tensor) -> Tensor:
    """``|g|``  (Evci et al. 2019, https://arxiv.org/abs/1911.11134)."""
    return grad.abs()


def direction(exp_avg: Tensor, exp_avg_sq: Tensor, eps: float | None, adam_eps: float) -> Tensor:
    """``m / (sqrt(v) + eps)``: where Adam would step, in units of the learning rate."""
    return exp_avg / exp_avg_sq.pow(ROOT).add_(adam_eps if eps is None else eps)


def guarded(moment: Tensor, eps: float | None) -> Tensor:
    return moment + eps if eps else moment


@dataclass(frozen=True)
class Score:
    """A score function, the statistics it reads, and the settings of Adam or names it also takes."""

    of: Callable[..., Tensor]
    reads: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def formula(self) -> str | None:
        """The name by which kernels know it; None for a function of somebody else's."""
        return self.of.__name__ if self.of.__module__ == __name__ else None


_ALL = ("weight", "exp_avg", "exp_avg_sq")

SCORES = {
    "magnitude": Score(magnitude, ("weight",)),
    "bitter0": Score(bitter0, _ALL, ("adam_eps",)),
    "bitter1": Score(magnitude, ("weight",)),
    "bitter2": Score(magnitude, ("weight",)),
    "bitter3": Score(bitter3, ("weight", "exp_avg")),
    "bitter4": Score(bitter3, ("weight", "exp_avg")),
    "bitter5": Score(bitter5, _ALL, ("adam_eps",)),
    "bitter6": Score(bitter6, _ALL, ("adam_eps",)),
    "bitter7": Score(bitter7, ("weight", "exp_avg_sq")),
    "bitter8": Score(bitter8, ("weight", "exp_avg", "step"), ("beta1",)),
    "bitter9": Score(bitter9, _ALL, ("adam_eps",)),
    "fisher": Score(fisher, ("weight", "exp_avg_sq", "step"), ("beta2",)),
    "movement": Score(movement, ("movement",)),
    "random": Score(random, ("position",), ("name",)),
    "wanda": Score(wanda, ("weight", "input_norm")),
}

# by which pruned weights are ranked to come back
REGROWTH = {
    "snr": Score(snr, ("exp_avg", "exp_avg_sq"), ("adam_eps",)),
    "momentum": Score(momentum, ("exp_avg",)),
    "gradient": Score(gradient, ("grad",)),
}
