"""A model and the samples that passes run on: where they run, how many at a time, and what they have cost so far."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from ..eligible import Weight, eligible, unwrapped_model
from ..ops.wide_products import wide_products
from ..ranks import Ranks, is_dtensor
from .blocks import Stream, blocks_of, is_chain, is_near
from .built_twice import tensors_of
from .disk_offload import BY_BLOCK, by_block, disk_offload_of
from .forward import first_tensor, frozen, outputs
from .offload import Offload
from .progress import Meter, Progress
from .resources import FAILURES, Clock, Cost, Peak, fits, reason_of
from .samples import Chunk, Pick, Samples, Stack, Tree, check_batches, in_words, is_empty, moved, rows, samples_of
from .shared_work import all_of, check_same_inputs, share_of
from .spill import Spill

Patterns = str | Sequence[str]
# relative: rounding where a batch is run by other kernels than a single sample; a real difference is of order 1
ROUNDING = {torch.float64: 1e-6, torch.float32: 3e-2, torch.bfloat16: 0.25, torch.float16: 0.25}


class Calibration:
    """What every method after training needs: the prunable weights of a model, its blocks, the samples, the device.

    With ``offload``, a device, the blocks are moved there one at a time. ``batch_size`` is the number of samples of a
    pass; the default depends on memory and speed. Stored activations take at most ``memory`` bytes of main memory: half
    of it is for those between blocks, which go to a file beyond it, in the folder ``scratch`` or that for temporary
    files.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        only: Patterns = (),
        offload: str | torch.device | None = None,
        batch_size: int | None = None,
        takes_frozen: bool = False,
        memory: int | None = None,
        scratch: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"the first argument must be a model, the second batches; got {type(model).__name__}")
        if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size >= 1):
            raise ValueError(f"batch_size must be a number of samples, at least 1, or None, got {batch_size!r}")
        if memory is not None and not (isinstance(memory, Integral) and memory >= 0):
            raise ValueError(f"memory must be a number of bytes, at least 0, or None, got {memory!r}")
        check_batches(batches)
        self.model = model = unwrapped_model(model)
        self.eligible = eligible(model, include, exclude, only, takes_frozen=takes_frozen)
        self.weights = {weight.name: weight for weight in self.eligible.weights}
        if empty := [name for name, tensor in tensors_of(model).items() if tensor.is_meta]:
            raise ValueError(f"{empty[0]} is on the meta device and has no values; load all weights into memory first")
        if sharded := [name for name, weight in self.weights.items() if is_dtensor(weight.parameter)]:
            raise ValueError(f"{sharded[0]} is sharded over ranks; prune the whole model in one process, then shard it")
        weights = self.eligible.weights
        self.blocks = blocks_of(model, weights)
        self.offload = None if offload is None else Offload(model, weights, torch.device(offload))
        self.disk = disk_offload_of(model)  # of a model whose blocks are read one at a time
        self.device = weights[0].parameter.device if self.offload is None else self.offload.device
        self.batch_size, self.memory = batch_size, memory
        self.spill = None
        if memory is not None or self.disk is not None:
            self.spill = Spill(math.inf if memory is None else memory // 2, scratch)
        self.meter = Meter()  # of the call that runs
        self.clock = Clock(self.device)
        self.cost = Cost()  # of the call that runs
        self.renewed: set[Tensor] = set()  # buffers that stay as they were changed
        self.is_open = False
        self._batches, self._is_checked = batches, False
        self.ranks = ranks
        if ranks is not None:
            check_same_inputs(ranks, model, (lambda: self.samples) if self.has_batches else None)

    @property
    def has_batches(self) -> bool:
        return not is_empty(self._batches)

    @cached_property
    def samples(self) -> Samples:
        samples = samples_of(self._batches)
        _check_tokens(self.model, samples)
        return samples

    def shared(self) -> "Calibration":
        """The same with this rank's share of the samples; itself where there is one rank only."""
        if self.ranks is None:
            return self
        return self.with_samples(share_of(self.samples, self.ranks))

    def with_samples(self, samples: Samples) -> "Calibration":
        """The same with other samples."""
        own = copy(self)
        vars(own)["samples"] = samples
        return own

    @contextmanager
    def open(self) -> Iterator[None]:
        """While this is open, methods may change the model; afterwards only its weights differ."""
        on_disk = self.disk.changing() if self.disk else nullcontext()
        offloaded = self.offload.open() if self.offload else nullcontext()
        with frozen(self.model, self.renewed), on_disk, offloaded, wide_products(self.device, self.model):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False
                if self.spill is not None:
                    self.spill.close()

    @contextmanager
    def measured(self, progress: Progress | None, num_steps: int) -> Iterator[Cost]:
        """Measure a call of ``num_steps`` steps; its cost is filled in at the end."""
        began, peak = time.perf_counter(), Peak(self.device)
        self.cost, self.clock.seconds = Cost(), {}
        self.meter.begin(progress, num_steps)
        yield self.cost
        self.meter.finish()
        self.cost.seconds, self.cost.peak_bytes = time.perf_counter() - began, peak.bytes()
        self.cost.parts = dict(self.clock.seconds)
        if self.ranks is not None:
            self.cost.merge_(all_of(self.ranks, self.cost))
        self.cost = Cost()  # what follows is another call's

    def stream(self, blocks: Sequence[nn.Module]) -> Stream:
        """Activations between blocks, in main memory and beyond its limit in a file, or on the device of the passes."""
        offload = None if self.offload is None else self.device
        spill = self.spill if offload is not None or self.device.type == "cpu" else None
        return Stream(blocks, self.samples, offload, spill)

    def holding(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """The weights of these names in memory, where they may be changed."""
        return self.disk.holding(names) if self.disk else nullcontext()

    def each_weight(self) -> Iterator[Weight]:
        """All weights, each in memory until the next one."""
        for name, weight in self.weights.items():
            with self.holding([name]):
                yield weight

    def batch(self, chunk: Chunk | Pick, times: int = 1) -> Tree:
        return moved(self.samples.tree(chunk, times), self.device)

    @torch.no_grad()
    def check_model(self) -> None:
        """Run the model on the first sample, once; if it fails, one line says what went in."""
        if self._is_checked:
            return
        batch = self.batch(next(self.samples.chunks(1)))
        try:
            output = outputs(self.model, batch)
            self._is_checked = True
        except FAILURES as error:
            reason = reason_of(error)
            problem = f"{type(self.model).__name__} fails on the first sample, {in_words(batch)}: {reason}"
            raise ValueError(f"{problem}; {_advice(self.model, batch, self._batches)}") from error
        if self.model in BY_BLOCK:  # a later call would need this pass again
            vars(self)["is_chained"] = self._is_chain(first_tensor(output))

    @cached_property
    @torch.no_grad()
    def is_chained(self) -> bool:
        """Whether passes that start at any block give what whole passes give."""
        return self._is_chain(first_tensor(outputs(self.model, self.batch(next(self.samples.chunks(1))))))

    def _is_chain(self, whole: Tensor) -> bool:
        stack = self.samples.stacks[0]
        sample = Samples([Stack(moved(rows(stack.tree, slice(1), stack.size), self.device), 1)])
        stream = Stream(self.blocks, sample)
        return is_chain(stream, lambda chunk: first_tensor(outputs(self.model, sample.tree(chunk))), [whole])

    @torch.no_grad()
    def can_batch(self) -> bool:
        """Whether two samples in one pass give the outputs that they give one by one."""
        number = next((i for i, stack in enumerate(self.samples.stacks) if stack.size > 1), None)
        if number is None:
            return True
        chunks = [Chunk(number, 0, 2), Chunk(number, 0, 1), Chunk(number, 1, 2)]
        blocks = self.blocks if self.model in BY_BLOCK and self.is_chained else []

        def value(chunk: Chunk) -> Tensor:
            return first_tensor(outputs(self.model, self.batch(chunk)))

        try:
            both, *each = by_block(self.model, blocks, chunks, value, checks=False)
        except (*FAILURES, MemoryError):
            return False
        return len(both) == 2 and all(
            one.shape[1:] == part.shape and is_near(part, one[0], ROUNDING.get(part.dtype, 0.25))
            for part, one in zip(both, each, strict=True)
        )

    def reading(self, phase: str) -> AbstractContextManager[None]:
        """A part of the progress bar in which every sample is a step."""
        return self.meter.part(phase, len(self.samples), of_samples=True)

    def visit(
        self,
        size: int,
        act: Callable[[Chunk], Iterable[Any] | None],
        add: Callable[[Any], None] | None = None,
        *,
        after: Chunk | None = None,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        """Call ``act`` for all samples, ``size`` at a time; if memory runs out, for the two halves of a chunk.

        ``act`` may see samples again, so it must return what is to be summed up, in parts, of which ``add`` gets each
        once. If memory runs out in ``add``, it gets the same part again, and must have changed nothing or continue
        where it stopped. ``make_room`` is called whenever memory has run out. ``after`` are the first samples of a
        stack, which are left out.
        """
        chunks = [chunk if after is None else chunk.after(after) for chunk in self.samples.chunks(size)]
        pending = [chunk for chunk in chunks if chunk.size]

        def run(chunk: Chunk, parts: list[Any]) -> None:
            parts += act(chunk) or ()

        while pending:
            chunk, parts = pending.pop(0), list[Any]()
            if not fits(partial(run, chunk, parts), self.device, make_room, or_raise=chunk.size == 1):
                pending[:0] = chunk.halves()
                continue
            if add is not None:
                self.each_once(parts, add, make_room)
            self.meter.sampled(chunk.size)

    def each_once(
        self, parts: list[Any], add: Callable[[Any], None], make_room: Callable[[], None] | None = None
    ) -> None:
        """Call ``add`` for each part and remove it; call it a second time if memory runs out."""
        while parts:
            if not fits(partial(add, parts[0]), self.device, make_room):
                add(parts[0])
            parts.pop(0)


def _advice(model: nn.Module, batch: Tree, batches: Any) -> str:
    if isinstance(batches, Dataset):
        return "if the dataset holds single samples, give DataLoader(dataset, batch_size=8)"
    inputs = batch[0] if isinstance(batch, tuple) else batch
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    given = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if given - {own}:
        return f"the model computes in {own}: convert the batches, for example by x.to({own})"
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if not given and not has_tokens:
        return f"the model does not read tokens: give inputs in {own}"
    if not given and any(leaf.ndim == 1 for leaf in leaves):
        return "tokens have the shape (sample, token): give ids[None] for one sample"
    return "give batches that model(batch) accepts, or model(**batch) if they are dicts"


def _check_tokens(model: nn.Module, samples: Samples) -> None:
    """Refuse tokens that are not (sample, token) or that a Hugging Face model's embedding does not have."""
    num_known = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(num_known, int):
        return
    for stack in samples.stacks:
        tree = stack.tree[0] if isinstance(stack.tree, tuple) else stack.tree
        tokens = tree.get("input_ids") if isinstance(tree, Mapping) else tree
        reads_tokens = getattr(model, "main_input_name", "") == "input_ids"
        is_named = isinstance(tree, Mapping) or reads_tokens
        if not isinstance(tokens, Tensor) or (tokens.is_floating_point() and not is_named):
            continue
        if tokens.is_floating_point() or (tokens.ndim == 1 and reads_tokens):
            raise ValueError(
                f"tokens must be whole numbers of shape (sample, token), got {in_words(tokens)}; "
                f"give {'ids.long()' if tokens.is_floating_point() else 'ids[None] for one sample'}"
            )
        if tokens.numel():
            least, most = tokens.min().item(), tokens.max().item()
            if least < 0 or most >= num_known:
                raise ValueError(
                    f"batches hold token {most if least >= 0 else least}, but the model's vocabulary has {num_known}"
                )
