"""How much each weight matters.

A score has the shape of its weight, and a larger score is kept longer. Scores are pure: they read
tensors and return a new one. All else about a score stands in its row of SCORES.

``eps`` is None by default: nothing is added under roots, where moments may be far smaller than any
constant, and Adam's own eps guards denominators. Given, it is added in both places, as older
scripts did with 1e-8, which drowns the moments of a clipped model and leaves nearly plain magnitude.
"""

from __future__ import annotations  # the command line reads the table without loading torch

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .ops.formula import Formula, mixed, start_of

if TYPE_CHECKING:
    from torch import Tensor

Eps = float | None
ROOT = 0.5  # a power that torch computes as the square root itself; its sqrt() is twenty times slower on zeros on x86


def magnitude(weight: Tensor) -> Tensor:
    """``|w|``"""
    return weight.abs()


def bitter0(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: Eps = None, adam_eps: float = 1e-8) -> Tensor:
    """``w^2 |m| / (sqrt(v) + eps)``: momentum that is large against its noise."""
    return weight.square() * direction(exp_avg, exp_avg_sq, eps, adam_eps).abs_()


def bitter3(weight: Tensor, exp_avg: Tensor, *, eps: Eps = None) -> Tensor:
    """``|w| sqrt(|m| + eps)``"""
    root = (exp_avg.abs() + eps if eps else exp_avg.abs()).pow_(ROOT)
    return root.mul_(weight.abs())


def bitter5(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: Eps = None, adam_eps: float = 1e-8) -> Tensor:
    """``sign(w) m / (sqrt(v) + eps) + 0.1 |w|``: low where Adam pushes the weight away from zero; may be negative."""
    return weight.sign() * direction(exp_avg, exp_avg_sq, eps, adam_eps) + 0.1 * weight.abs()


def bitter6(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: Eps = None, adam_eps: float = 1e-8) -> Tensor:
    """``|w| sqrt(|m| + eps) sqrt(m^2 / (v + eps))``: bitter3 times the coherence of the gradient."""
    if eps is None:
        coherence = direction(exp_avg, exp_avg_sq, eps, adam_eps).abs_()
    else:
        coherence = exp_avg.abs() / (exp_avg_sq + eps).pow_(ROOT)
    return bitter3(weight, exp_avg, eps=eps) * coherence


def bitter7(weight: Tensor, exp_avg_sq: Tensor, *, eps: Eps = None) -> Tensor:
    """``|w| (v + eps)^(1/4)``: magnitude, weighted by how strongly the loss reacts. The default in training."""
    return (exp_avg_sq + eps if eps else exp_avg_sq).pow(ROOT).pow_(ROOT).mul_(weight.abs())


def bitter8(weight: Tensor, exp_avg: Tensor, step: float, *, beta1: float = 0.9, eps: Eps = None) -> Tensor:
    """``|w| sqrt(|m_hat| + eps)``, ``m_hat = m / (1 - beta1^t)``: bitter3 without Adam's cold start."""
    return bitter3(weight, exp_avg / (1 - beta1**step), eps=eps)


def bitter9(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, eps: Eps = None, adam_eps: float = 1e-8) -> Tensor:
    """``|w| sqrt(|m| + eps) - 0.1 movement``, ``movement = -sign(w) m / (sqrt(v) + eps)``; may be negative."""
    return bitter3(weight, exp_avg, eps=eps) + 0.1 * weight.sign() * direction(exp_avg, exp_avg_sq, eps, adam_eps)


def fisher(weight: Tensor, exp_avg_sq: Tensor, step: float, *, beta2: float = 0.999, q: float | None = None) -> Tensor:
    """``w^2 v_hat``, ``v_hat = v / (1 - beta2^t)``: the loss that removal costs, by a diagonal Hessian.

    With ``q``: ``|w| v_hat^q``, a family from magnitude (0) through bitter7's exponent (1/4) to the ranking of
    ``w^2 v_hat`` (1/2). Powers are multiples of 1/8, by square roots: torch rounds other powers by the element's
    place in its tensor, so a shard would differ from the whole.
    """
    corrected = exp_avg_sq / (1 - beta2**step)
    if q is None:
        return corrected.mul_(weight.square())
    return power(corrected, q).mul_(weight.abs())


def power(values: Tensor, q: float) -> Tensor:
    """``values^q`` by square roots and products, which round every element alike."""
    check_power(q)
    eighths, root, product = int(8 * q), values, values.new_ones(values.shape)
    while eighths:
        root, eighths = root.pow(ROOT), 2 * eighths
        if eighths >= 8:
            product, eighths = product.mul_(root), eighths - 8
    return product


def check_power(q: float | None) -> None:
    if q is not None and q not in (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
        problem = f"fisher takes a multiple of 1/8 below 1 for q, such as 0.25, or no q for w^2 v, got {q!r}"
        raise ValueError(f"{problem}; others round differently in a shard: masks would depend on the number of ranks")


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
    """``|m| / (sqrt(v) + eps)``: how sure Adam is of the direction of a pruned weight."""
    return direction(exp_avg, exp_avg_sq, None, adam_eps).abs_()


def momentum(exp_avg: Tensor) -> Tensor:
    """``|m|``"""
    return exp_avg.abs()


def gradient(grad: Tensor) -> Tensor:
    """``|g|``  (Evci et al. 2019, https://arxiv.org/abs/1911.11134)."""
    return grad.abs()


def direction(exp_avg: Tensor, exp_avg_sq: Tensor, eps: Eps, adam_eps: float) -> Tensor:
    """``m / (sqrt(v) + eps)``: where Adam would step, in units of the learning rate."""
    return exp_avg / exp_avg_sq.pow(ROOT).add_(adam_eps if eps is None else eps)


@dataclass(frozen=True)
class Score:
    """All there is to know about a score.

    ``settings`` are its other arguments: constants of Adam, the weight's name. ``formula`` says how kernels compute it
    with given constants, or None if no kernel does; a score without a formula, such as your own function, reads whole
    tensors, and its scores of one weight are stored for a while. ``check`` refuses options that do not fit. ``equals``
    names the score that computes the same with given options if all weights took equally many Adam steps.
    """

    of: Callable[..., Tensor]
    reads: tuple[str, ...]
    settings: tuple[str, ...] = ()
    formula: Callable[[Mapping[str, Any]], Formula | None] | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda _: None
    equals: Callable[[Mapping[str, Any]], str | None] = lambda _: None

    @property
    def reads_moments(self) -> bool:
        return not {"exp_avg", "exp_avg_sq"}.isdisjoint(self.reads)

    @property
    def takes_eps(self) -> bool:
        return "eps" in (self.of.__kwdefaults__ or {})

    def canonical(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name and options, equal for scores that compute the same where all weights took equally many steps."""
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("eps") == 0 and "adam_eps" not in self.settings:
            del given["eps"]
        other = self.equals(given)
        if other is None:
            return self.of.__name__, given
        return other, {name: value for name, value in given.items() if name == "eps"}


def _in_denominator(constants: Mapping[str, Any]) -> float:
    eps = constants.get("eps")
    return constants.get("adam_eps", 1e-8) if eps is None else eps


def _with_direction(name: str, has_fast_roots: bool) -> Callable[[Mapping[str, Any]], Formula]:
    """Formula of all three registers that divides by ``sqrt(v) + a``."""
    return lambda c: Formula(name, _W | _M | _V, _in_denominator(c), c.get("eps") or 0.0, has_fast_roots)


def _bitter6(constants: Mapping[str, Any]) -> Formula:
    if constants.get("eps") is None:
        return Formula("bitter6", _W | _M | _V, _in_denominator(constants), 0.0, True)
    return Formula("bitter6_eps", _W | _M | _V, constants["eps"], 0.0, True)


def _fisher(constants: Mapping[str, Any]) -> Formula | None:
    correction = 1 - constants.get("beta2", 0.999) ** constants["step"]
    known = {
        None: Formula("fisher", _W | _V, 0.0, correction),
        0: Formula("magnitude", _W, 0.0, correction),
        0.25: Formula("fisher_quarter", _W | _V, 0.0, correction, True),
        0.5: Formula("fisher_half", _W | _V, 0.0, correction, True),
    }
    return known.get(constants.get("q"))


_W, _M, _V = {"w": "weight"}, {"m": "exp_avg"}, {"v": "exp_avg_sq"}  # registers of kernels
_ALL = ("weight", "exp_avg", "exp_avg_sq")
_MAGNITUDE = Score(magnitude, ("weight",), formula=lambda _: Formula("magnitude", _W))
_BITTER3 = Score(
    bitter3, ("weight", "exp_avg"), (), lambda c: Formula("bitter3", _W | _M, c.get("eps") or 0.0, 1.0, True)
)

SCORES = {
    "magnitude": _MAGNITUDE,
    "bitter0": Score(bitter0, _ALL, ("adam_eps",), _with_direction("bitter0", True)),
    "bitter1": _MAGNITUDE,
    "bitter2": _MAGNITUDE,
    "bitter3": _BITTER3,
    "bitter4": _BITTER3,
    "bitter5": Score(bitter5, _ALL, ("adam_eps",), _with_direction("bitter5", False)),
    "bitter6": Score(bitter6, _ALL, ("adam_eps",), _bitter6),
    "bitter7": Score(
        bitter7, ("weight", "exp_avg_sq"), (), lambda c: Formula("bitter7", _W | _V, c.get("eps") or 0.0, 0.0, True)
    ),
    "bitter8": Score(
        bitter8,
        ("weight", "exp_avg", "step"),
        ("beta1",),
        lambda c: Formula("bitter8", _W | _M, c.get("eps") or 0.0, 1 - c.get("beta1", 0.9) ** c["step"], True),
        equals=lambda options: None if options.get("eps") else "bitter3",
    ),
    "bitter9": Score(bitter9, _ALL, ("adam_eps",), _with_direction("bitter9", False)),
    "fisher": Score(
        fisher,
        ("weight", "exp_avg_sq", "step"),
        ("beta2",),
        _fisher,
        check=lambda options: check_power(options.get("q")),
        equals=lambda options: {0: "magnitude", 0.25: "bitter7"}.get(options.get("q", 1)),
    ),
    "movement": Score(movement, ("movement",), formula=lambda _: Formula("itself", {"w": "movement"})),
    "random": Score(random, ("position",), ("name",), lambda _: Formula("random", {})),
    "wanda": Score(wanda, ("weight", "input_norm"), formula=lambda _: Formula("wanda", _W | {"v": "input_norm"})),
}

# by which pruned weights are ranked to come back
REGROWTH = {
    "snr": Score(snr, _ALL[1:], ("adam_eps",), lambda c: Formula("snr", _M | _V, _in_denominator(c), 0.0, True)),
    "momentum": Score(momentum, ("exp_avg",), formula=lambda _: Formula("momentum", _M)),
    "gradient": Score(gradient, ("grad",), formula=lambda _: Formula("magnitude", {"w": "grad"})),
}


def formula_of(of: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Formula | None] | None:
    """The formula of a score function if it is one of ours."""
    return next((row.formula for row in (*SCORES.values(), *REGROWTH.values()) if row.of is of), None)
