"""The loss of distillation from hidden states, forward and backward, beside cross-entropy of the same logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from prunus.oneshot.head import Head, head_divergence
from prunus.ops.divergence import divergence_
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, RecordTable, Row
from .clocks import copy_gb_s, in_turns, median_ms, peak_extra_mib

SHAPES = {"cuda": [(49_152, 50_257, 512), (16_384, 128_256, 2_048)], "cpu": [(512, 5_000, 64)]}
CHUNK = 2_048  # tokens of the cross-entropy in chunks, and of the kernel alone


@dataclass(frozen=True, kw_only=True)
class Divergence(Benchmark):
    """Time the loss of distillation and two ways of cross-entropy, in bfloat16 with a weight in float32."""

    repeat: int = 10  # rounds that the median is taken over
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        rows = [row for shape in SHAPES[device.type] for row in rows_of(*shape, self.repeat, device)]
        return "divergence", {"repeat": self.repeat, "copy_gb_s": copy_gb_s(device)}, rows


def rows_of(num_tokens: int, num_classes: int, width: int, repeat: int, device: torch.device) -> Iterator[Row]:
    """A row for each way, then one for the kernel alone."""
    torch.manual_seed(0)
    hidden, expected = (torch.randn(num_tokens, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(num_classes, width, device=device) / width**0.5
    teacher = Head(weight.to(torch.bfloat16))
    labels = torch.randint(num_classes, (num_tokens,), device=device)
    hidden.requires_grad_(), weight.requires_grad_()

    def entropy(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum") / num_tokens

    def in_chunks() -> Tensor:
        parts = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
        return torch.stack([checkpoint(entropy, *part, use_reentrant=False) for part in parts]).sum()

    ways: dict[str, Callable[[], Tensor]] = {
        "cross-entropy": lambda: entropy(hidden, labels),
        "cross-entropy, in chunks": in_chunks,
        "head_divergence": lambda: head_divergence(hidden, Head(weight), expected, teacher),
        "head_divergence, with labels": lambda: head_divergence(
            hidden, Head(weight), expected, teacher, labels=labels, hard=0.5
        ),
    }

    def step(loss: Callable[[], Tensor]) -> Callable[[], object]:
        def forward_and_backward() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss()
            torch.autograd.grad(value, (hidden, weight))

        return forward_and_backward

    steps, shape = {name: step(way) for name, way in ways.items()}, f"{num_tokens:,} x {num_classes:,} x {width:,}"
    turns = in_turns(steps, repeat, device)
    for name, call in steps.items():
        peak = peak_extra_mib(call, device, lambda: None)
        yield {"way": name, "shape": shape, "ms": turns[name].ms, "peak_mib": peak}
    logits = torch.randn(2, CHUNK, -(-num_classes // 16) * 16, device=device, dtype=torch.bfloat16)[..., :num_classes]
    ms = median_ms(lambda: divergence_(logits[0], logits[1]), repeat, device)
    yield {"way": f"kernel, {CHUNK:,} tokens", "shape": shape, "ms": ms, "gb_s": 3 * logits[0].numel() * 2 / ms / 1e6}


TABLES = {"divergence": RecordTable("way | shape | ms:.1f | peak MiB = peak_mib:,.0f | GB/s = gb_s:,.0f")}
