"""One AdamW update of one tensor."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """The numbers of one step: ``step`` counts from 1 and corrects the moments' cold start."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    rate: float = 1.0  # factor on lr, but not on the decay


def adamw_(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, update: Update) -> None:
    """``w <- (1 - lr decay) w - rate lr m_hat / (sqrt(v_hat) + eps)``  (https://arxiv.org/abs/1711.05101).

    The operations and their order are those of ``torch.optim.AdamW(foreach=False)``, so that
    trajectories are equal to the bit.
    """
    weight.mul_(1 - update.lr * update.weight_decay)
    exp_avg.lerp_(grad, 1 - update.beta1)
    exp_avg_sq.mul_(update.beta2).addcmul_(grad, grad, value=1 - update.beta2)
    size = update.rate * update.lr / (1 - update.beta1**update.step)
    scale = (1 - update.beta2**update.step) ** 0.5
    root = exp_avg_sq.pow(0.5)  # as sqrt(), which is twenty times slower on zeros on x86
    weight.addcdiv_(exp_avg, (root / scale).add_(update.eps), value=-size)


def spike_clipped(grad: Tensor, exp_avg_sq: Tensor, theta: float) -> Tensor:
    """``g``, but ``sign(g) sqrt(theta v)`` where ``v > 0`` and ``g^2 > theta v``; v is from before the step."""
    limit = exp_avg_sq.mul(theta).pow_(0.5)
    spike = (grad.abs() > limit) & (exp_avg_sq > 0)
    return grad.where(~spike, limit.copysign_(grad))
