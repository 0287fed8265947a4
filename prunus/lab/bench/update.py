"""The optimizer's step alone, masked and not: ours beside torch's fused AdamW."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ...ops import bits
from ...optim import AdamWPrune, Spam
from .measure import queued_ms

LR = 1e-4


def parameters(shapes: Sequence[tuple[int, int]], device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for parameter in made:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return made


def masked(optimizer: Optimizer, sparsity: float) -> Optimizer:
    """The optimizer with a random mask of each parameter in its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["mask"] = bits.pack(torch.rand_like(parameter) >= sparsity)
    return optimizer


def check_agrees(shapes: Sequence[tuple[int, int]], device: torch.device) -> float:
    """Largest difference of a weight from torch's after one step from equal state.

    In ulps of the weight, or of the learning rate where the weight is smaller: of what the step adds to it.
    """
    ours, theirs = parameters(shapes[:2], device), parameters(shapes[:2], device)
    AdamWPrune(ours, lr=LR).step()
    AdamW(theirs, lr=LR, fused=True).step()
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        ulp = torch.finfo(a.dtype).eps * b.detach().abs().clamp(min=LR)
        worst = max(worst, ((a - b).detach().abs() / ulp).max().item())
    if worst > 8:
        raise RuntimeError(f"the steps differ by {worst} ulp, so no speed is reported")
    return worst


def around_fused(made: list[nn.Parameter], sparsity: float) -> Callable[[], None]:
    """The usual way: float masks multiplied on gradients and weights around torch's fused step."""
    optimizer = AdamW(made, lr=LR, fused=True)
    masks = [(torch.rand_like(p) >= sparsity).float() for p in made]

    grads = [p.grad for p in made if p.grad is not None]
    weights = [p.detach() for p in made]

    def step() -> None:
        torch._foreach_mul_(grads, masks)
        optimizer.step()
        torch._foreach_mul_(weights, masks)

    return step


def clipped_fused(made: list[nn.Parameter]) -> Callable[[], None]:
    optimizer = AdamW(made, lr=LR, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(made, 1.0)
        optimizer.step()

    return step


def bench_update(
    shapes: Sequence[tuple[int, int]], sparsity: float, repeat: int, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each way to step: median of queued calls, and the ratio to torch's fused step without masks."""
    ulps = check_agrees(shapes, device)
    made = parameters(shapes, device)
    ways: dict[str, Callable[[], object]] = {
        "torch AdamW(fused=True), no masks": AdamW(made, lr=LR, fused=True).step,
        "masks times gradient and weight around it": around_fused(made, sparsity),
        "prunus AdamWPrune, no masks": AdamWPrune(made, lr=LR).step,
        "prunus AdamWPrune, masks": masked(AdamWPrune(made, lr=LR), sparsity).step,
        "prunus AdamWPrune, masks, spam": masked(AdamWPrune(made, lr=LR, spam=Spam(every=10**9)), sparsity).step,
        "torch: clip_grad_norm_, then fused": clipped_fused(made),
        "prunus AdamWPrune, masks, max_norm": masked(AdamWPrune(made, lr=LR, max_norm=1.0), sparsity).step,
    }
    rows: list[dict[str, Any]] = []
    for name in list(ways):
        milliseconds = queued_ms(ways.pop(name), repeat, device)
        first = rows[0]["ms"] if rows else milliseconds
        rows.append({"way": name, "ms": milliseconds, "ratio": milliseconds / first, "ulps_from_torch": ulps})
        torch.cuda.empty_cache()
    return rows
