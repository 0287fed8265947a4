"""What holding a sparsity costs in a training step: ours beside what others do."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import AdamW, Optimizer

from ...eligible import eligible
from ...schedule import Constant
from ...training import Pruner
from ..data import TokenShape
from ..evaluate import loss_of
from ..models import build
from .measure import timed


@dataclass(frozen=True)
class Arm:
    """A model and its optimizer, and what is done around the step to keep the model sparse."""

    model: nn.Module
    optimizer: Optimizer
    before: Callable[[], object] = lambda: None  # between backward and step
    after: Callable[[], object] = lambda: None  # behind the step

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        loss_of(self.model(inputs), targets).backward()
        self.before()
        self.optimizer.step()
        self.after()
        self.optimizer.zero_grad()


def dense(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    return Arm(model, AdamW(model.parameters(), lr=1e-4, fused=fused))


def hooks(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """Ours: ``Pruner`` on torch's AdamW."""
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=fused)
    Pruner(model, optimizer, schedule=Constant(sparsity))
    return Arm(model, optimizer)


def hooks_and_clipping(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """Ours, with ``clip_grad_norm_`` in between, after which gradients are masked once more."""
    arm = hooks(model, fused, sparsity)
    return Arm(model, arm.optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def dense_and_clipping(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    arm = dense(model, fused, sparsity)
    return Arm(model, arm.optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@torch.no_grad()
def multiply(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """The usual way: a float mask multiplied on gradient and weight, four bytes a weight."""
    masks = [(w, (w.abs() > w.abs().flatten().quantile(sparsity)).float()) for w in _weights(model)]

    @torch.no_grad()
    def on_gradients() -> None:
        for weight, mask in masks:
            if weight.grad is not None:
                weight.grad.mul_(mask)

    @torch.no_grad()
    def on_weights() -> None:
        for weight, mask in masks:
            weight.mul_(mask)

    on_weights()
    return Arm(model, AdamW(model.parameters(), lr=1e-4, fused=fused), on_gradients, on_weights)


def torch_prune(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """torch.nn.utils.prune: a parametrization that multiplies in each forward pass."""
    for weight in eligible(model).weights:
        prune.l1_unstructured(weight.module, "weight", sparsity)
    return Arm(model, AdamW(model.parameters(), lr=1e-4, fused=fused))


def topk_every_step(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """A proximal step: the smallest weights of every layer are set to zero after each update."""

    @torch.no_grad()
    def project() -> None:
        for weight in _weights(model):
            flat = weight.view(-1)
            flat[flat.abs().topk(round(sparsity * flat.numel()), largest=False, sorted=False).indices] = 0

    return Arm(model, AdamW(model.parameters(), lr=1e-4, fused=fused), after=project)


ARMS = {
    "dense": dense,
    "prunus, hooks on AdamW": hooks,
    "dense, clipping": dense_and_clipping,
    "prunus, clipping": hooks_and_clipping,
    "mask times gradient and weight": multiply,
    "torch.nn.utils.prune": torch_prune,
    "top-k every step": topk_every_step,
}
BESIDE = {"prunus, clipping": "dense, clipping"}  # what an arm is compared with, if not with dense


def bench_step(tokens: int, fused: bool, repeat: int, sparsity: float, device: torch.device) -> list[dict[str, Any]]:
    """A row for each arm: median step time, and median overhead over the dense step of the same round.

    The arms take turns, one step each, so that what else the machine does falls on all of them.
    """
    context = 256
    arms = {name: make(_model(context, device), fused, sparsity) for name, make in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for inputs, targets in _batches(tokens, context, repeat + 3, device):
        for name, arm in arms.items():
            times[name].append(1e3 * timed(partial(arm.step, inputs, targets), device)[0])
    rows = []
    for name, measured in times.items():
        dense_times = times[BESIDE.get(name, "dense")]
        ratios = [ours / other - 1 for ours, other in zip(measured[3:], dense_times[3:], strict=True)]
        rows.append(
            {
                "arm": name,
                "optimizer": "AdamW(fused=True)" if fused else "AdamW",
                "tokens": tokens,
                "ms": statistics.median(measured[3:]),
                "overhead": statistics.median(ratios),
                "beside": BESIDE.get(name, "dense"),
            }
        )
    return rows


def _model(context: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return build("gpt2-mini", TokenShape(256, context)).to(device)


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [weight.parameter for weight in eligible(model).weights]


def _batches(tokens: int, context: int, num: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        drawn = torch.randint(0, 256, (tokens // context, context + 1), generator=generator).to(device)
        yield drawn[:, :-1], drawn[:, 1:]


def size() -> tuple[int, int]:
    """Weights of the benchmark's model, and how many of them are prunable."""
    with torch.device("meta"):
        model = build("gpt2-mini", TokenShape(256, 256))
    return sum(p.numel() for p in model.parameters()), sum(w.numel() for w in _weights(model))
