"""What it costs to keep masks: in a training step on a CPU, in the optimizer's step on a GPU; ours beside others."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import AdamW, Optimizer

from prunus import AdamWPrune, Constant, Pruner, Spam
from prunus.eligible import eligible
from prunus.lab.data.batches import TokenShape
from prunus.lab.evaluate import loss_of
from prunus.lab.models import build
from prunus.ops import bits
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import copy_gb_s, queued_ms, timed
from .select import shapes_of

CONTEXT, WARM_UP = 256, 3
LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Keep masks: in a training step of a small GPT on a CPU, in the optimizer's step alone on a GPU."""

    tokens: tuple[int, ...] = (256, 2048)  # on a CPU: tokens a step
    layers: int = 12  # on a GPU: number of weights
    dim: int = 2048  # on a GPU: rows and columns of each
    shapes: Literal["gpt2", "mistral-7b"] | None = None  # on a GPU: a model's weights instead
    sparsity: float = 0.5  # fraction removed
    repeat: int = 15  # rounds or calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device, settings = device_of(self.device), {"sparsity": self.sparsity, "repeat": self.repeat}
        if device.type == "cuda":
            shapes, weights = shapes_of(self.shapes, self.layers, self.dim)
            settings |= {"weights": weights, "num_weights": sum(a * b for a, b in shapes)}
            settings |= {"copy_gb_s": copy_gb_s(device)}
            return "update", settings, measure_updates(shapes, self.sparsity, self.repeat, device)
        rows = [
            row
            for tokens in self.tokens
            for fused in (False, True)
            for row in measure_steps(tokens, fused, self.repeat, self.sparsity, device)
        ]
        model = _model(torch.device("meta"))
        settings["num_weights"] = sum(p.numel() for p in model.parameters())
        return "step", settings | {"num_prunable": sum(w.numel() for w in _weights(model))}, rows


# A training step


@dataclass(frozen=True)
class Arm:
    """A model and its optimizer, and what is done around the step to keep the model sparse."""

    model: nn.Module
    optimizer: Optimizer
    before: Callable[[], object] = lambda: None  # between backward and step
    after: Callable[[], object] = lambda: None  # after the step

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        loss_of(self.model(inputs), targets).backward()
        self.before()
        self.optimizer.step()
        self.after()
        self.optimizer.zero_grad()


def dense(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    return Arm(model, AdamW(model.parameters(), lr=LR, fused=fused))


def hooks(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """Ours: ``Pruner`` on torch's AdamW."""
    optimizer = AdamW(model.parameters(), lr=LR, fused=fused)
    Pruner(model, optimizer, schedule=Constant(sparsity))
    return Arm(model, optimizer)


def clipping(make: Callable[[nn.Module, bool, float], Arm]) -> Callable[[nn.Module, bool, float], Arm]:
    """The same with ``clip_grad_norm_`` in between, after which ours masks gradients once more."""

    def made(model: nn.Module, fused: bool, sparsity: float) -> Arm:
        optimizer = make(model, fused, sparsity).optimizer
        return Arm(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    return made


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
    return Arm(model, AdamW(model.parameters(), lr=LR, fused=fused), on_gradients, on_weights)


def torch_prune(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """torch.nn.utils.prune: a parametrization that multiplies in each forward pass."""
    for weight in eligible(model).weights:
        prune.l1_unstructured(weight.module, "weight", sparsity)
    return dense(model, fused, sparsity)


def topk_every_step(model: nn.Module, fused: bool, sparsity: float) -> Arm:
    """A proximal step: the smallest weights of every layer are set to zero after each update."""

    @torch.no_grad()
    def project() -> None:
        for weight in _weights(model):
            flat = weight.view(-1)
            flat[flat.abs().topk(round(sparsity * flat.numel()), largest=False, sorted=False).indices] = 0

    return Arm(model, AdamW(model.parameters(), lr=LR, fused=fused), after=project)


ARMS = {
    "dense": dense,
    "prunus, hooks on AdamW": hooks,
    "dense, clipping": clipping(dense),
    "prunus, clipping": clipping(hooks),
    "mask times gradient and weight": multiply,
    "torch.nn.utils.prune": torch_prune,
    "top-k every step": topk_every_step,
}
BESIDE = {"prunus, clipping": "dense, clipping"}  # what an arm is compared with, if not with dense


def measure_steps(tokens: int, fused: bool, repeat: int, sparsity: float, device: torch.device) -> list[Row]:
    """A row for each arm: median step time, and median overhead over the dense step of the same round.

    The arms take turns, one step each, so that what else the machine does falls on all of them.
    """
    arms = {name: make(_model(device), fused, sparsity) for name, make in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number, (inputs, targets) in enumerate(_batches(tokens, repeat + WARM_UP, device)):
        for name, arm in arms.items():
            seconds, _ = timed(partial(arm.step, inputs, targets), device)
            if number >= WARM_UP:
                times[name].append(1e3 * seconds)
    rows = []
    for name, measured in times.items():
        beside = BESIDE.get(name, "dense")
        overheads = [ours / other - 1 for ours, other in zip(measured, times[beside], strict=True)]
        row = {"arm": name, "optimizer": "AdamW(fused=True)" if fused else "AdamW", "tokens": tokens}
        row |= {"ms": statistics.median(measured), "overhead": statistics.median(overheads), "beside": beside}
        rows.append(row)
    return rows


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return build("gpt2-mini", TokenShape(256, CONTEXT)).to(device)


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [weight.parameter for weight in eligible(model).weights]


def _batches(tokens: int, num: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        drawn = torch.randint(0, 256, (tokens // CONTEXT, CONTEXT + 1), generator=generator).to(device)
        yield drawn[:, :-1], drawn[:, 1:]


# The optimizer's step alone


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


def measure_updates(shapes: Sequence[tuple[int, int]], sparsity: float, repeat: int, device: torch.device) -> list[Row]:
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
    rows: list[Row] = []
    for name in list(ways):
        milliseconds = queued_ms(ways.pop(name), repeat, device)
        first = rows[0]["ms"] if rows else milliseconds
        rows.append({"way": name, "ms": milliseconds, "ratio": milliseconds / first, "ulps_from_torch": ulps})
        torch.cuda.empty_cache()
    return rows


STEP = """A step of a GPT with {num_weights:,} weights, {num_prunable:,} of them prunable, at {sparsity:.0%}, \
no event among the steps; medians over {repeat} rounds in which the arms take turns. Overhead is the median \
over rounds of the time beyond the arm it stands beside, in the same round.
"""
UPDATE = """The optimizer's step alone on {num_weights:,} float32 weights ({weights}), {sparsity:.0%} of them masked; \
medians of queued calls, the ratio is to torch's fused step without masks.
"""


def step_section(record: Record) -> str:
    alone = {"overhead": None, "beside": None}
    rows = [row | alone if row["arm"] == row["beside"] else row for row in record["rows"]]
    columns = {"arm": "arm", "optimizer": "optimizer", "tokens": "tokens:,", "ms": "ms:.1f"}
    body = table_of(rows, columns | {"overhead": "overhead:+.2%", "beside": "beside"})
    return section("Keeping them: a training step", record, STEP, body)


def update_section(record: Record) -> str:
    body = table_of(record["rows"], {"way": "way", "ms": "ms:.3f", "ratio": "ratio:.3f"})
    ulps = record["rows"][0]["ulps_from_torch"]
    body += f"\n\nOne step from equal state differs from torch's by at most {ulps:.2f} ulp, "
    body += "counted at the larger of the weight and the learning rate."
    return section("Keeping them: the optimizer's step", record, UPDATE, body)


SECTIONS = {"step": step_section, "update": update_section}
