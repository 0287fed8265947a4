"""The loss of a language model from its last hidden state, a few tokens at a time.

The logits of all tokens are by far the largest tensor of a pass, and are read and written many times; here they
exist for a few tokens only, and what goes back to the hidden state is computed with them.
"""

from typing import Any

import torch
from torch import Tensor, nn

ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}  # of logits that exist at a time


def head_of(model: nn.Module) -> nn.Linear:
    """The layer that makes logits of the hidden state; ValueError where it is not a plain one in float32 or less."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if type(head) is not nn.Linear or head.bias is not None or head.weight.dtype == torch.float64:
        raise ValueError("the model has no plain head")
    return head


def entropy_in_parts(hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Sum over samples of the mean cross-entropy of labels (sample, token) under ``softmax(hidden weight^T)``."""
    counted = labels != ignored
    share = (counted / counted.sum(1, keepdim=True)).float()[counted]
    return _Entropy.apply(hidden[counted], weight.detach(), labels[counted], share)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        back = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = max(1, ELEMENTS.get(hidden.device.type, 1 << 24) // len(weight))
        for start in range(0, len(hidden), size):
            here = slice(start, start + size)
            logits = torch.mm(hidden[here], weight.t()).float()
            target, shares = labels[here, None], share[here]
            top = logits.amax(1, keepdim=True)
            right = logits.gather(1, target)
            odds = logits.sub_(top).exp_()
            norm = odds.sum(1, keepdim=True)
            total += ((norm.log() + top - right).squeeze(1) * shares).sum()
            if back is not None:
                odds.mul_(shares[:, None] / norm).scatter_add_(1, target, -shares[:, None])
                torch.mm(odds.to(weight.dtype), weight, out=back[here])
        ctx.save_for_backward(*([] if back is None else [back]))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return back * gradients[0].to(back.dtype), None, None, None
