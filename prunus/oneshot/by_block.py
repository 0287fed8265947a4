"""Passes over many batches that go block by block: all batches pass one block before the next block runs.

A model whose blocks are read from its folder when they run then reads each block once, not once for every batch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..eligible import eligible
from .blocks import SAME, Stream, blocks_of, is_near
from .forward import first_tensor
from .resources import FAILURES, is_out_of_memory
from .samples import Chunk, Samples, Stack
from .spill import Spill

T = TypeVar("T")
BY_BLOCK = WeakSet[nn.Module]()  # models whose blocks are costly to bring into memory: passes go block by block
# bytes of activations between blocks, and the folder of the file for what is beyond them
LIMITS = WeakKeyDictionary[nn.Module, tuple[int, Path | None]]()


def model_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, frozen or not; none where it has no weight to prune."""
    try:
        return blocks_of(model, eligible(model, takes_frozen=True).weights)
    except ValueError:
        return []


@torch.no_grad()
def by_block(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    chunks: Sequence[Chunk],
    value: Callable[[Chunk], T],
    *,
    checks: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[T]:
    """``value(chunk)`` for each chunk, in order, with the same bits as ``map(value, chunks)``, block after block.

    ``value`` runs the model. It is called once for each block, where an exception ends it, and once behind the last. A
    model that is no chain of blocks is run chunk after chunk: one pass tells, if it ``checks``. ``progress`` is called
    with the steps that are done, and all.
    """
    stacks, num = Samples([Stack(None, chunk.size) for chunk in chunks]), len(chunks)
    if num == 1:
        blocks = []
    with closing(Spill(*LIMITS.get(model, (sys.maxsize, None)))) as spill:
        stream = Stream(blocks, stacks, spill=spill)
        total = num * (len(blocks) + 1)
        if not _advance(stream, model, chunks, value, checks, lambda done: progress(done, total)):
            stream, total = Stream([], stacks), num
        for number, chunk in enumerate(chunks):
            progress(total - num + number, total)
            with stream.starting_at(len(stream.blocks), Chunk(number, 0, chunk.size)):
                result = value(chunk)
            yield result


def _advance(
    stream: Stream,
    model: nn.Module,
    chunks: Sequence[Chunk],
    value: Callable[[Chunk], Any],
    checks: bool,
    progress: Callable[[int], None],
) -> bool:
    """Take the chunks, each a stack of its own, behind the last block; False where the model is no chain of blocks."""
    if not stream.blocks:
        return True
    whole = _output(model, lambda: value(chunks[0])) if checks else None
    stacks, first = [Chunk(number, 0, chunk.size) for number, chunk in enumerate(chunks)], chunks[0]
    try:
        for k in range(len(stream.blocks)):

            def visit(act: Callable[[Chunk], None], k: int = k) -> None:
                for stack in stacks:
                    progress(k * len(chunks) + stack.stack)
                    act(stack)

            stream.advance(k, lambda stack: value(chunks[stack.stack]), visit)
        if checks:
            with stream.starting_at(len(stream.blocks), stacks[0]):
                found = _output(model, lambda: value(first))
            if found is None or whole is None or found.shape != whole.shape:
                return False
            if not torch.equal(found.isnan(), whole.isnan()):
                return False
            return is_near(found.nan_to_num_(), whole.nan_to_num_(), SAME.get(whole.dtype, 1e-2))
    except FAILURES as error:  # passes over the whole model fail again if they cannot be run
        if is_out_of_memory(error):
            raise
        return False
    return True


def _output(model: nn.Module, run: Callable[[], object]) -> Tensor | None:
    """The first sample of what the model returns while a function runs; None if it is not called."""
    seen: list[Tensor] = []
    with model.register_forward_hook(lambda module, args, output: seen.append(first_tensor(output))):
        run()
    return (seen[-1][:1] if seen[-1].ndim else seen[-1]).clone() if seen else None
