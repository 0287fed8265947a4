"""One-shot WANDA and the gradient probe beside plain implementations: on a small Llama, and a level of a 7 B model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunus import PerRow, prune
from prunus.eligible import Weight, eligible
from prunus.lab.gpu import Sampler, utilisation_reader
from prunus.oneshot import Probe
from prunus.oneshot.forward import head_of
from prunus.oneshot.result import Result
from prunus.ops.machine import device_of
from prunus.trained.tokens import read_tokens

from .benchmark import Benchmark, Measured, Record, RecordTable, Row, in_turns, made_on, table_of, timed

STORIES = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
MISTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY, TAU = 32000, 1.0
LEVEL_DTYPE = torch.bfloat16
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

    checkpoint: Path | None = None  # Hugging Face folder; without it, random weights of stories15M's shape
    calibration: Path | None = None  # its tokens; without it, random ones
    layers: int = 12  # how many of the model's weights are probed
    windows: int = 32  # calibration windows
    length: int = 256  # tokens of each
    sparsity: float = 0.5  # fraction removed
    repeat: int = 15  # calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        task, device = self.task(), device_of(self.device)
        about = self.checkpoint.name if self.checkpoint else "random weights of the shape of stories15M"
        settings = {"model": about, "probed": len(task.weights), "sparsity": self.sparsity}
        settings |= {"windows": self.windows, "length": self.length, "head_share": head_share(task.model)}
        rows = [measure_layer(4096, self.repeat, device), *(measure_way(task, name, self.repeat) for name in WAYS)]
        return "prune", settings | {"parts": probe_parts(task)}, rows

    def task(self) -> "Task":
        """Some of the model's weights, spread over its depth, and windows of tokens."""
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        if self.checkpoint is None:
            model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **STORIES))
        else:
            model = AutoModelForCausalLM.from_pretrained(self.checkpoint, local_files_only=True, use_safetensors=True)
        shape, device = (self.windows, self.length), device_of(self.device)
        if self.calibration is None:
            windows = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
        else:
            tokens = read_tokens(self.calibration)[: self.windows * self.length]
            windows = torch.from_numpy(tokens.reshape(shape).astype("int64"))
        weights = eligible(model.to(device).eval()).weights
        num = min(self.layers, len(weights))
        # a step that shares no factor with the seven weights of a block visits all kinds
        chosen = {i * len(weights) // num for i in range(num)}
        excluded = [weight.name for i, weight in enumerate(weights) if i not in chosen]
        return Task(model, windows.to(device), [weights[i] for i in sorted(chosen)], excluded, self.sparsity)


@dataclass(frozen=True)
class Task:
    """A model, its windows (num, length), the weights that are probed, and the names of the others."""

    model: nn.Module
    windows: Tensor
    weights: Sequence[Weight]
    excluded: Sequence[str]
    sparsity: float


def wanda_plainly(weight: Tensor, norm: Tensor, sparsity: float) -> Tensor:
    """A mask by a stable sort of each row and a scatter, as WANDA's authors do; True where the weight stays."""
    metric = weight.abs() * norm.reshape(1, -1)
    order = torch.sort(metric, dim=-1, stable=True)[1]
    drop = torch.zeros_like(metric, dtype=torch.bool)
    return ~drop.scatter_(1, order[:, : round(sparsity * metric.shape[1])], True)


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
    return {w.name: wanda_plainly(w.parameter, means[w.name].sqrt(), task.sparsity) for w in task.weights}


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
    return prune(
        task.model, [task.windows], task.sparsity, score="wanda", probe=probe, repair=None, exclude=task.excluded
    )


WAYS: dict[str, tuple[Callable[[Task], Masks], Callable[[Task], Masks]]] = {  # ours, plainly
    "WANDA, model": (lambda task: dict(by_prunus(task).masks), one_shot_plainly),
    "WANDA + sequential probe": (lambda task: dict(by_prunus(task, Probe(TAU)).masks), probe_plainly),
}


def restorer(model: nn.Module) -> Callable[[], None]:
    """A function that gives the model the weights and flags that it has now."""
    before = [(p, p.detach().clone(), p.requires_grad) for p in model.parameters()]

    def restore() -> None:
        for parameter, value, flag in before:
            parameter.detach().copy_(value)
            parameter.requires_grad_(flag)

    return restore


def measure_way(task: Task, name: str, repeat: int) -> Row:
    """Seconds and operations of both sides, and how many mask elements differ."""
    ways, restore = dict(zip(("ours", "plainly"), WAYS[name], strict=True)), restorer(task.model)
    flops = []
    for way in ways.values():
        with FlopCounterMode(display=False) as counter:
            way(replace(task, windows=task.windows[:8]))
        flops.append(counter.get_total_flops())
        restore()
    arms = {side: partial(way, task) for side, way in ways.items()}
    num = 1 if "probe" in name else min(repeat, 3)
    return compared(name, arms, num, task.windows.device, restore) | {"times_fewer_operations": flops[1] / flops[0]}


def measure_layer(dim: int, repeat: int, device: torch.device) -> Row:
    """The choice alone, on one square layer whose norms are known."""
    torch.manual_seed(0)
    weight, norm = torch.randn(dim, dim, device=device), torch.rand(dim, device=device) + 0.1
    arms = {
        "ours": lambda: PerRow()({"w": weight.abs() * norm}, 0.5),
        "plainly": lambda: {"w": wanda_plainly(weight, norm, 0.5)},
    }
    return compared(f"WANDA, {dim} x {dim}", arms, repeat, device)


def compared(
    name: str,
    arms: Mapping[str, Callable[[], Masks]],
    repeat: int,
    device: torch.device,
    restore: Callable[[], object] = lambda: None,
) -> Row:
    """Both sides in turns; RuntimeError where their masks differ in more than one element of ten thousand."""
    ours, plainly = in_turns(arms, repeat, device, warm_up=0, after=restore).values()
    different = sum(int((ours.result[key] != mask).sum()) for key, mask in plainly.result.items())
    total = sum(mask.numel() for mask in plainly.result.values())
    if different > 1e-4 * total:
        raise RuntimeError(f"{name}: {different} of {total} mask elements differ, so no speed is reported")
    row = {"task": name, "seconds": ours.ms / 1e3, "plain_seconds": plainly.ms / 1e3}
    return row | {"times_faster": plainly.ms / ours.ms, "different": different, "num_weights": total}


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
    sparsity: float = 0.5  # fraction removed
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        model, tokens = self.model_and_tokens()
        settings = {"blocks": self.blocks, "windows": self.windows, "length": self.length, **MISTRAL}
        settings |= {"sparsity": self.sparsity, "num_weights": sum(p.numel() for p in model.parameters())}
        return "level", settings, measure_level(model, tokens, self.sparsity)

    def model_and_tokens(self) -> tuple[Any, Tensor]:
        from transformers import MistralConfig, MistralForCausalLM

        device = device_of(self.device)
        config = MistralConfig(vocab_size=VOCABULARY, num_hidden_layers=self.blocks, sliding_window=None, **MISTRAL)
        model = made_on(device, LEVEL_DTYPE, lambda: MistralForCausalLM(config).eval())
        return model, torch.randint(0, VOCABULARY, (self.windows, self.length), device=device)


def measure_level(model: Any, tokens: Tensor, sparsity: float) -> list[Row]:
    """A row for the plain scheme, scaled from some weights, and one for each schedule; the first of ours warms up."""
    rows, device = [level_plainly(model, tokens)], tokens.device
    for way, schedule in SCHEDULES.items():
        run = partial(prune, model, [tokens], sparsity, score="wanda", probe=Probe(1.0, schedule=schedule))
        with Sampler(utilisation_reader(device)).running() as busy:
            seconds, result = timed(run, device)
        row = {"way": way, "seconds": seconds, "utilisation": busy.mean}
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
    blocks, samples, restore = model.model.layers, tokens[:4], [(p, p.requires_grad) for p in model.parameters()]
    chosen = sorted({0, len(blocks) // 2, len(blocks) - 1})
    seconds = 0.0
    for i in chosen:
        record = partial(largest_gradient, model, blocks[i].mlp.up_proj.weight)
        record(samples[:1])  # warms up
        seconds += timed(partial(record, samples), samples.device)[0]
    for parameter, flag in restore:
        parameter.requires_grad_(flag)
    passes = 2 * KINDS * len(blocks) * len(tokens)
    return {"way": "plainly, scaled", "seconds": passes * seconds / len(chosen) / len(samples), "passes": passes}


def _parts(record: Record) -> str:
    columns = {"part of our probe": "part", "s": "seconds:.3f", "share": "share:.0%"}
    return f"\n\n{table_of(record['settings']['parts'], columns)}"


PRUNE_COLUMNS = {"task": "task", "s": "seconds:.3f", "plainly, s": "plain_seconds:.3f"}
PRUNE_COLUMNS |= {"times faster": "times_faster:.2f", "times fewer operations": "times_fewer_operations:.2f"}
PRUNE_COLUMNS |= {"mask elements that differ": "differ"}
LEVEL_COLUMNS = {"way": "way", "s a level": "seconds:.1f", "times faster": "times_faster:.1f"}
LEVEL_COLUMNS |= {"busy": "utilisation:.0%", "of peak": "share_of_peak:.0%", "peak GiB": "peak_gib:.1f"}
LEVEL_COLUMNS |= {"passes": "passes:,", "sparsity": "sparsity:.2%"}
TABLES = {
    "prune": RecordTable(
        PRUNE_COLUMNS, lambda row, _: {"differ": f"{row['different']:,} of {row['num_weights']:,}"}, _parts
    ),
    "level": RecordTable(
        LEVEL_COLUMNS, lambda row, record: {"times_faster": record["rows"][0]["seconds"] / row["seconds"]}
    ),
}
