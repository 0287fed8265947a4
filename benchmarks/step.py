"""What it costs to keep masks: in a training step on a CPU, in the optimizer's step on a GPU, in a whole training."""

import gc
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import AdamW, Optimizer

from prunus import AdamWPrune, Constant, Pruner, Rate, Spam
from prunus.eligible import eligible
from prunus.lab.data.batches import TokenShape
from prunus.lab.evaluate import loss_of
from prunus.lab.models import build
from prunus.lab.run import ModelName, Run
from prunus.lab.trainer import Training
from prunus.ops import bits
from prunus.ops.machine import device_of, wait_for

from .benchmark import SPARSITY, Benchmark, Measured, RecordTable, Row
from .clocks import QUEUED, copy_gb_s, in_turns, overhead, queued, timed
from .select import SHAPES

CONTEXT, LR = 256, 1e-4
MASKED, WITH_RATES = "prunus AdamWPrune, masks", "prunus AdamWPrune, masks, rates"


@dataclass(frozen=True, kw_only=True)
class StepCost(Benchmark):
    """Keep masks: in a training step of a small GPT on a CPU, in the optimizer's step alone on a GPU."""

    model: ModelName = "gpt2-mini"  # on a CPU: network
    tokens: tuple[int, ...] = (256, 2048)  # on a CPU: tokens a step
    layers: int = 12  # on a GPU: number of weights
    dim: int = 2048  # on a GPU: rows and columns of each
    shapes: Literal["gpt2"] | None = None  # on a GPU: a model's weights instead
    repeat: int = 15  # rounds that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device, settings = device_of(self.device), {"sparsity": SPARSITY, "repeat": self.repeat}
        if device.type == "cuda":
            shapes = SHAPES[self.shapes] if self.shapes else [(self.dim, self.dim)] * self.layers
            weights = f"{len(shapes)} weights of {self.shapes or f'{self.dim} x {self.dim}'}"
            settings |= {"weights": weights, "num_weights": sum(map(math.prod, shapes)), "copy_gb_s": copy_gb_s(device)}
            return "update", settings, measure_updates(shapes, self.repeat, device)
        rows = [row for tokens in self.tokens for fused in (False, True) for row in measure_steps(self, tokens, fused)]
        model = self.network()
        settings["num_weights"] = sum(p.numel() for p in model.parameters())
        return "step", settings | {"num_prunable": sum(w.numel() for w in prunable(model))}, rows

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return build(self.model, TokenShape(256, CONTEXT))


# A training step: an arm prunes a model, and keeps its zeros by hooks on the optimizer's step


def hooks(model: nn.Module, optimizer: Optimizer) -> None:
    """Ours: ``Pruner`` on torch's AdamW."""
    Pruner(model, optimizer, schedule=Constant(SPARSITY))


def clipped(arm: Callable[..., object], model: nn.Module, optimizer: Optimizer) -> None:
    """The same with ``clip_grad_norm_`` before the step, after which ours masks gradients once more."""
    parameters = list(model.parameters())

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)

    optimizer.register_step_pre_hook(clip)
    arm(model, optimizer)


@torch.no_grad()
def multiply(model: nn.Module, optimizer: Optimizer) -> None:
    """The usual way: a float mask multiplied on gradient and weight, four bytes a weight."""
    weights = prunable(model)
    masks, values = (
        [(w.abs() > w.abs().flatten().quantile(SPARSITY)).float() for w in weights],
        [w.detach() for w in weights],
    )
    torch._foreach_mul_(values, masks)

    def on_gradients(*_: object) -> None:
        torch._foreach_mul_(gradients(weights), masks)

    optimizer.register_step_pre_hook(on_gradients)
    optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_(values, masks))


def torch_prune(model: nn.Module, optimizer: Optimizer) -> None:
    """torch.nn.utils.prune: a parametrization that multiplies in each forward pass."""
    for weight in eligible(model).weights:
        prune.l1_unstructured(weight.module, "weight", SPARSITY)


def topk_every_step(model: nn.Module, optimizer: Optimizer) -> None:
    """A proximal step: the smallest weights of every layer are set to zero after each update."""

    def project(*_: object) -> None:
        for flat in (weight.detach().view(-1) for weight in prunable(model)):
            flat[flat.abs().topk(round(SPARSITY * flat.numel()), largest=False, sorted=False).indices] = 0

    optimizer.register_step_post_hook(project)


ARMS: dict[str, Callable[..., object]] = {
    "dense": lambda model, optimizer: None,
    "prunus, hooks on AdamW": hooks,
    "dense, clipping": partial(clipped, lambda model, optimizer: None),
    "prunus, clipping": partial(clipped, hooks),
    "mask times gradient and weight": multiply,
    "torch.nn.utils.prune": torch_prune,
    "top-k every step": topk_every_step,
}
BESIDE = {"prunus, clipping": "dense, clipping"}  # what an arm is compared with, if not with dense


def prunable(model: nn.Module) -> list[nn.Parameter]:
    return [weight.parameter for weight in eligible(model).weights]


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def measure_steps(options: StepCost, tokens: int, fused: bool) -> list[Row]:
    """A row for each arm: median step time, and overhead over the dense step."""
    torch.manual_seed(0)
    batch = torch.randint(0, 256, (max(1, tokens // CONTEXT), min(tokens, CONTEXT) + 1))

    def step_of(arm: Callable[..., object]) -> Callable[[], None]:
        model = options.network()
        optimizer = AdamW(model.parameters(), lr=LR, fused=fused)
        arm(model, optimizer)

        def step() -> None:
            loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {name: step_of(arm) for name, arm in ARMS.items()}
    turns = in_turns(steps, options.repeat, torch.device("cpu"), warm_up=3)
    rows = []
    for name, turn in turns.items():
        beside = BESIDE.get(name, "dense")
        row = {"arm": name, "optimizer": "AdamW(fused=True)" if fused else "AdamW", "tokens": tokens, "ms": turn.ms}
        rows.append(row | {"overhead": overhead(turn, turns[beside]), "beside": beside})
    return rows


# The optimizer's step alone


def parameters(shapes: Sequence[tuple[int, int]], device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for parameter in made:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return made


def check_agrees(shape: tuple[int, int], device: torch.device) -> float:
    """Largest difference of a weight from torch's after one step from equal state.

    In ulps of the weight, or of the learning rate where the weight is smaller: of what the step adds to it.
    """
    ours, theirs = parameters([shape] * 2, device), parameters([shape] * 2, device)
    AdamWPrune(ours, lr=LR).step()
    AdamW(theirs, lr=LR, fused=True).step()
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        ulp = torch.finfo(a.dtype).eps * b.detach().abs().clamp(min=LR)
        worst = max(worst, ((a - b).detach().abs() / ulp).max().item())
    if worst > 8:
        raise RuntimeError(f"the steps differ by {worst} ulp, so no speed is reported")
    return worst


def measure_updates(shapes: Sequence[tuple[int, int]], repeat: int, device: torch.device) -> list[Row]:
    """A row for each way to step, in turns: median of queued calls, and the ratio to torch's fused step without masks.

    With rates, every weight has the factor on its learning rate that its density gives.
    """
    ulps = check_agrees(shapes[0], device)
    made = parameters(shapes, device)
    keep = [torch.rand_like(p) >= SPARSITY for p in made]
    packed, floats = [bits.pack(mask) for mask in keep], [mask.float() for mask in keep]
    fused, weights = AdamW(made, lr=LR, fused=True), [p.detach() for p in made]

    def masked(**settings: Any) -> AdamWPrune:
        optimizer = AdamWPrune(made, lr=LR, **settings)
        for parameter, mask in zip(made, packed, strict=True):
            optimizer.state[parameter]["mask"] = mask
        return optimizer

    with_rates, factor = masked(), Rate(power=0.5)(1 - SPARSITY)
    with_rates.lr_factors = {p: torch.full((), factor, dtype=torch.float64, device=device) for p in made}

    def around_fused() -> None:
        torch._foreach_mul_(gradients(made), floats)
        fused.step()
        torch._foreach_mul_(weights, floats)

    def clipped_fused() -> None:
        nn.utils.clip_grad_norm_(made, 1.0)
        fused.step()

    ways: dict[str, Callable[[], object]] = {
        "torch AdamW(fused=True), no masks": fused.step,
        "masks times gradient and weight around it": around_fused,
        "prunus AdamWPrune, no masks": AdamWPrune(made, lr=LR).step,
        MASKED: masked().step,
        WITH_RATES: with_rates.step,
        "prunus AdamWPrune, masks, spam": masked(spam=Spam(every=10**9)).step,
        "torch: clip_grad_norm_, then fused": clipped_fused,
        "prunus AdamWPrune, masks, max_norm": masked(max_norm=1.0).step,
    }
    turns = in_turns({name: queued(way) for name, way in ways.items()}, repeat, device)
    first = next(iter(turns.values()))
    rows: list[Row] = []
    for name, turn in turns.items():
        row = {"way": name, "ms": turn.ms / QUEUED, "ratio": turn.ms / first.ms, "ulps_from_torch": ulps}
        rows.append(row | ({"overhead": overhead(turn, turns[MASKED])} if name == WITH_RATES else {}))
    return rows


# A whole training


TRAINED: dict[str, dict[str, Any]] = {  # all of them clip, and rates follow the density
    "dense, torch AdamW(fused=True)": {"score": "none", "optimizer": "adamw"},
    "Pruner + AdamWPrune": {"score": "bitter7", "optimizer": "adamwprune"},
    "Pruner by hooks on AdamW(fused=True)": {"score": "bitter7", "optimizer": "adamw"},
}


ArmName = Literal[tuple(TRAINED)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class Train(Benchmark):
    """Train GPT-2 124M, dense and pruned."""

    data: str = "stdlib"  # what to read
    model: ModelName = "gpt2"  # network
    context: int = 1024  # tokens a window
    batch: int = 32  # windows a step
    compile: bool = True  # torch.compile the model
    arms: tuple[ArmName, ...] = tuple(TRAINED)  # what is trained
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16 by autocast
    every: int = 50  # steps from an event to the next, and of a round
    repeat: int = 15  # a third of it, at least three, is the number of rounds
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        rounds = max(3, self.repeat // 3)
        steps = self.every * (rounds + 2)
        said = {name: getattr(self, name) for name in ("model", "context", "batch", "compile", "precision", "every")}
        said |= {"sparsity": SPARSITY}
        base = Run(**said, data=self.data, device=self.device, steps=steps, begin=1, end=steps)
        rows: list[Row] = []
        for name in self.arms:
            row: Row = {"arm": name} | measure_training(replace(base, **TRAINED[name]), rounds)
            rows.append(row | {"ratio": row["ms"] / (rows[0]["ms"] if rows else row["ms"])})
        return "train", said | {"rounds": rounds}, rows


def measure_training(run: Run, rounds: int) -> Row:
    """Milliseconds a step over rounds of ``every`` steps, each round with one event, and memory."""
    torch.compiler.reset()  # so that no arm inherits what the one before left
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(run)
    on_gpu = training.device.type == "cuda"
    queued(training.train_step, run.event_period + 1)()  # to warm up
    wait_for(training.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    calls = queued(training.train_step, run.event_period)
    times = [1e3 * timed(calls, training.device)[0] / run.event_period for _ in range(rounds)]
    median = statistics.median(times)
    return {
        "ms": median,
        "spread": max(times) - min(times),
        "tokens_a_second": 1e3 * run.batch * run.accumulate * run.context / median,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
        "steady_mib": torch.cuda.memory_allocated() / 2**20 if on_gpu else None,
        "sparsity": training.pruner.sparsity if training.pruner else 0.0,
    }


TABLES = {
    "step": RecordTable(
        "arm | optimizer | tokens:, | ms:.1f | overhead:+.2% | beside",
        lambda row, record: {"overhead": None, "beside": None} if row["arm"] == row["beside"] else {},
    ),
    "update": RecordTable(
        "way | ms:.3f | ratio:.3f | over the masked step = overhead:+.2% | ulp from torch's = ulps_from_torch:.2f"
    ),
    "train": RecordTable(
        "arm | ms a step = ms:.2f | ratio:.4f | spread:.2f | tokens/s = tokens_a_second:,.0f | "
        "peak MiB = peak_mib:,.0f | steady MiB = steady_mib:,.1f"
    ),
}
