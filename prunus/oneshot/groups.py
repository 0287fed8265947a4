"""The order in which a model calls its layers, and which of them read the same input, found from a few passes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import seen_calls
from .calibration import Calibration
from .forward import outputs
from .layers import Inputs, Reader
from .samples import Chunk

NUM_PASSES = 8  # samples that are run to find layers that not every sample reaches
Readers = Mapping[str, Sequence[Reader]]


@dataclass(eq=False)
class Group:
    """Weights whose layers read the same inputs; ``start`` blocks have ended when they are first called."""

    names: tuple[str, ...]
    start: int
    chunk: Chunk  # of the pass: another one may find other inputs at the same address
    stop: int = 0  # blocks that have ended when they are last called
    calls: list[tuple[Any, ...]] = field(default_factory=list)  # in a pass: what tells the input of each from others
    is_routed: bool = False  # reads some tokens only, as experts do
    num_inputs: int = 1  # tensors that a call reads: 3 where query, key and value of an attention differ
    sample_dim: int = 0  # of the inputs

    @property
    def num_calls(self) -> int:
        return len(self.calls)


@torch.no_grad()
def input_groups(calibration: Calibration, readers: Readers) -> tuple[list[Group], list[nn.Module]]:
    """Groups of weights in the order of first calls, and blocks at which passes may start, if they are a chain."""
    layers: dict[str, Group] = {}
    chunks = list(calibration.samples.chunks(1))[:NUM_PASSES]
    blocks = list(calibration.blocks)
    order = _observe(calibration, readers, chunks[0], blocks, layers)
    if blocks and (order != list(range(len(blocks))) or not calibration.is_chained):
        blocks = []
        layers.clear()
    for chunk in chunks if not layers else chunks[1:]:
        if len(layers) == len(readers) or not readers:
            break
        _observe(calibration, readers, chunk, blocks, layers)
    groups: dict[object, Group] = {}
    for name, layer in layers.items():
        group = groups.setdefault((*layer.calls, layer.start, layer.chunk), layer)
        if group is not layer:
            group.names += (name,)
    # layers that only a later sample reached stand at the end
    return sorted(groups.values(), key=lambda group: group.start), blocks


def _observe(
    calibration: Calibration, readers: Readers, chunk: Chunk, blocks: Sequence[nn.Module], layers: dict[str, Group]
) -> list[int]:
    """Add the layers that one pass calls for the first time; returns the order in which blocks were called."""
    batch = calibration.batch(chunk)
    sizes = next((leaf.shape[:2] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), torch.Size())
    num_rows = (sizes[:1].numel(), sizes.numel())
    alive: list[tuple[int, Tensor]] = []  # inputs of this block: memory in use cannot be that of another input
    here: dict[str, Group] = {}

    def begin(name: str, reader: Reader, inputs: Inputs) -> None:
        num = len(ended)
        alive[:] = [(number, x) for number, x in alive if number == num] + [(num, x) for x in inputs]
        layer = here.setdefault(name, Group((name,), num, chunk))
        # inputs without elements all have address 0
        same = [(x.data_ptr() or name, x._version, x.numel(), x.shape[-1], x.dtype) for x in inputs]
        layer.calls.append((*same, num, reader.geometry))
        layer.stop, layer.num_inputs = num, max(layer.num_inputs, len(inputs))
        if reader.reads_tokens:
            x = inputs[0]
            layer.is_routed |= x.ndim == 2 and len(x) not in num_rows
            layer.sample_dim |= x.ndim > 2 and x.shape[:2] == sizes[::-1] != sizes  # tokens come first

    with ExitStack() as stack, seen_calls(blocks) as (called, ended):
        for name, reading in readers.items():
            for reader in reading if name not in layers else ():
                stack.enter_context(reader.seen_by(partial(begin, name)))
        outputs(calibration.model, batch)
    layers |= here
    return called
