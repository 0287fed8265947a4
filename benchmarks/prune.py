"""One-shot WANDA and the gradient probe beside plain implementations: on a small Llama, and a level of a 7 B model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunus import PerRow, prune
from prunus.eligible import Weight, eligible
from prunus.lab.tracking import sampled, utilisation_reader
from prunus.oneshot import Probe
from prunus.oneshot.forward import head_of
from prunus.oneshot.result import Result
from prunus.ops.machine import device_of
from prunus.trained.model import ModelSource, load_trained

from .benchmark import SPARSITY, Benchmark, Measured, RecordTable, Row, random_llama, table_of
from .clocks import in_turns, timed

MISTRAL = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
MISTRAL |= {"num_attention_heads": 32, "num_key_value_heads": 8}
TAU = 1.0
PEAK = 989e12  # bfloat16 FLOP/s of a H100 or H200 without sparsity, as its data sheet says
KINDS = 7  # weights of a block
SCHEDULES: dict[str, Literal["block", "sequential"]] = {
    "block, first in its process": "block",
    "block": "block",
    "sequential": "sequential",
}
Masks = Mapping[str, Tensor]  # True where the weight stays


@dataclass(frozen=True, kw_only=True)
class Prune(Benchmark):
    """Prune a trained model by WANDA and by the gradient probe."""

    checkpoint: Path  # Hugging Face folder
    calibration: Path  # its tokens
    layers: int = 12  # how many of the model's weights are probed
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    repeat: int = 15  # calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        task, device = self.task(), device_of(self.device)
        settings = {"model": self.checkpoint.name, "probed": len(task.weights), "sparsity": SPARSITY}
        settings |= {"windows": self.windows, "length": self.length, "head_share": head_share(task.model)}
        rows = [measure_layer(4096, self.repeat, device), *(measure_way(task, name, self.repeat) for name in WAYS)]
        return "prune", settings | {"parts": probe_parts(task)}, rows

    def task(self) -> "Task":
        """Some of the model's weights, spread over its depth, and windows of tokens."""
        source = ModelSource(str(self.checkpoint), self.calibration, self.calibration, self.windows, self.length)
        trained = load_trained(replace(source, dtype="float32", device=self.device))
        weights = eligible(trained.model).weights
        num = min(self.layers, len(weights))
        # a step that shares no factor with the seven weights of a block visits all kinds
        chosen = {i * len(weights) // num for i in range(num)}
        excluded = [weight.name for i, weight in enumerate(weights) if i not in chosen]
        return Task(trained.model, trained.batches[0], [weights[i] for i in sorted(chosen)], excluded)


@dataclass(frozen=True)
class Task:
    """A model, its windows (num, length), the weights that are probed, and the names of the others."""

    model: nn.Module
    windows: Tensor
    weights: Sequence[Weight]
    excluded: Sequence[str]


def wanda_plainly(weight: Tensor, norm: Tensor) -> Tensor:
    """A mask by a stable sort of each row and a scatter, as WANDA's authors do; True where the weight stays."""
    metric = weight.abs() * norm.reshape(1, -1)
    order = torch.sort(metric, dim=-1, stable=True)[1]
    drop = torch.zeros_like(metric, dtype=torch.bool)
    return ~drop.scatter_(1, order[:, : round(SPARSITY * metric.shape[1])], True)


@torch.no_grad()
def one_shot_plainly(task: Task) -> Masks:
    """WANDA by means of squares of every input feature, gathered a sample at a time as its authors do."""
    means: dict[str, Tensor] = {}
    num_seen = 0

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares = torch.norm(args[0].flatten(0, -2).t().float(), p=2, dim=1) ** 2
        means[name] = means.get(name, 0.0) * (num_seen / (num_seen + 1)) + squares / (num_seen + 1)

    handles = [weight.module.register_forward_pre_hook(partial(add, weight.name)) for weight in task.weights]
    for window in task.windows.split(1):
        task.model(input_ids=window)
        num_seen += 1
    for handle in handles:
        handle.remove()
    return {w.name: wanda_plainly(w.parameter, means[w.name].sqrt()) for w in task.weights}


def probe_plainly(task: Task) -> Masks:
    """The sequential probe in reverse order by its definition: two passes for each weight and sample."""
    masks = dict(one_shot_plainly(task))
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


def by_prunus(task: Task, probe: Probe | None = None) -> Result:
    return prune(task.model, [task.windows], SPARSITY, score="wanda", probe=probe, repair=None, exclude=task.excluded)


WAYS: dict[str, tuple[Callable[[Task], Masks], Callable[[Task], Masks]]] = {  # ours, plainly
    "WANDA, model": (lambda task: dict(by_prunus(task).masks), one_shot_plainly),
    "WANDA + sequential probe": (lambda task: dict(by_prunus(task, Probe(TAU)).masks), probe_plainly),
}


def measure_way(task: Task, name: str, repeat: int) -> Row:
    """Seconds and operations of both sides, and how many mask elements differ."""
    before = [(parameter, parameter.detach().clone()) for parameter in task.model.parameters()]

    def restore() -> None:
        for parameter, value in before:
            parameter.requires_grad_(True).detach().copy_(value)

    flops = []
    for way in WAYS[name]:
        with FlopCounterMode(display=False) as counter:
            way(replace(task, windows=task.windows[:8]))
        flops.append(counter.get_total_flops())
        restore()
    sides = [partial(way, task) for way in WAYS[name]]
    num = 1 if "probe" in name else min(repeat, 3)
    return compared(name, sides, num, task.windows.device, restore) | {"times_fewer_operations": flops[1] / flops[0]}


def measure_layer(dim: int, repeat: int, device: torch.device) -> Row:
    """The choice alone, on one square layer whose norms are known."""
    torch.manual_seed(0)
    weight, norm = torch.randn(dim, dim, device=device), torch.rand(dim, device=device) + 0.1
    sides = (lambda: PerRow()({"w": weight.abs() * norm}, SPARSITY), lambda: {"w": wanda_plainly(weight, norm)})
    return compared(f"WANDA, {dim} x {dim}", sides, repeat, device)


def compared(
    name: str,
    sides: Sequence[Callable[[], Masks]],
    repeat: int,
    device: torch.device,
    restore: Callable[[], object] = lambda: None,
) -> Row:
    """Both sides in turns, ours first."""
    arms = dict(zip(("ours", "plainly"), sides, strict=True))
    ours, plainly = in_turns(arms, repeat, device, warm_up=0, after=restore).values()
    different, total = num_different(name, ours.result, plainly.result)
    row = {"task": name, "seconds": ours.ms / 1e3, "plain_seconds": plainly.ms / 1e3}
    return row | {"times_faster": plainly.ms / ours.ms, "different": different, "num_weights": total}


def num_different(about: str, masks: Masks, others: Masks) -> tuple[int, int]:
    """How many elements of two results differ, and all; RuntimeError where they are more than one in ten thousand."""
    different = sum(int((masks[name] != mask).sum()) for name, mask in others.items())
    total = sum(mask.numel() for mask in others.values())
    if different > 1e-4 * total:
        raise RuntimeError(f"{about}: {different} of {total} mask elements differ, so no speed is reported")
    return different, total


def head_share(model: nn.Module) -> float:
    """Fraction of a record's products that the head takes, forward and backward, in the mean over the weights.

    By the definition both sides run it once a record, so that nothing which keeps every decision can save it: a
    record with other weights behind it has other logits.
    """
    head = head_of(model).weight.numel()
    blocks = sum(weight.parameter.numel() for weight in eligible(model).weights)
    return 2 * head / (2 * head + blocks)  # a record runs half of the blocks in the mean, there and back


def probe_parts(task: Task) -> list[Row]:
    """Seconds and share of each part of our probe, from a run of its own."""
    result = by_prunus(task, Probe(TAU))
    result.undo_()
    parts = result.cost.parts | {"the rest": result.seconds - sum(result.cost.parts.values())}
    return [{"part": part, "seconds": value, "share": value / result.seconds} for part, value in parts.items()]


# A level of a 7 B model


@dataclass(frozen=True, kw_only=True)
class ProbeLevel(Benchmark):
    """Run a level of the gradient probe on a random model of Mistral-7B's shape: its cost, nothing about quality."""

    blocks: int = 32  # blocks of the model
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        model, tokens = random_llama(MISTRAL, self.blocks, (self.windows, self.length), device_of(self.device))
        settings = {"blocks": self.blocks, "windows": self.windows, "length": self.length, **MISTRAL}
        settings |= {"sparsity": SPARSITY, "num_weights": sum(p.numel() for p in model.parameters())}
        return "level", settings, measure_level(model, tokens)


def measure_level(model: Any, tokens: Tensor) -> list[Row]:
    """A row for the plain scheme, scaled from some weights, and one for each schedule; the first of ours warms up."""
    rows, device = [level_plainly(model, tokens)], tokens.device
    for way, schedule in SCHEDULES.items():
        run = partial(prune, model, [tokens], SPARSITY, score="wanda", probe=Probe(1.0, schedule=schedule))
        with sampled(utilisation_reader(device)) as busy:
            seconds, result = timed(run, device)
        row = {"way": way, "seconds": seconds, "utilisation": fmean(busy) if busy else None}
        row |= {"share_of_peak": flops(model, tokens, schedule) / seconds / PEAK if device.type == "cuda" else None}
        row |= {"peak_gib": result.cost.peak_bytes / 2**30, "passes": result.cost.passes, "sparsity": result.sparsity}
        result.undo_()
        rows.append(row)
    return rows


def flops(model: Any, tokens: Tensor, schedule: str) -> float:
    """Operations of matrix products: two variants, forward and back through what follows, and the outer products."""
    blocks = model.model.layers
    block = sum(p.numel() for p in blocks[0].parameters() if p.ndim == 2)
    suffixes = sum(i * block + model.lm_head.weight.numel() for i in range(1, len(blocks) + 1))
    times = KINDS if schedule == "sequential" else 1
    return 2 * tokens.numel() * (4 * times * suffixes + 2 * len(blocks) * block)


def level_plainly(model: Any, tokens: Tensor) -> Row:
    """A level of one sample a pass, two records a weight, from passes for three weights over four samples."""
    blocks, samples = model.model.layers, tokens[:4]
    chosen = sorted({0, len(blocks) // 2, len(blocks) - 1})
    seconds = 0.0
    for i in chosen:
        record = partial(largest_gradient, model, blocks[i].mlp.up_proj.weight)
        record(samples[:1])  # warms up
        seconds += timed(partial(record, samples), samples.device)[0]
    model.requires_grad_(True)
    passes = 2 * KINDS * len(blocks) * len(tokens)
    return {"way": "plainly, scaled", "seconds": passes * seconds / len(chosen) / len(samples), "passes": passes}


PART_COLUMNS = "part of our probe = part | s = seconds:.3f | share:.0%"
TABLES = {
    "prune": RecordTable(
        "task | s = seconds:.3f | plainly, s = plain_seconds:.3f | times faster = times_faster:.2f | "
        "times fewer operations = times_fewer_operations:.2f | "
        "mask elements that differ = {different:,} of {num_weights:,}",
        below=lambda record: "\n\n" + table_of(record["settings"]["parts"], PART_COLUMNS),
    ),
    "level": RecordTable(
        "way | s a level = seconds:.1f | times faster = times_faster:.1f | busy = utilisation:.0% | "
        "of peak = share_of_peak:.0% | peak GiB = peak_gib:.1f | passes:, | sparsity:.2%",
        lambda row, record: {"times_faster": record["rows"][0]["seconds"] / row["seconds"]},
    ),
}
