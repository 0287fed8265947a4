"""The gradient probe and one-shot WANDA on a small Llama, beside plain implementations, in one process."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunus import PerRow, Probe, prune
from prunus.eligible import Weight, eligible
from prunus.lab.data.token_files import read_tokens
from prunus.oneshot.probe import objective
from prunus.oneshot.probe.engine import Engine
from prunus.oneshot.probe.objective import Objective
from prunus.oneshot.probe.taps import Taps
from prunus.oneshot.walk import head_of
from prunus.ops.machine import device_of, wait_for

from .benchmark import Benchmark, Measured, Record, Row, section, table_of
from .measure import median_ms, timed

SHAPE = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
VOCABULARY = 32000
TAU = 1.0
Masks = dict[str, Tensor]  # True where the weight stays


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Prune a trained model by WANDA and by the gradient probe."""

    checkpoint: Path | None = None  # Hugging Face folder; without it, random weights of stories15M's shape
    calibration: Path | None = None  # its tokens; without it, random ones
    layers: int = 12  # how many of the model's weights are probed
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    sparsity: float = 0.5  # fraction removed
    repeat: int = 15  # calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def task(self) -> "Task":
        """Some of the model's weights, spread over its depth, and windows of tokens."""
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        if self.checkpoint is None:
            model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE))
        else:
            model = AutoModelForCausalLM.from_pretrained(self.checkpoint, local_files_only=True, use_safetensors=True)
        shape = (self.windows, self.length)
        if self.calibration is None:
            windows = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
        else:
            tokens = read_tokens(self.calibration)[: self.windows * self.length]
            windows = torch.from_numpy(tokens.reshape(shape).astype("int64"))
        names = [weight.name for weight in eligible(model).weights]
        num = min(self.layers, len(names))
        # a step that shares no factor with the seven weights of a block visits all kinds
        chosen = [names[i * len(names) // num] for i in range(num)]
        device = device_of(self.device)
        return Task(model.to(device).eval(), windows.to(device), chosen, self.sparsity)

    def measure(self) -> Measured:
        task = self.task()
        about = self.checkpoint.name if self.checkpoint else "random weights of the shape of stories15M"
        settings = {"model": about, "probed": len(task.names), "sparsity": self.sparsity}
        settings |= {"windows": self.windows, "length": self.length, "head_share": head_share(task)}
        rows = [_layer(self.repeat, task.device), *(measure_way(task, name, self.repeat) for name in WAYS)]
        return "prune", settings | {"parts": probe_parts(task)}, rows


@dataclass(frozen=True)
class Task:
    """A model, its windows (num, length), and the names of the weights that are probed."""

    model: nn.Module
    windows: Tensor
    names: Sequence[str]
    sparsity: float

    @property
    def device(self) -> torch.device:
        return self.windows.device

    @property
    def weights(self) -> list[Weight]:
        return [weight for weight in eligible(self.model).weights if weight.name in self.names]

    @property
    def excluded(self) -> list[str]:
        return [weight.name for weight in eligible(self.model).weights if weight.name not in self.names]


def norms_plainly(task: Task) -> dict[str, Tensor]:
    """Root of the mean square of every input feature, a sample at a time, as WANDA's authors gather it."""
    means: dict[str, Tensor] = {weight.name: torch.zeros(()) for weight in task.weights}

    def hook(name: str, seen: int) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2).t().float()
            means[name] = means[name] * (seen / (seen + 1)) + torch.norm(x, p=2, dim=1) ** 2 / (seen + 1)

        return add

    for seen, window in enumerate(task.windows.split(1)):
        handles = [w.module.register_forward_pre_hook(hook(w.name, seen)) for w in task.weights]
        task.model(input_ids=window)
        for handle in handles:
            handle.remove()
    return {name: mean.sqrt() for name, mean in means.items()}


def wanda_plainly(weight: Tensor, norm: Tensor, sparsity: float) -> Tensor:
    """A mask by a stable sort of each row and a scatter, as WANDA's authors do; True where the weight stays."""
    metric = weight.abs() * norm.reshape(1, -1)
    order = torch.sort(metric, dim=-1, stable=True)[1]
    drop = torch.zeros_like(metric, dtype=torch.bool)
    return ~drop.scatter_(1, order[:, : round(sparsity * metric.shape[1])], True)


@torch.no_grad()
def one_shot_plainly(task: Task) -> Masks:
    norms = norms_plainly(task)
    return {w.name: wanda_plainly(w.parameter, norms[w.name], task.sparsity) for w in task.weights}


def probe_plainly(task: Task) -> Masks:
    """The sequential probe in reverse order by its definition: two passes for each weight and sample."""
    masks = one_shot_plainly(task)
    for weight in reversed(task.weights):
        values = weight.parameter.detach().clone()
        before = largest_gradient(task.model, weight.parameter, task.windows)
        weight.parameter.data = torch.where(masks[weight.name], values, 0.1 * values)
        after = largest_gradient(task.model, weight.parameter, task.windows)
        masks[weight.name] |= after > (1 + TAU) * before
        weight.parameter.data = values * masks[weight.name]
    return masks


def largest_gradient(model: nn.Module, parameter: nn.Parameter, windows: Tensor) -> Tensor:
    """Largest absolute gradient over windows, one a pass, every other weight frozen; float32 or better."""
    largest = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
    for other in model.parameters():
        other.requires_grad_(other is parameter)
    for window in windows.split(1):
        loss = model(input_ids=window, labels=window, use_cache=False).loss
        torch.maximum(largest, torch.autograd.grad(loss, parameter)[0].abs().to(largest.dtype), out=largest)
    return largest


def ours(task: Task, probe: Probe | None) -> Masks:
    result = prune(task.model, [task.windows], task.sparsity, "wanda", probe=probe, repair=None, exclude=task.excluded)
    return dict(result.masks)


WAYS: dict[str, tuple[Callable[[Task], Masks], Callable[[Task], Masks]]] = {
    "WANDA, model": (lambda task: ours(task, None), one_shot_plainly),
    "WANDA + sequential probe": (lambda task: ours(task, Probe(TAU)), probe_plainly),
}


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """The model comes back with the weights and flags that it had."""
    before = {p: (p.detach().clone(), p.requires_grad) for p in model.parameters()}
    try:
        yield
    finally:
        for parameter, (value, flag) in before.items():
            parameter.data = value
            parameter.requires_grad_(flag)


def measure_way(task: Task, name: str, repeat: int) -> Row:
    """Both sides in turns: seconds, operations, and how many mask elements differ."""
    times: list[list[float]] = [[], []]
    masks: list[Masks] = [{}, {}]
    for _ in range(min(repeat, 3) if "probe" not in name else 1):
        for side, way in enumerate(WAYS[name]):
            seconds, masks[side] = timed_way(task, way)
            times[side].append(seconds)
    flops = []
    few = Task(task.model, task.windows[:8], task.names, task.sparsity)
    for way in WAYS[name]:
        with restored(task.model), FlopCounterMode(display=False) as counter:
            way(few)
        flops.append(counter.get_total_flops())
    return row_of(name, [statistics.median_high(each) for each in times], masks, flops)


def timed_way(task: Task, way: Callable[[Task], Masks]) -> tuple[float, Masks]:
    with restored(task.model):
        return timed(lambda: way(task), task.device)


def _layer(repeat: int, device: torch.device) -> Row:
    """The choice alone, on one layer of 4096 x 4096 whose norms are known."""
    torch.manual_seed(0)
    weight, norm = torch.randn(4096, 4096, device=device), torch.rand(4096, device=device) + 0.1
    found: list[Masks] = [{}, {}]

    def fast() -> None:
        found[0] = PerRow()({"w": weight.abs() * norm}, 0.5)

    def plain() -> None:
        found[1] = {"w": wanda_plainly(weight, norm, 0.5)}

    times = [median_ms(way, repeat, device) / 1e3 for way in (fast, plain)]
    return row_of("WANDA, 4096 x 4096", times, found, [0, 0])


def row_of(name: str, seconds: Sequence[float], masks: Sequence[Masks], flops: Sequence[int]) -> Row:
    different = sum(int((masks[0][key] != mask).sum()) for key, mask in masks[1].items())
    total = sum(mask.numel() for mask in masks[1].values())
    if different > 1e-4 * total:
        raise RuntimeError(f"{name}: {different} of {total} mask elements differ, so no speed is reported")
    return {
        "task": name,
        "seconds": seconds[0],
        "plain_seconds": seconds[1],
        "times_faster": seconds[1] / seconds[0],
        "times_fewer_operations": flops[1] / flops[0] if flops[0] else None,
        "different": different,
        "num_weights": total,
    }


def head_share(task: Task) -> float:
    """Fraction of a record's products that the head takes, forward and backward, in the mean over the weights.

    By the definition both sides run it once a record, so that nothing which keeps every decision can save it: a
    record with other weights behind it has other logits.
    """
    head = head_of(task.model).weight.numel()
    blocks = sum(weight.parameter.numel() for weight in eligible(task.model).weights)
    return 2 * head / (2 * head + blocks)  # a record runs half of the blocks in the mean, there and back


CLOCKED: dict[str, tuple[Any, str]] = {  # what is timed, and where it is found
    "head": (objective, "entropy_in_parts"),
    "forward": (Objective, "summed"),
    "backward": (Taps, "gradients"),
    "pass": (Engine, "_add_chunk"),
}


def probe_parts(task: Task) -> list[Row]:
    """Seconds and share of each part of our probe, from a run of its own: the clocks would show in the other."""
    seconds = dict.fromkeys(CLOCKED, 0.0)
    passing = False  # only passes count: the inspection of the model runs the same functions

    def now() -> float:
        wait_for(task.device)
        return time.perf_counter()

    def clocked(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal passing
            if part != "pass" and not passing:
                return function(*args, **kwargs)
            passing = True
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += now() - began
                passing = part != "pass"

        return call

    with restored(task.model), ExitStack() as stack:
        for part, (owner, name) in CLOCKED.items():
            stack.enter_context(mock.patch.object(owner, name, clocked(getattr(owner, name), part)))
        total, _ = timed(lambda: ours(task, Probe(TAU)), task.device)
    found = {
        "head, forward and backward": seconds["head"],
        "blocks, forward": seconds["forward"] - seconds["head"],
        "blocks, backward": seconds["backward"],
        "gradients of each sample and their maximum": seconds["pass"] - seconds["forward"] - seconds["backward"],
        "strategy, inspection, what blocks return, decisions": total - seconds["pass"],
    }
    return [{"part": part, "seconds": value, "share": value / total} for part, value in found.items()]


PRUNE = """{model}, {probed} of its weights, {windows} windows of {length} tokens, to {sparsity:.0%}, in float32. \
Plainly is WANDA as its authors' code does it, a sample at a time with a sort and a scatter, and the probe by its \
definition: two passes for each weight and sample, all others frozen. Operations are those of matrix products, as \
torch counts them over eight windows, the inspection of the model included: what is faster than by their ratio comes \
from running them better, not from leaving them out.
"""
HEAD = """The head takes {head_share:.0%} of the products of a record that starts at the probed weight, and either \
side runs it once for each record and sample: a record is taken with other weights than the one before it, so that its \
logits are new ones, and no decision is kept without them. What can be saved is the blocks before the probed weight, \
and the time that batches and a head in parts save. The parts below are of a run of its own, with clocks."""


def prune_section(record: Record) -> str:
    rows = [row | {"differ": f"{row['different']:,} of {row['num_weights']:,}"} for row in record["rows"]]
    columns = {
        "task": "task",
        "s": "seconds:.3f",
        "plainly, s": "plain_seconds:.3f",
        "times faster": "times_faster:.2f",
    }
    columns |= {"times fewer operations": "times_fewer_operations:.2f", "mask elements that differ": "differ"}
    body = table_of(rows, columns)
    if parts := record["settings"].get("parts"):
        body += f"\n\n{HEAD.format(**record['settings'])}\n\n"
        body += table_of(parts, {"part of our probe": "part", "s": "seconds:.3f", "share": "share:.0%"})
    return section("Pruning after training", record, PRUNE, body)


SECTIONS = {"prune": prune_section}
