"""AdamW with masks: a pruned weight stays zero because its gradient counts as zero inside the step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from .masks import restore_bits
from .ops import bits
from .ranks import Ranks, is_dtensor, local, ranks_of, shard_of

P = ParamSpec("P")
Given = tuple[dict[str, Any], nn.Parameter, Tensor]  # parameter group, parameter, gradient
Numbers = tuple[float, float, float, float, float]  # lr, beta1, beta2, eps, weight decay


@dataclass(frozen=True)
class Spam:
    """Spike-aware momentum reset (Huang et al. 2025, https://arxiv.org/abs/2501.06842).

    Gradients with ``g^2 > theta v`` are clipped to ``sqrt(theta v)``. Every ``every`` steps the
    moments and their step count are reset, and the learning rate warms up over ``warmup`` steps
    along a cosine. Events whose score reads moments wait for ``hold`` steps after a reset.
    """

    theta: float = 5000.0
    every: int = 500
    warmup: int = 150
    hold: int = 50

    def __post_init__(self) -> None:
        if self.theta <= 0 or self.warmup < 0 or not 1 <= self.hold < self.every:
            raise ValueError(f"expected theta > 0, warmup >= 0 and 1 <= hold < every, got {self}")

    def lr_scale(self, num_steps: int) -> float:
        """Factor on the learning rate of the step after the first ``num_steps``."""
        since = num_steps % self.every + 1
        if num_steps < self.every or since > self.warmup:
            return 1.0
        return 0.5 * (1 - math.cos(math.pi * since / self.warmup))


def before_update(work: Callable[[torch.optim.Optimizer], None]) -> Callable[..., Any]:
    """A hook right before the update, behind a closure if there is one; ``work`` is given the one that steps."""

    def hook(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return work(args[0])

        def followed() -> Any:
            loss = closure()
            work(args[0])
            return loss

        return (args[0],), {**kwargs, "closure": followed}

    return hook


def _explained(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that answers an option that it does not have with what to write."""

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        known = [*signature(init).parameters][2:]
        if unknown := next((name for name in options if name not in ("params", *known)), None):
            problem = f"AdamWPrune has no option {unknown!r}, only {', '.join(known)}; pass the sparsity to the Pruner"
            raise TypeError(f"{problem}: Pruner(model, optimizer, schedule=Ramp(0.5, begin=100, end=1000))")
        init(*args, **options)

    return checked


class AdamWPrune(torch.optim.Optimizer):
    """``torch.optim.AdamW`` that masks its step by ``state[p]["mask"]``, packed bits that a Pruner puts there.

    Without masks it takes the steps of ``AdamW(foreach=False)``: on a CPU bit for bit, on a GPU up to rounding.
    ``max_norm`` clips the norm of all masked gradients together inside the step, as ``clip_grad_norm_``
    does before it. Gradients are masked only inside the step: a ``GradScaler``, or your own clipping,
    still sees the gradients of pruned weights. ``moment_dtype`` stores moments in another dtype than the weights,
    such as float32 beside bfloat16. With DTensors each rank updates its shard; only the norm is summed over ranks.

    On a GPU one kernel updates all tensors of a dtype. A CUDA graph of the step stays valid when masks change, which
    they do in place, provided that learning rates are tensors and ``spam`` is off.
    """

    # called with the weight, gradient and learning rate of each update
    watch: tuple[Callable[[nn.Parameter, Tensor, float], None], ...] = ()
    # parameters whose gradients are not masked, since pruned weights may come back
    unmasked: frozenset[nn.Parameter] = frozenset()
    # called with each parameter whose state begins anew, to put its mask there
    on_new_state: tuple[Callable[[nn.Parameter], None], ...] = ()
    # factors on the learning rates of some weights, float64, on their devices
    lr_factors: Mapping[nn.Parameter, Tensor] = MappingProxyType({})

    @_explained
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        spam: Spam | None = None,
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            problem = "lr, eps and weight_decay must not be negative and betas must lie in [0, 1)"
            raise ValueError(f"{problem}, got lr={lr}, eps={eps}, weight_decay={weight_decay}, betas={betas}")
        if max_norm is not None and max_norm <= 0:
            raise ValueError(f"max_norm must be positive, or None for no clipping, got {max_norm}")
        self.max_norm, self.spam, self.moment_dtype = max_norm, spam, moment_dtype
        self.grad_norm: Tensor | None = None  # of the last step, before clipping; None without max_norm
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "num_steps": 0})
        self._on_gpu = all(p.is_cuda for group in self.param_groups for p in group["params"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the step unscales and skips by itself under a GradScaler: its kernels do."""
        return self._on_gpu and not self.watch

    @property
    def num_steps(self) -> int:
        """Steps taken so far; resets of the moments do not change it."""
        return self.param_groups[0]["num_steps"]

    @property
    def steps_since_reset(self) -> int | None:
        """Steps since SPAM last reset the moments; None if it never did."""
        if self.spam is None or self.num_steps < self.spam.every:
            return None
        return self.num_steps % self.spam.every

    @property
    def is_holding(self) -> bool:
        """Whether SPAM reset the moments too recently to rank weights by them."""
        since = self.steps_since_reset
        return since is not None and self.spam is not None and since < self.spam.hold

    @property
    def lr_scale(self) -> float:
        """Factor on every group's learning rate in the next step."""
        return self.spam.lr_scale(self.num_steps) if self.spam else 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        update = self._update_by_kernels if given and self._step_supports_amp_scaling else self._update_plainly
        if torch.compiler.is_compiling():  # it reads numbers of tensors, which breaks a graph
            update = torch.compiler.disable(update)
        update(given)
        if self.spam is not None and getattr(self, "found_inf", 0):  # a GradScaler made the kernels skip the step
            return loss
        for group in self.param_groups:
            group["num_steps"] += 1
        if self.steps_since_reset == 0:
            for state in self.state.values():
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key].zero_()
        return loss

    def _update_plainly(self, given: list[Given]) -> None:
        for _, parameter, grad in given:
            mask = self._state_of(parameter).get("mask")
            if mask is not None and parameter not in self.unmasked:
                bits.zero_(local(grad), mask)
        factor, scale = self._clip_factor([parameter for _, parameter, _ in given]), self.lr_scale
        for group, parameter, grad in given:
            grad, state = local(grad), self.state[parameter]
            grad = grad if factor is None else grad * factor.to(grad.device)
            weight, moments = local(parameter), (local(state["exp_avg"]), local(state["exp_avg_sq"]))
            if self.spam is not None:
                grad = spike_clipped(grad.to(moments[1].dtype), moments[1], self.spam.theta)
            state["step"] += 1
            lr = float(group["lr"]) * scale
            lr_factor = self.lr_factors[parameter].item() if parameter in self.lr_factors else 1.0
            for watch in self.watch:
                watch(parameter, grad, lr_factor * lr)
            numbers = (*group["betas"], group["eps"], group["weight_decay"], state["step"].item(), lr_factor)
            wide = weight.to(moments[0].dtype)  # the weight itself unless moments have another dtype
            adamw_(wide, grad.to(wide.dtype), *moments, Update(lr, *numbers))
            if wide is not weight:
                weight.copy_(wide)

    def _update_by_kernels(self, given: list[Given]) -> None:
        """Mask, clip, update moments and weights of all tensors in one launch; gradients are only read."""
        from .ops._triton.adamw import AdamWStep, Extras, Operand

        self._kernels = getattr(self, "_kernels", None) or AdamWStep()
        scale, operands, copies = self.lr_scale, [], []
        parameters = [parameter for _, parameter, _ in given]
        owned, ranks = self._owned(parameters)
        is_sharded = any(map(is_dtensor, parameters))
        found_inf = getattr(self, "found_inf", None)
        numbers, lrs_at = self._numbers(scale)
        for (group, parameter, grad), is_owner in zip(given, owned, strict=True):
            state = self._state_of(parameter)
            tensors: list[Tensor] = [parameter, grad, state["exp_avg"], state["exp_avg_sq"]]
            if is_sharded:
                tensors = [local(tensor) for tensor in tensors]
            if not tensors[0].numel():  # an empty shard: no kernel is launched for it
                state["step"] += 1 if found_inf is None else 1 - found_inf
                continue
            if not all(map(Tensor.is_contiguous, tensors)):
                # kernels index memory, masks index elements: with channels_last the two differ
                flat = [tensor.contiguous() for tensor in tensors]
                copies += [(tensors[i], flat[i]) for i in (0, 2, 3) if flat[i] is not tensors[i]]
                tensors = flat
            mask = None if parameter in self.unmasked else state.get("mask")
            lr_factor = self.lr_factors.get(parameter)
            at = lrs_at[id(group)], 0 if lr_factor is None else lr_factor.data_ptr()
            weight, grad, exp_avg, exp_avg_sq = tensors
            moments = exp_avg, exp_avg_sq, state["step"]
            operands.append(Operand(weight, grad, *moments, mask, numbers[id(group)], *at, is_owner))
        theta, total = self.spam.theta if self.spam else None, ranks.sum if ranks else None
        extras = Extras(self.max_norm, theta, getattr(self, "grad_scale", None), found_inf, total)
        if operands:
            self.grad_norm = self._kernels(operands, extras)
            for old, new in copies:
                old.copy_(new)
        elif self.max_norm and total:  # the sum over ranks is collective
            self.grad_norm = total(torch.zeros(1, device=given[0][1].device)).sqrt().squeeze(0)

    def _numbers(self, scale: float) -> tuple[dict[int, Numbers], dict[int, int]]:
        """Numbers of each parameter group, by its id, and the address of its learning rate where kernels read that."""
        numbers, lrs_at = {}, {}
        for group in self.param_groups:
            lr = group["lr"]
            on_device = isinstance(lr, Tensor) and lr.is_cuda and lr.dtype == torch.float32 and scale == 1.0
            lrs_at[id(group)] = lr.data_ptr() if on_device else 0
            own = 0.0 if on_device else float(lr) * scale
            numbers[id(group)] = (own, *group["betas"], group["eps"], group["weight_decay"])
        return numbers, lrs_at

    def __getstate__(self) -> dict[str, Any]:
        names = ("max_norm", "spam", "moment_dtype", "grad_norm", "_on_gpu")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Cast packed bits back, which loading cast to the weight's dtype; the state of a plain AdamW is accepted."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("num_steps", 0)
        for parameter, own in self.state.items():
            if "mask" in own:
                ranks = ranks_of({"": parameter}) if is_dtensor(parameter) else None
                shard = shard_of("a weight", parameter, ranks) if ranks else None
                own["mask"] = restore_bits("a weight", own["mask"], parameter, shard)
            if "step" in own and parameter.is_cuda:
                own["step"] = own["step"].to(parameter.device, torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; with masks it has moments before the first step, since distributed loading fills what exists."""
        if self.state and self.num_steps == 0:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
                self._state_of(parameter)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but does not round moments in ``moment_dtype`` to the weights' dtype."""
        super().load_state_dict(state_dict)
        if self.moment_dtype is None:
            return
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][key] = value.to(parameter.device, self.moment_dtype, copy=True)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state[parameter]
        if "exp_avg" not in state:
            device = parameter.device if parameter.is_cuda else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=self.moment_dtype, memory_format=torch.preserve_format)
            for put_mask in self.on_new_state:
                put_mask(parameter)
        return state

    def _clip_factor(self, parameters: list[nn.Parameter]) -> Tensor | None:
        """Factor that scales the gradients to ``max_norm``; collective if the parameters are sharded."""
        if self.max_norm is None or not parameters:
            return None
        owned, ranks = self._owned(parameters)
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([grad for grad, is_owner in zip(grads, owned, strict=True) if is_owner])
        self.grad_norm = ranks.sum(norm.square()).sqrt() if ranks else norm
        return (self.max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)

    def _owned(self, parameters: list[nn.Parameter]) -> tuple[list[bool], Ranks | None]:
        """Whether this rank owns its shard of each parameter, and the ranks, if there are several."""
        if not any(map(is_dtensor, parameters)):
            return [True] * len(parameters), None
        key = [*map(id, parameters)]
        if getattr(self, "_known_owners", (None,))[0] != key:
            tensors = {str(i): p for i, p in enumerate(parameters)}
            ranks = ranks_of(tensors)
            owned = [ranks is None or shard_of(name, p, ranks).is_owner for name, p in tensors.items()]
            self._known_owners = key, (owned, ranks)
        return self._known_owners[1]


@dataclass(frozen=True)
class Update:
    """The numbers of one step: ``step`` counts from 1 and corrects the moments' cold start."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    lr_factor: float = 1.0  # factor on lr, but not on the decay


def adamw_(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, update: Update) -> None:
    """``w <- (1 - lr decay) w - factor lr m_hat / (sqrt(v_hat) + eps)``  (https://arxiv.org/abs/1711.05101).

    The operations and their order are those of ``torch.optim.AdamW(foreach=False)``, so that
    trajectories are equal to the bit.
    """
    weight.mul_(1 - update.lr * update.weight_decay)
    exp_avg.lerp_(grad, 1 - update.beta1)
    exp_avg_sq.mul_(update.beta2).addcmul_(grad, grad, value=1 - update.beta2)
    size = update.lr_factor * update.lr / (1 - update.beta1**update.step)
    scale = (1 - update.beta2**update.step) ** 0.5
    root = exp_avg_sq.pow(0.5)  # as sqrt(), which is twenty times slower on zeros on x86
    weight.addcdiv_(exp_avg, (root / scale).add_(update.eps), value=-size)


def spike_clipped(grad: Tensor, exp_avg_sq: Tensor, theta: float) -> Tensor:
    """``g``, but ``sign(g) sqrt(theta v)`` where ``v > 0`` and ``g^2 > theta v``; v is from before the step."""
    limit = exp_avg_sq.mul(theta).pow_(0.5)
    spike = (grad.abs() > limit) & (exp_avg_sq > 0)
    return grad.where(~spike, limit.copysign_(grad))
