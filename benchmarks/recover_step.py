"""What recovery costs: its loss beside cross-entropy, and a step beside a dense training step, in time and memory."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from prunus import AdamWPrune, Pruner, recover
from prunus.eligible import eligible
from prunus.lab.data import TokenShape
from prunus.lab.evaluate import loss_of
from prunus.lab.models import GPT
from prunus.oneshot.distance import output_of
from prunus.oneshot.head import Head, head_divergence
from prunus.ops.divergence import divergence_
from prunus.ops.machine import device_of, wait_for
from prunus.recovery.loss import Distillation
from prunus.recovery.teacher import Teacher, compiled_blocks

from .benchmark import Benchmark, Measured, RecordTable, Row
from .clocks import copy_gb_s, in_turns, median_ms, peak_extra_mib, timed
from .decode import LLAMA_1B

LOSS_SHAPES = {"cuda": [(49_152, 50_257, 512), (16_384, 128_256, 2_048)], "cpu": [(512, 5_000, 64)]}
CHUNK = 2_048  # tokens of the cross-entropy in chunks, and of the kernel alone


@dataclass(frozen=True, kw_only=True)
class Divergence(Benchmark):
    """Time the loss of distillation and two ways of cross-entropy, in bfloat16 with a weight in float32."""

    repeat: int = 10  # rounds that the median is taken over
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        rows = [row for shape in LOSS_SHAPES[device.type] for row in rows_of(*shape, self.repeat, device)]
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


DENSE, DISTIL, MASKED, TEACHER = "dense step", "distillation", "distillation, half of the weights zero", "teacher alone"
SHRUNK, OWN, CALL = "distillation, half of the layers", "dense step, half of the layers", "recover(), by step"


@dataclass(frozen=True)
class Shape:
    """A network, by its number of layers, and the tokens of a step."""

    layers: int
    windows: int
    length: int
    make: Callable[[int], nn.Module]


def gpt(layers: int, width: int = 512, vocab_size: int = 50_257, context: int = 512) -> nn.Module:
    return GPT(layers, width // 64, width, TokenShape(vocab_size, context))


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA_1B, num_hidden_layers=layers))


SHAPES = {
    "gpt-51m": Shape(8, 96, 512, gpt),
    "llama-1b": Shape(16, 8, 2048, llama),
    "tiny": Shape(2, 2, 32, lambda layers: gpt(layers, 64, 2048, 64)),
}


@dataclass(frozen=True, kw_only=True)
class RecoverStep(Benchmark):
    """A step of distillation beside a dense step, compiled, in bfloat16 on a GPU; and recover() itself."""

    shape: Literal["gpt-51m", "llama-1b", "tiny"] = "gpt-51m"  # of teacher and student
    repeat: int = 10  # rounds that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device, shape = device_of(self.device), SHAPES[self.shape]
        torch.manual_seed(0)
        with device:
            teacher = shape.make(shape.layers)
            batch = torch.randint(0, 2048, (shape.windows, shape.length))
        teacher = teacher.to(torch.bfloat16) if device.type == "cuda" else teacher
        settings = {"weights": self.shape, "num_weights": sum(p.numel() for p in teacher.parameters())}
        settings |= {"tokens": batch.numel(), "length": shape.length, "repeat": self.repeat}
        rows = [self._measured(name, teacher, batch, device) for name in (DENSE, DISTIL, MASKED, TEACHER, OWN, SHRUNK)]
        rows.append(self._called(teacher, batch, device))
        ms = {row["way"]: row["ms"] for row in rows}
        peaks = {row["way"]: row["peak_mib"] for row in rows}
        for row in rows:
            beside = {SHRUNK: ms[OWN] + ms[TEACHER]}.get(row["way"], ms[DENSE])
            row["ratio"] = row["ms"] / beside
            row["memory"] = row["peak_mib"] / peaks[OWN if row["way"] == SHRUNK else DENSE] if row["peak_mib"] else None
        return "recover step", settings, rows

    def _measured(self, name: str, teacher: nn.Module, batch: Tensor, device: torch.device) -> Row:
        shape = SHAPES[self.shape]
        layers = shape.layers // 2 if name in (SHRUNK, OWN) else shape.layers
        torch.compiler.reset()
        with device:
            student = shape.make(layers).eval()
        with _step(name, student, teacher, batch, device) as step:
            for _ in range(3):
                step()
            _forget(device)
            seconds = sorted(timed(step, device)[0] for _ in range(self.repeat))
            return {"way": name, "ms": 1e3 * seconds[len(seconds) // 2], "peak_mib": _peak(device)}

    def _called(self, teacher: nn.Module, batch: Tensor, device: torch.device) -> Row:
        """Milliseconds a step of the whole function, between a step early in the run and its last."""
        shape, marks = SHAPES[self.shape], dict[int, float]()
        torch.compiler.reset()
        with device:
            student = shape.make(shape.layers)
        _prune_half_(student)
        first, last = 5, 5 + self.repeat

        def note(step: int, total: int, what: str) -> None:
            if step in (first, last):
                wait_for(device)
                marks[step] = time.perf_counter()

        options: dict[str, Any] = {"steps": last, "lr": 1e-4, "held_out": [batch[:1]], "evaluations": 1}
        _forget(device)
        recover(student, teacher, [batch, batch], **options, compile=True, progress=note)
        return {"way": CALL, "ms": 1e3 * (marks[last] - marks[first]) / self.repeat, "peak_mib": _peak(device)}


@contextmanager
def _step(
    name: str, student: nn.Module, teacher: nn.Module, batch: Tensor, device: torch.device
) -> Iterator[Callable[[], object]]:
    optimizer = AdamWPrune(student.parameters(), lr=1e-5, weight_decay=0.0, max_norm=1.0)
    if name == MASKED:
        _prune_half_(student)
        Pruner(student, optimizer, masks="zeros")
    is_mixed = device.type == "cuda"

    def update(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain_loss() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
            logits = output_of(student(batch))
        return loss_of(logits[:, :-1], batch[:, 1:])

    if name in (DENSE, OWN):
        loss = torch.compile(plain_loss)
        yield lambda: update(loss())
        return
    dense = Teacher(teacher, device)
    distillation = Distillation(student, dense)
    with dense.open(), torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
        distillation.prepare([batch], device)
        with compiled_blocks(student, teacher):
            if name == TEACHER:
                heads = distillation.heads
                assert heads is not None
                yield lambda: dense.hidden(batch, heads[1])
                return

            def step() -> None:
                with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                    loss = distillation(student, batch, distillation.counts(batch))
                update(loss)

            yield step


@torch.no_grad()
def _prune_half_(model: nn.Module) -> None:
    for weight in eligible(model).weights:
        weight.parameter.masked_fill_(torch.rand_like(weight.parameter) < 0.5, 0)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None


TABLES = {
    "divergence": RecordTable("way | shape | ms:.1f | peak MiB = peak_mib:,.0f | GB/s = gb_s:,.0f"),
    "recover step": RecordTable("way | ms a step = ms:.1f | ratio:.2f | peak MiB = peak_mib:,.0f | memory:.2f"),
}
