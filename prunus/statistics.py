"""What scores read: weights, Adam's moments, gradients, movement sums and collected input norms."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .eligible import Weight
from .ops.lazy import Lazy, check_elementwise
from .ops.shard import Shard
from .ranks import local
from .score import SCORES, Score, formula_of

READS = ("weight", "grad", "exp_avg", "exp_avg_sq", "step", "movement", "input_norm", "position")
SETTINGS = ("name", "beta1", "beta2", "adam_eps")
MOMENTS = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}


def score_of(score: str | Callable[..., Tensor], options: Mapping[str, Any]) -> Score:
    """The row of SCORES, or a row for a function, which reads what its arguments name."""
    if isinstance(score, str) and score in SCORES:
        row = SCORES[score]
    elif not callable(score):
        raise ValueError(f"score must be one of {', '.join(SCORES)}, or a function, got {score!r}")
    else:
        arguments = inspect.signature(score).parameters
        reads, settings = (tuple(name for name in arguments if name in known) for known in (READS, SETTINGS))
        row = Score(score, reads, settings, formula_of(score))
        needed = [n for n, a in arguments.items() if a.default is a.empty and a.kind is not a.VAR_KEYWORD]
        if unknown := [n for n in needed if n not in (*READS, *SETTINGS, *options)]:
            raise ValueError(f"a score may read {', '.join(READS + SETTINGS)}, but yours reads {unknown[0]!r}")
        if not set(row.reads) - {"step"}:
            raise ValueError(f"a score must read at least one of {', '.join(READS)}")
    taken = inspect.signature(row.of).parameters
    if unknown := [n for n in options if n not in taken or n in row.reads]:
        allowed = [n for n in taken if n not in row.reads and n not in row.settings]
        raise ValueError(f"score option {unknown[0]!r} is not one of {allowed or 'none'} that {score} takes")
    row.check(options)
    return row


def sources(
    weights: Sequence[Weight],
    optimizer: Optimizer,
    score: Score,
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    more: Mapping[str, Mapping[str, Tensor]],
    shards: Mapping[str, Shard] | None = None,
) -> list[Lazy]:
    """Lazy scores of every weight; ``more`` holds statistics by kind and name, and goes before the optimizer's own.

    If weights took different numbers of Adam steps or have different betas, bias corrections make their moments
    comparable, unless the score reads ``step``. A factor that all share is left out: bitter8 equals bitter3 to the bit.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    reads_moments = any(name in MOMENTS for name in score.reads)
    steps = [0.0] * len(weights)
    if reads_moments or "step" in score.reads:
        counts = [optimizer.state.get(weight.parameter, {}).get("step", 0.0) for weight in weights]
        # copied to the host in one go
        steps = torch.stack([torch.as_tensor(step, dtype=torch.float32).reshape(()) for step in counts]).tolist()
    known = [settings_of(weight.name, groups[id(weight.parameter)]) for weight in weights]
    num_factors = len({(step, own.get("beta1"), own.get("beta2")) for step, own in zip(steps, known, strict=True)})
    corrected = reads_moments and "step" not in score.reads and num_factors > 1 and any(steps)
    is_uncorrected = score.formula is not None and num_factors == 1 and not options.get("eps")
    scores = []
    for weight, step, settings in zip(weights, steps, known, strict=True):
        constants = {n: settings[n] for n in score.settings if n in settings} | dict(options)
        if "step" in score.reads:
            constants["step"] = math.inf if is_uncorrected else step
        reads = {n: _read(n, weight, optimizer, more) for n in score.reads if n not in ("step", "position")}
        shard = shards[weight.name] if shards else None
        if shard and "input_norm" in reads:
            reads["input_norm"] = shard.of(reads["input_norm"])
        if step == 0 and (corrected or "step" in score.reads):
            raise ValueError(f"{weight.name} has taken no Adam step since its moments were reset; exclude it, or wait")
        scales = {n: 1 / (1 - settings[beta] ** step) for n, beta in MOMENTS.items() if corrected and n in score.reads}
        given = (local(weight.parameter), score.of, reads, constants, scales, "position" in score.reads)
        scores.append(Lazy(weight.name, *given, dtype, score.formula, weight.outputs, shard))
    if shards and score.formula is None:
        check_elementwise(min(scores, key=lambda source: (source.numel < 2, source.numel)))
    return scores


def settings_of(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """What a score may read beside statistics: the weight's name and its group's Adam constants."""
    settings: dict[str, Any] = {"name": name}
    if len(group.get("betas", ())) == 2:
        settings["beta1"], settings["beta2"] = (float(beta) for beta in group["betas"])
    if not isinstance(group.get("eps", ()), tuple | list):
        settings["adam_eps"] = float(group["eps"])
    return settings


def check_moments(weights: Sequence[Weight], optimizer: Optimizer, score: Score) -> None:
    """Refuse an optimizer that does not keep the moments that the score reads."""
    for weight in weights:
        for name in score.reads:
            if name in MOMENTS and weight.parameter.grad is not None:
                moment(name, weight, optimizer)


def without_gradient(weights: Sequence[Weight], optimizer: Optimizer, reads: Collection[str]) -> list[Weight]:
    """Weights that no gradient has reached, where a score reads gradients or moments."""
    moments = [name for name in MOMENTS if name in reads]
    if not any(name in state for state in optimizer.state.values() for name in moments):
        moments = []  # an optimizer that keeps none is refused elsewhere

    def lacks(weight: Weight) -> bool:
        state = optimizer.state.get(weight.parameter, {})
        is_without_moments = bool(moments) and not any(key in state for key in MOMENTS)
        return is_without_moments or ("grad" in reads and weight.parameter.grad is None)

    return [weight for weight in weights if lacks(weight)]


def moment(name: str, weight: Weight, optimizer: Optimizer) -> Tensor:
    """``exp_avg`` or ``exp_avg_sq`` of a weight, as a plain tensor of its shape; on this rank its shard."""
    state = optimizer.state.get(weight.parameter, {})
    tensor = state.get(name)
    if isinstance(tensor, Tensor) and tensor.shape == weight.parameter.shape and tensor.is_floating_point():
        return local(tensor)
    kept = [key for key in state if key not in ("step", "mask")]
    if not kept and (weight.parameter.grad is None or any(name in other for other in optimizer.state.values())):
        problem = f"{weight.name} has no Adam state yet, since no gradient has reached it, so a score that reads {name}"
        raise ValueError(f"{problem} cannot rank it; begin later, exclude it, or pass no_gradient='dense'")
    problem = f"the score reads {name}, but {type(optimizer).__name__} keeps {', '.join(kept) or 'nothing'}"
    advice = "use an optimizer with plain Adam moments (AdamW, Adam, NAdam, AdamWPrune)"
    raise ValueError(f"{problem} for {weight.name}; {advice}, or the score magnitude or movement")


def _read(name: str, weight: Weight, optimizer: Optimizer, more: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    if weight.name in more.get(name, {}):
        return local(more[name][weight.name])
    if name == "weight":
        return local(weight.parameter)
    if name in MOMENTS:
        return moment(name, weight, optimizer)
    if name == "grad":
        if weight.parameter.grad is None:
            raise ValueError(f"the score reads the gradient, but {weight.name} has none at this event")
        return local(weight.parameter.grad)
    raise ValueError(f"the score reads {name}, but {weight.name} has none: its module was not called")


class Movement:
    """``-sum lr g w`` of each weight over the steps so far, with the gradient that the update uses."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in weights.items()}
        self._names = {id(p): name for name, p in weights.items()}

    def add(self, parameter: Tensor, grad: Tensor, lr: float) -> None:
        if (name := self._names.get(id(parameter))) is not None:
            local(self.sums[name]).addcmul_(local(grad), local(parameter), value=-lr)

    def add_all(self, optimizer: Optimizer) -> None:
        """Add the update that ``optimizer`` is about to make, without a GradScaler's factor."""
        if is_skipped(optimizer):
            return
        grad_scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if grad_scale is None else 1 / grad_scale.item()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.add(parameter, parameter.grad, float(group["lr"]) * scale)


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether a GradScaler lets a fused optimizer skip this step because of infinite gradients."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())
