"""The blocks of a model, found from its module tree, and their outputs kept so that a pass can start behind them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..eligible import Weight
from .samples import Chunk, Samples, Tree, joined, repeated, rows
from .session import replaced


def blocks_of(model: nn.Module, weights: Sequence[Weight]) -> list[nn.Module]:
    """Items of the ``ModuleList`` with the most items that hold weights to prune; of a ``Sequential`` if there is none.

    Empty where no list has two such items. Of equal lists the first in the tree is taken.
    """
    owners = {weight.module for weight in weights}
    best: list[nn.Module] = []
    for kind in (nn.ModuleList, nn.Sequential):
        most = 1
        for module in model.modules():
            if isinstance(module, kind):
                held = sum(not owners.isdisjoint(item.modules()) for item in module)
                if held > most:
                    best, most = list(module), held
        if best:
            break
    return best


def block_of(module: nn.Module, blocks: Sequence[nn.Module]) -> int | None:
    """Number of the block that holds ``module``."""
    return next((i for i, block in enumerate(blocks) if any(module is part for part in block.modules())), None)


STUB = "returns_what_is_known"  # mark of a forward that runs nothing


class _Reached(Exception):
    """Raised to leave a forward pass once what was wanted of it is there."""


class Prefix:
    """Outputs of blocks for every sample: entry k is the output of block k - 1.

    A pass that starts at k runs the model's own forward with the first k blocks replaced by what they returned, so
    that masks, positions, head and loss are computed by the model itself.
    """

    def __init__(self, blocks: Sequence[nn.Module], samples: Samples) -> None:
        self.blocks = blocks
        self.samples = samples
        self.wanted: Collection[int] = range(len(blocks) + 1)
        self._outputs: dict[int, list[Tree]] = {}

    def want(self, starts: Collection[int]) -> None:
        """Forget all entries but those of ``starts``, and store no others from here on."""
        self.wanted = starts
        self._outputs = {k: output for k, output in self._outputs.items() if k in starts}

    def drop_after(self, k: int) -> None:
        """Forget what a change behind entry ``k`` has made wrong."""
        self._outputs = {i: output for i, output in self._outputs.items() if i <= k}

    def ensure(self, k: int, forward: Callable[[Chunk], object], size: int) -> int:
        """Have entry ``k``, running ``forward`` over ``size`` samples at a time from the last entry before it.

        Returns the number of samples run.
        """
        if k == 0 or k in self._outputs:
            return 0
        first = max((i for i in self._outputs if i < k), default=0)
        found: dict[int, list[list[Tree]]] = {i: [[] for _ in self.samples.groups] for i in range(first + 1, k + 1)}
        sizes: list[list[int]] = [[] for _ in self.samples.groups]
        for chunk in self.samples.chunks(size):
            for i, output in self._run(first, k, forward, chunk).items():
                found[i][chunk.group].append(output)
            sizes[chunk.group].append(chunk.size)
        for i, groups in found.items():
            if groups[0]:
                self._outputs[i] = [joined(trees, lengths) for trees, lengths in zip(groups, sizes, strict=True)]
        return len(self.samples)

    def _run(self, first: int, k: int, forward: Callable[[Chunk], object], chunk: Chunk) -> dict[int, Tree]:
        """Outputs of blocks first to k - 1 that are wanted, from a pass that ends behind the last of them."""
        found: dict[int, Tree] = {}

        def hook(number: int) -> Callable[..., None]:
            def store(module: nn.Module, args: Any, output: Tree) -> None:
                if number + 1 == k or number + 1 in self.wanted:
                    found[number + 1] = copied(output)
                if number + 1 == k:
                    raise _Reached

            return store

        handles = [self.blocks[i].register_forward_hook(hook(i)) for i in range(first, k)]
        try:
            with torch.no_grad(), self.skipping(first, chunk):
                forward(chunk)
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    @contextmanager
    def skipping(self, k: int, chunk: Chunk, times: int = 1) -> Iterator[None]:
        """Passes over ``chunk``, its samples ``times`` over, that start at entry ``k``."""
        if k == 0:
            yield
            return
        whole = self.samples.groups[chunk.group].size
        output = rows(self._outputs[k][chunk.group], chunk.start, chunk.stop, whole)
        # copies: what the model may do to them in place must not reach the store
        last = copied(output) if times == 1 else repeated(output, times, chunk.size)
        others = copied(last) if k > 1 else None
        stubs = {block: _returning(others) for block in self.blocks[: k - 1]}
        with replaced(stubs | {self.blocks[k - 1]: _returning(last)}):
            yield


def copied(tree: Tree) -> Tree:
    return pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, tree)


def _returning(output: Tree) -> Callable[..., Tree]:
    def forward(*args: Any, **kwargs: Any) -> Tree:
        return output

    setattr(forward, STUB, True)
    return forward
