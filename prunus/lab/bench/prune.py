"""The gradient probe and one-shot WANDA on a small Llama, beside the same done plainly, in one process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...eligible import Weight, eligible
from ...oneshot import Probe, prune
from ...oneshot.walk import head_of
from ...ops.device import wait_for
from ...select import PerRow
from .measure import median_ms, timed
from .prune_parts import parts_of

SHAPE = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
VOCABULARY = 32000
TAU = 1.0
Masks = dict[str, Tensor]  # True where the weight stays


@dataclass(frozen=True)
class Task:
    """A model, its windows (num, length), and the names of the weights that are probed."""

    model: nn.Module
    windows: Tensor
    names: Sequence[str]
    sparsity: float

    @property
    def weights(self) -> list[Weight]:
        return [weight for weight in eligible(self.model).weights if weight.name in self.names]

    @property
    def excluded(self) -> list[str]:
        return [weight.name for weight in eligible(self.model).weights if weight.name not in self.names]

    def with_windows(self, num: int) -> "Task":
        return Task(self.model, self.windows[:num], self.names, self.sparsity)


@dataclass(frozen=True)
class Place:
    """Where model and tokens come from; without a folder, random ones of the shape of stories15M."""

    folder: Path | None
    tokens: Path | None
    device: torch.device


def task_of(place: Place, num_windows: int, length: int, num_weights: int, sparsity: float) -> Task:
    """``num_weights`` of the model's weights, spread over its depth, and windows of tokens."""
    model, windows = _model(place.folder), _windows(place.tokens, num_windows, length)
    names = [weight.name for weight in eligible(model).weights]
    num = min(num_weights, len(names))
    # a step that shares no factor with the seven weights of a block visits all kinds
    chosen = [names[i * len(names) // num] for i in range(num)]
    return Task(model.to(place.device).eval(), windows.to(place.device), chosen, sparsity)


def _model(folder: Path | None) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE))


def _windows(path: Path | None, num: int, length: int) -> Tensor:
    from ..data.files import read_tokens

    if path is None:
        return torch.randint(0, VOCABULARY, (num, length), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(read_tokens(path)[: num * length].reshape(num, length).astype("int64"))


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


def ours(task: Task, probe: Probe | None) -> Masks:
    return dict(prune(task.model, [task.windows], task.sparsity, "wanda", probe=probe, exclude=task.excluded).masks)


WAYS: dict[str, tuple[Callable[[Task], Masks], Callable[[Task], Masks]]] = {
    "WANDA, model": (lambda task: ours(task, None), one_shot_plainly),
    "WANDA + sequential probe": (lambda task: ours(task, Probe(TAU)), probe_plainly),
}


def probe_parts(task: Task, device: torch.device) -> list[dict[str, Any]]:
    """Where the time of our side of the probe goes, from a run of its own: the clocks would show in the other."""
    with restored(task.model):
        return parts_of(lambda: ours(task, Probe(TAU)), lambda: wait_for(device))


def head_share(task: Task) -> float:
    """Fraction of a record's products that the head takes, forward and backward, in the mean over the weights.

    By the definition both sides run it once a record, so that nothing which keeps every decision can save it: a
    record with other weights behind it has other logits.
    """
    head = head_of(task.model).weight.numel()
    blocks = sum(weight.parameter.numel() for weight in eligible(task.model).weights)
    return 2 * head / (2 * head + blocks)  # a record runs half of the blocks in the mean, there and back


def bench_prune(task: Task, repeat: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each task, both sides in turns: seconds, operations, and how many mask elements differ."""
    rows = [_layer(repeat, device)]
    for name, (fast, plain) in WAYS.items():
        times: list[list[float]] = [[], []]
        masks: list[Masks] = [{}, {}]
        for _ in range(min(repeat, 3) if "probe" not in name else 1):
            for side, way in enumerate((fast, plain)):
                seconds, masks[side] = _timed(task, way, device)
                times[side].append(seconds)
        flops = [_flops(task.with_windows(8), way) for way in (fast, plain)]
        rows.append(_row(name, [sorted(each)[len(each) // 2] for each in times], masks, flops))
    return rows


def _layer(repeat: int, device: torch.device) -> dict[str, Any]:
    """The choice alone, on one layer of 4096 x 4096 whose norms are known."""
    torch.manual_seed(0)
    weight, norm = torch.randn(4096, 4096, device=device), torch.rand(4096, device=device) + 0.1
    found: list[Masks] = [{}, {}]

    def fast() -> None:
        found[0] = PerRow()({"w": weight.abs() * norm}, 0.5)

    def plain() -> None:
        found[1] = {"w": wanda_plainly(weight, norm, 0.5)}

    times = [median_ms(way, repeat, device, lambda: None) / 1e3 for way in (fast, plain)]
    return _row("WANDA, 4096 x 4096", times, found, [0, 0])


def _timed(task: Task, way: Callable[[Task], Masks], device: torch.device) -> tuple[float, Masks]:
    with restored(task.model):
        return timed(lambda: way(task), device)


def _flops(task: Task, way: Callable[[Task], Masks]) -> int:
    with restored(task.model), FlopCounterMode(display=False) as counter:
        way(task)
    return counter.get_total_flops()


def _row(name: str, seconds: Sequence[float], masks: Sequence[Masks], flops: Sequence[int]) -> dict[str, Any]:
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
