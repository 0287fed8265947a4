"""The order in which a model calls its layers, and which of them read the same input, found from a few passes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import Stream, is_chain, is_near
from .layers import Inputs, Reader
from .resources import FAILURES
from .samples import Chunk, Group, Samples, moved, rows
from .walk import Walk, first_tensor, outputs

NUM_PASSES = 8  # samples that are run to find layers that not every sample reaches
# relative: rounding where a batch is run by other kernels than a single sample; a real difference is of order 1
ROUNDING = {torch.float64: 1e-6, torch.float32: 3e-2, torch.bfloat16: 0.25, torch.float16: 0.25}
Readers = Mapping[str, Sequence[Reader]]


@dataclass(frozen=True)
class InputGroup:
    """Weights whose layers read the same inputs; ``start`` blocks have ended when they are first called."""

    names: tuple[str, ...]
    start: int
    stop: int  # blocks that have ended when they are last called
    num_calls: int  # in a pass
    is_routed: bool = False  # reads some tokens only, as experts do
    num_inputs: int = 1  # tensors that a call reads: 3 where query, key and value of an attention differ
    sample_dim: int = 0  # of the inputs


@dataclass
class _Layer:
    calls: list[tuple[Any, ...]]  # what tells the input of each call from others
    start: int
    stop: int = 0
    is_routed: bool = False
    num_inputs: int = 1
    sample_dim: int = 0


@torch.no_grad()
def input_groups(walk: Walk, readers: Readers) -> tuple[list[InputGroup], list[nn.Module]]:
    """Groups of weights in the order of their first calls, and the blocks at which passes may start.

    There are no such blocks where the model does more with them than pass a state from one to the next. Weights whose
    layers are never called are in no group.
    """
    layers: dict[str, _Layer] = {}
    chunks = list(walk.samples.chunks(1))[:NUM_PASSES]
    orders = [_observe(walk, readers, chunks[0], walk.blocks, layers)]
    blocks = list(walk.blocks) if orders[0] == list(range(len(walk.blocks))) and _is_chained(walk, chunks[0]) else []
    if len(blocks) != len(walk.blocks):
        layers.clear()
    for chunk in chunks if not layers else chunks[1:]:
        if len(layers) == len(readers) or not readers:
            break
        _observe(walk, readers, chunk, blocks, layers)
    groups: dict[object, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault((*layer.calls, layer.start), []).append(name)
    found = []
    for names in groups.values():
        layer = layers[names[0]]
        how = layer.is_routed, layer.num_inputs, layer.sample_dim
        found.append(InputGroup(tuple(names), layer.start, layer.stop, len(layer.calls), *how))
    return found, blocks


def _observe(
    walk: Walk, readers: Readers, chunk: Chunk, blocks: Sequence[nn.Module], layers: dict[str, _Layer]
) -> list[int]:
    """Add the layers that one pass calls for the first time; returns the order in which blocks were called."""
    batch = walk.batch(chunk)
    sizes = next((leaf.shape[:2] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), torch.Size())
    num_rows = (sizes[:1].numel(), sizes.numel())
    alive: list[Tensor] = []  # inputs of this block: memory that is in use cannot be that of another input
    order: list[int] = []
    found: dict[str, _Layer] = {}
    ended = 0

    def end(*_: object) -> None:
        nonlocal ended
        ended += 1
        alive.clear()

    def begin(name: str, reader: Reader, inputs: Inputs) -> None:
        alive.extend(inputs)
        layer = found.setdefault(name, _Layer([], ended))
        same = [(x.data_ptr(), x._version, x.numel(), x.shape[-1], x.dtype) for x in inputs]
        layer.calls.append((*same, ended, reader.geometry))
        layer.stop, layer.num_inputs = ended, max(layer.num_inputs, len(inputs))
        if reader.reads_tokens:
            x = inputs[0]
            layer.is_routed |= x.ndim == 2 and len(x) not in num_rows
            layer.sample_dim |= x.ndim > 2 and x.shape[:2] == sizes[::-1] != sizes  # tokens come first

    handles = [block.register_forward_pre_hook(lambda *_, i=i: order.append(i)) for i, block in enumerate(blocks)]
    handles += [block.register_forward_hook(end) for block in blocks]
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        for name, reading in readers.items():
            for reader in reading if name not in layers else ():
                stack.enter_context(reader.seen_by(partial(begin, name)))
        outputs(walk.model, batch)
    layers |= found
    return order


def _is_chained(walk: Walk, chunk: Chunk) -> bool:
    """Whether passes that start at any block give what whole passes give."""
    if not walk.blocks:
        return False
    group = walk.samples.groups[chunk.group]
    samples = Samples([Group(moved(rows(group.tree, slice(1), group.size), walk.device), 1)])

    def value(chunk: Chunk) -> Tensor:
        return first_tensor(outputs(walk.model, samples.tree(chunk)))

    whole = value(Chunk(0, 0, 1))
    return is_chain(Stream(walk.blocks, samples), value, [whole])


@torch.no_grad()
def can_batch(walk: Walk) -> bool:
    """Whether two samples in one pass give what they give one by one."""
    number = next((i for i, group in enumerate(walk.samples.groups) if group.size > 1), None)
    if number is None:
        return True
    try:
        batches = (walk.batch(Chunk(number, *rows)) for rows in ((0, 2), (0, 1), (1, 2)))
        both, *each = (first_tensor(outputs(walk.model, batch)) for batch in batches)
    except (*FAILURES, MemoryError):
        return False
    return len(both) == 2 and all(
        one.shape[1:] == part.shape and is_near(part, one[0], ROUNDING.get(part.dtype, 0.25))
        for part, one in zip(both, each, strict=True)
    )
