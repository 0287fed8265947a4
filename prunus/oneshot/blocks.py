"""The blocks of a model, found from its module tree, and the stream of activations through them.

Stored activations let a pass start at any block. Blocks before it do not run: stubs return what they would.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..eligible import Weight
from .forward import replaced
from .resources import FAILURES
from .samples import Chunk, Pick, Samples, Tree, copied, copied_rows, moved, repeated, room_for, rows, write_rows
from .spill import FileRows, Spill

SAME = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # relative


def blocks_of(model: nn.Module, weights: Sequence[Weight]) -> list[nn.Module]:
    """Items of the ``ModuleList`` with the most items that hold weights to prune; of a ``Sequential`` if there is none.

    Empty where no list has two such items. Of equal lists the first in the tree is taken.
    """
    owners = {weight.module for weight in weights}

    def num_items(blocks: list[nn.Module]) -> int:
        return sum(not owners.isdisjoint(item.modules()) for item in blocks)

    for kind in (nn.ModuleList, nn.Sequential):
        best = max((list(module) for module in model.modules() if isinstance(module, kind)), key=num_items, default=[])
        if num_items(best) > 1:
            return best
    return []


def block_of(module: nn.Module, blocks: Sequence[nn.Module]) -> int | None:
    """Index of the block that holds ``module``."""
    return next((i for i, block in enumerate(blocks) if any(module is part for part in block.modules())), None)


@contextmanager
def seen_calls(blocks: Sequence[nn.Module]) -> Iterator[tuple[list[int], list[int]]]:
    """Numbers of the blocks that are called while this is open, in order, and of those that have ended."""
    called, ended = list[int](), list[int]()
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.enter_context(block.register_forward_pre_hook(lambda *_, i=number: called.append(i)))
            stack.enter_context(block.register_forward_hook(lambda *_, i=number: ended.append(i)))
        yield called, ended


STUB = "returns_stored_output"  # attribute of a forward that computes nothing


def is_stubbed(block: nn.Module) -> bool:
    """Whether the block returns a stored output now, so that nothing in it runs."""
    return hasattr(vars(block).get("forward"), STUB)


def _stub(output: Tree) -> Callable[..., Tree]:
    def forward(*args: Any, **kwargs: Any) -> Tree:
        return output

    setattr(forward, STUB, True)
    return forward


class Reached(Exception):
    """Ends a forward pass once it has computed what is wanted."""


Visit = Callable[[Callable[[Chunk], None]], None]  # calls a function for all samples, some at a time


@dataclass(eq=False)
class Stream:
    """Activations between the blocks for every sample: position k holds the output of block k - 1.

    A pass that starts at position k runs the model's own forward with the first k blocks replaced by stubs, so that
    the model itself computes masks, position embeddings, head and loss.
    """

    blocks: Sequence[nn.Module]
    samples: Samples
    offload: torch.device | None = None  # of the passes, where activations are to be stored in main memory
    spill: Spill | None = None  # where activations go for which there is no memory, as ``advance`` stores them

    def __post_init__(self) -> None:
        self.wanted: Collection[int] = range(len(self.blocks) + 1)
        self._outputs: dict[int, list[Tree]] = {}  # by position, one tree per stack of samples

    def want(self, positions: Collection[int]) -> None:
        """Forget all other positions, and store no others from now on."""
        self.wanted = positions
        self._outputs = {k: output for k, output in self._outputs.items() if k in positions}

    def drop_after(self, k: int) -> None:
        """Forget the positions after ``k``: a weight after it has changed."""
        self._outputs = {i: output for i, output in self._outputs.items() if i <= k}

    def ensure(self, k: int, forward: Callable[[Chunk], object], size: int) -> int:
        """Have position ``k``, running ``forward`` over ``size`` samples at a time from the last position before it.

        Returns the number of samples run.
        """
        if k == 0 or k in self._outputs:
            return 0
        first, found = max((i for i in self._outputs if i < k), default=0), dict[int, list[Tree]]()
        for chunk in self.samples.chunks(size):
            for i, output in self.run(first, k, forward, chunk).items():
                self._store(found.setdefault(i, [None] * len(self.samples.stacks)), output, chunk)
        self._outputs |= found
        return len(self.samples)

    def advance(self, k: int, forward: Callable[[Chunk], object], visit: Visit) -> None:
        """From position ``k`` to ``k + 1``, in the memory of the old activations where the new ones fit there."""
        before, after = self._outputs.get(k), [None] * len(self.samples.stacks)

        def act(chunk: Chunk) -> None:
            self._store(after, self.run(k, k + 1, forward, chunk)[k + 1], chunk, before)

        visit(act)
        self._outputs = {k + 1: after}

    def _store(self, stacks: list[Tree], output: Tree, chunk: Chunk, old: list[Tree] | None = None) -> None:
        """Write what blocks returned for a chunk to its place, in the memory of ``old`` where it fits there."""
        number, size = chunk.stack, self.samples.stacks[chunk.stack].size
        if stacks[number] is None:
            stacks[number] = room_for(output, chunk.size, size, old[number] if old else None, self.spill)
        stacks[number] = write_rows(stacks[number], output, chunk, size, self.spill)

    @property
    def num_bytes(self) -> int:
        """What the stored activations take, in memory and in files."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self._outputs) if isinstance(leaf, Tensor | FileRows))

    def keep_on(self, device: torch.device) -> None:
        """Store activations on the device of the passes from now on."""
        self._outputs = {k: [moved(tree, device) for tree in trees] for k, trees in self._outputs.items()}
        self.offload = self.spill = None

    def copy_from(self, other: "Stream", k: int) -> None:
        """Take over what another stream has at position ``k``."""
        self._outputs = {}
        if k:
            both = zip(other._outputs[k], self.samples.stacks, strict=True)
            self._outputs = {k: [copied_rows(tree, stack.size, self.spill) for tree, stack in both]}

    def run(self, first: int, last: int, forward: Callable[[Chunk], object], chunk: Chunk) -> dict[int, Tree]:
        """Outputs, by position, of a pass from ``first`` that ends at ``last``: at ``last`` and where wanted."""
        outputs: dict[int, Tree] = {}

        def hook(position: int) -> Callable[..., None]:
            def store(module: nn.Module, args: Any, output: Tree) -> None:
                if position == last or position in self.wanted:
                    outputs[position] = copied(output) if self.offload is None else moved(output, torch.device("cpu"))
                if position == last:
                    raise Reached

            return store

        with ExitStack() as stack, torch.no_grad(), suppress(Reached), self.starting_at(first, chunk):
            for i in range(first, last):
                stack.enter_context(self.blocks[i].register_forward_hook(hook(i + 1)))
            forward(chunk)
        return outputs

    def stored(self, k: int, chunk: Chunk | Pick) -> Tree:
        """What the samples of a chunk are at position ``k``, on the device of the passes."""
        output = rows(self._outputs[k][chunk.stack], chunk.rows, self.samples.stacks[chunk.stack].size)
        return output if self.offload is None else moved(output, self.offload)

    @contextmanager
    def starting_at(self, k: int, chunk: Chunk | Pick, times: int = 1) -> Iterator[None]:
        """Passes over ``chunk``, its samples repeated ``times`` times, that start at position ``k``."""
        if k == 0:
            yield
            return
        output = self.stored(k, chunk)
        # copies: the model may change them in place
        last = copied(output) if times == 1 else repeated(output, times, chunk.size)
        others = copied(last) if k > 1 else None
        stubs = {block: _stub(others) for block in self.blocks[: k - 1]}
        with replaced(stubs | {self.blocks[k - 1]: _stub(last)}):
            yield


def is_chain(stream: Stream, value: Callable[[Chunk], Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether passes that start in the middle and at the end of the blocks give the value of a whole pass.

    ``expected`` holds that value for each stack of the samples, which has one sample. False also where the model does
    more with its blocks than pass a state from one to the next, or does not count samples in the first dimension of it.
    """
    num = len(stream.blocks)
    try:
        for number, whole in enumerate(expected):
            chunk = Chunk(number, 0, 1)
            for k in (num // 2, num):  # what arrives at the end has started in the middle
                stream.ensure(k, value, 1)
                leaves = [leaf for leaf in pytree.tree_leaves(stream.stored(k, chunk)) if isinstance(leaf, Tensor)]
                if any(leaf.shape[1:2] == (1,) != leaf.shape[:1] for leaf in leaves):
                    return False
            with torch.no_grad(), stream.starting_at(num, chunk):
                if not is_near(value(chunk), whole, SAME.get(whole.dtype, 1e-2)):
                    return False
    except FAILURES:
        return False
    return True


def is_near(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether no element differs by more than ``tolerance`` times the largest expected one."""
    if not value.numel():
        return True
    return bool(_largest(value - expected) <= tolerance * _largest(expected))


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude, without a copy of values that may be the logits of a large vocabulary."""
    least, most = values.aminmax()
    return torch.maximum(-least, most)
