"""Blocks that a pass skips: in their places stand identities, found from what the blocks read and return."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import STUB
from .forward import replaced
from .samples import Tree

Place = tuple[str, int]  # a list of blocks, and one of them
Key = int | str  # of an input: its place, or its name


class Identity:
    """A forward that returns its first input, in the form of what the block returns."""

    def __init__(self, sources: list[Key | None], spec: Any) -> None:
        self.sources, self.spec = sources, spec  # which input each leaf of the output is
        setattr(self, STUB, True)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tree) -> "Identity | None":
        """None where the first tensor of the output has not the shape of the first input."""
        given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        leaves, spec = pytree.tree_flatten(output)
        number = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        first = next(iter(given), None)
        if number is None or first is None or leaves[number].shape != _shape(given[first]):
            return None
        sources = [_source(given, place, leaf) for place, leaf in enumerate(leaves)]
        sources[number] = first
        return Identity(sources, spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        given: dict[Key | None, Any] = {**dict(enumerate(args)), **kwargs}
        return pytree.tree_unflatten([given.get(source) for source in self.sources], self.spec)


def _source(given: Mapping[Key, Any], place: int, leaf: Any) -> Key | None:
    """The input that a block returns: the very same, or that at its place if it has its shape."""
    same = [key for key, value in given.items() if value is leaf is not None]
    at_place = [key for key in [*given][place : place + 1] if _shape(given[key]) == _shape(leaf) is not None]
    return next(iter([*same, *at_place]), None)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


@contextmanager
def seen_blocks(blocks: Mapping[Place, nn.Module]) -> Iterator[dict[Place, tuple[nn.Module, Identity]]]:
    """Afterwards holds the blocks with weights that the pass in between reached, each with its identity.

    ValueError where blocks share weights or run more than once. Some models call ``forward`` itself, so that hooks
    would not see it.
    """
    owners: dict[Tensor, Place] = {}
    for where, block in blocks.items():
        for parameter in block.parameters():
            if owners.setdefault(parameter, where) != where:
                (a, i), (b, j) = owners[parameter], where
                raise ValueError(f"{a}.{i} and {b}.{j} share weights, so no layer can be removed")
    calls: dict[nn.Module, list[Identity | None]] = {block: [] for block in blocks.values()}
    skips: dict[Place, tuple[nn.Module, Identity]] = {}
    with replaced({block: _watched(block, seen) for block, seen in calls.items()}):
        yield skips
    for where, block in blocks.items():
        if len(calls[block]) > 1:
            raise ValueError(f"the blocks of {where[0]} run more than once in a pass, so none can be removed")
        identity = calls[block][0] if calls[block] else None
        if identity is not None and any(parameter.ndim > 1 for parameter in block.parameters()):
            skips[where] = block, identity


def _watched(block: nn.Module, seen: list[Identity | None]) -> Callable[..., Tree]:
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Tree:
        output = own(*args, **kwargs)
        seen.append(Identity.of(args, kwargs, output))
        return output

    return forward
