"""How good a trained model is on held-out samples, by the measure that fits it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..files.one_line import in_one_line
from ..oneshot.disk_offload import BY_BLOCK, by_block, model_blocks, opened
from ..oneshot.distance import output_of
from ..oneshot.forward import modes_kept
from ..oneshot.probe.objective import with_labels
from ..oneshot.progress import progress_line
from ..oneshot.samples import Chunk
from ..ops.wide_products import wide_products
from .data import Rows, Samples, Windows, is_causal, num_rows, spread

T = TypeVar("T")
EVAL_WINDOWS = 128  # held-out windows of tokens that are evaluated where nothing else is said
SIZE = 8  # samples in a pass, fewer where their logits are many
MOST_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # of one pass: with a large vocabulary they outweigh the model
MOST_OUTPUTS = 2**30  # bytes of the dense model's outputs that are stored


@dataclass(frozen=True)
class Quality:
    """Mean cross-entropy in nats and fraction of right predictions, over every target."""

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def in_words(self, *, of_text: bool) -> str:
        """The figures as one reads them; the perplexity of a classifier says nothing."""
        perplexity = f"perplexity {self.perplexity:.3f}, " if of_text else ""
        return f"loss {self.loss:.4f}, {perplexity}accuracy {self.accuracy:.2%}"


def held_out_words(num: int, total: int, unit: str, which: str) -> str:
    """How many of the held-out samples a figure is of."""
    if num >= total:
        return f"all {total:,} held-out {unit}"
    return f"{num:,} of {total:,} held-out {unit}, {which} (--eval-windows 0 takes all)"


def held_out_of(samples: Samples, limit: int | None) -> tuple[Tensor | Rows, str]:
    """Samples spread evenly, and how many they are in words; 0 takes all, None at most 128 windows or all arrays."""
    if isinstance(samples, Windows) and not len(samples):
        few = f"there are only {len(samples.ids)} held-out tokens, fewer than a window of {samples.length}"
        raise ValueError(f"{few}; give more text, or a smaller --length")
    if limit is None:
        limit = EVAL_WINDOWS if isinstance(samples, Windows) else 0
    places = spread(len(samples), limit)
    return samples.at(places), held_out_words(len(places), len(samples), samples.unit, "spread evenly")


def metric_of(model: Any, held_out: Tensor | Rows) -> tuple[str, Callable[[nn.Module], float]]:
    """The name of the metric and a function that measures it.

    Perplexity for causal models; for others accuracy where every sample has one class as its label, the model's own
    loss with any other labels, and without labels how far the outputs are from those of ``model`` as it is now.
    """
    if isinstance(held_out, Tensor):
        return "perplexity", lambda model: token_quality(model, held_out).perplexity
    if is_causal(model):
        labelled = with_labels(held_out)
        return "perplexity", lambda model: Quality(mean_loss(model, labelled), 0.0).perplexity
    if "labels" not in held_out:
        dense = dense_outputs(model, held_out)
        return "divergence", lambda model: divergence(model, held_out, dense)
    if held_out["labels"].ndim == 1 and not held_out["labels"].is_floating_point():
        return "accuracy", lambda model: accuracy(model, held_out)
    return "loss", lambda model: mean_loss(model, held_out)


@torch.no_grad()
def token_quality(model: nn.Module, windows: Tensor) -> Quality:
    device = next(model.parameters()).device

    def sums_of(chunk: Chunk) -> tuple[list[float], int]:  # without the logits, which would be there in the next pass
        tokens = windows[chunk.rows].to(device)
        with wide_products(device, model):
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        both = list(zip(logits, tokens[:, 1:], strict=True))
        losses = [F.cross_entropy(each.float(), target, reduction="sum").double().item() for each, target in both]
        return losses, sum(int((each.argmax(-1) == target).sum()) for each, target in both)

    sums = [each for _, each in _values(model, len(windows), _size(model, windows.shape[1]), sums_of)]
    loss, right = sum(loss for losses, _ in sums for loss in losses), sum(num for _, num in sums)
    num = windows.shape[0] * (windows.shape[1] - 1)
    return Quality(loss / num, right / num)


def mean_loss(model: nn.Module, rows: Rows) -> float:
    total = 0.0
    for part, output in _passes(model, rows):
        if output.loss is None:
            raise ValueError(f"{type(model).__name__} has no loss on {', '.join(rows)}; give labels too")
        total += float(output.loss) * num_rows(part)
    return total / num_rows(rows)


def accuracy(model: nn.Module, rows: Rows) -> float:
    right = sum(int((output.logits.argmax(-1).cpu() == part["labels"]).sum()) for part, output in _passes(model, rows))
    return right / num_rows(rows)


def dense_outputs(model: nn.Module, rows: Rows) -> list[Tensor]:
    outputs: list[Tensor] = []
    for part, output in _passes(model, rows):
        outputs.append(output_of(output).float().cpu())
        if (needed := outputs[0].nbytes // num_rows(part) * num_rows(rows)) > MOST_OUTPUTS:
            fewer = num_rows(rows) * MOST_OUTPUTS // needed
            raise ValueError(f"the dense outputs need {needed / 2**30:.1f} GiB; pass --eval-windows {max(1, fewer)}")
    return outputs


def divergence(model: nn.Module, rows: Rows, dense: list[Tensor]) -> float:
    """``|y - dense|^2 / |dense|^2`` over all outputs."""
    off, norm = 0.0, 0.0
    for (_, output), expected in zip(_passes(model, rows), dense, strict=True):
        off += float((output_of(output).float().cpu().double() - expected.double()).square().sum())
        norm += float(expected.double().square().sum())
    return off / norm if norm else math.nan


def _values(model: nn.Module, num: int, size: int, value: Callable[[Chunk], T]) -> Iterator[tuple[Chunk, T]]:
    """What a pass over some of ``num`` samples gives in evaluation mode; a bar or lines say how much of it is done."""
    chunks = [Chunk(0, first, min(first + size, num)) for first in range(0, num, size)]
    blocks = model_blocks(model) if model in BY_BLOCK else []
    with opened(model), modes_kept(model), progress_line(None, "evaluate") as report:

        def show(num_done: int, total: int) -> None:
            if report is not None:
                report(num_done, total, "held-out samples")

        model.eval()
        yield from zip(chunks, by_block(model, blocks, chunks, value, progress=show), strict=True)


def _size(model: Any, length: int) -> int:
    device, num_tokens = next(model.parameters()).device.type, getattr(model.config, "vocab_size", None) or 1
    return max(1, min(SIZE, MOST_LOGITS.get(device, 1 << 24) // (length * num_tokens)))


@torch.no_grad()
def _passes(model: Any, rows: Rows) -> Iterator[tuple[Rows, Any]]:
    """Samples, some at a time, and what the model returns for them in evaluation mode."""
    device = next(model.parameters()).device
    # a classifier of text without a padding token cannot find the last token of several texts
    size = SIZE if getattr(model.config, "pad_token_id", 0) is not None or "input_ids" not in rows else 1
    if is_causal(model) and "input_ids" in rows:
        size = min(size, _size(model, rows["input_ids"].shape[1]))

    def part(chunk: Chunk) -> Rows:
        return {name: array[chunk.rows] for name, array in rows.items()}

    def returned(chunk: Chunk) -> Any:
        odd = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
        what = f"{type(model).__name__} cannot read samples of {', '.join(rows)}"
        with in_one_line(what, *odd), wide_products(device, model):
            return model(**{name: array.to(device) for name, array in part(chunk).items()})

    for chunk, output in _values(model, num_rows(rows), size, returned):
        yield part(chunk), output
