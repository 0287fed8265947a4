"""Calibration samples: read once, kept in order, and run in batches of any size.

A sample is one index of dimension 0. A batch is a tree of tensors (a tensor, a pair of input and target, a dict). Its
size is the first dimension of its first tensor; every tensor of that length has one row per sample.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from ..ops.divergence import IGNORED
from .spill import FileRows, Spill, copy_rows_, empty_rows, memory_order

Tree = Any  # tensors in tuples, lists and dicts


@dataclass(frozen=True)
class Stack:
    tree: Tree
    size: int


@dataclass(frozen=True)
class Chunk:
    """Samples ``start`` to ``stop`` of one stack."""

    stack: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def after(self, other: "Chunk") -> "Chunk":
        """The part of it after ``other``, which holds the first samples of a stack."""
        if self.stack != other.stack:
            return self
        return Chunk(self.stack, min(max(self.start, other.stop), self.stop), self.stop)

    def halves(self) -> "list[Chunk]":
        middle = (self.start + self.stop + 1) // 2
        return [Chunk(self.stack, self.start, middle), Chunk(self.stack, middle, self.stop)]


@dataclass(frozen=True)
class Pick:
    """Any samples of one stack, in any order."""

    stack: int
    rows: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Samples:
    """All calibration samples, in their order, or every so many of them."""

    stacks: list[Stack]
    first: int = 0  # number of the first one among all
    step: int = 1

    def __len__(self) -> int:
        return sum(stack.size for stack in self.stacks)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Chunks of at most ``size`` samples, in order and of nearly equal size."""
        for number, stack in enumerate(self.stacks):
            num_parts = -(-stack.size // size)
            edges = [stack.size * i // num_parts for i in range(num_parts + 1)]
            yield from (Chunk(number, start, stop) for start, stop in pairwise(edges))

    def digest(self) -> str:
        return digest([stack.tree for stack in self.stacks])

    def number(self, chunk: Chunk, row: int = 0) -> int:
        """Of one sample of a chunk among all."""
        return self.first + self.step * (sum(stack.size for stack in self.stacks[: chunk.stack]) + chunk.start + row)

    def tree(self, chunk: Chunk | Pick, times: int = 1) -> Tree:
        stack = self.stacks[chunk.stack]
        return repeated(rows(stack.tree, chunk.rows, stack.size), times, chunk.size)


def check_batches(batches: Any) -> None:
    """Raise ValueError where ``batches`` cannot be read as batches, even if the score never reads them."""
    if isinstance(batches, Tensor | Mapping):
        raise ValueError("batches must be an iterable of batches, got a single batch; put it into a list")
    if isinstance(batches, str) or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        problem = f"batches must be an iterable of batches, got {batches!r}"
        raise ValueError(f"{problem}; give a list or a loader, and a number by name, such as sparsity=0.5 or size=0.7")


def is_empty(batches: Any) -> bool:
    """Whether ``batches`` are known to be none; an iterator is not read for it."""
    return hasattr(batches, "__len__") and len(batches) == 0


def samples_of(batches: Iterable[Any]) -> Samples:
    """All samples of ``batches``, which are read once: a loader that shuffles has no effect later."""
    stacks = []
    for batch in batches:
        if isinstance(batches, Dataset) and any(map(_is_number, pytree.tree_leaves(plain_batch(batch)))):
            problem = f"batches must be an iterable of batches, got {type(batches).__name__}"
            raise ValueError(f"{problem}, a dataset of single samples; pass DataLoader(dataset, batch_size=8)")
        stacks.append(_stack(batch))
    samples = Samples(_merged(stacks))
    if not samples.stacks:
        raise ValueError("no calibration samples were given; batches must hold at least one sample")
    return samples


def digest(tree: Tree) -> str:
    """Hash of what a tree holds, bit for bit where that are tensors, as a hex string."""
    sha = hashlib.sha256()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            sha.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        sha.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return sha.hexdigest()


def rows(tree: Tree, where: slice | Sequence[int], size: int) -> Tree:
    """The same tree with some rows of every tensor that has ``size`` of them."""

    def part(leaf: Any) -> Any:
        if not has_rows(leaf, size):
            return leaf
        return leaf[where] if isinstance(where, slice) else leaf[moved(torch.tensor(where), leaf.device)]

    return pytree.tree_map(part, tree)


def repeated(tree: Tree, times: int, size: int) -> Tree:
    if times == 1:
        return tree
    return pytree.tree_map(lambda leaf: torch.cat([leaf] * times) if has_rows(leaf, size) else leaf, tree)


def room_for(tree: Tree, num_rows: int, size: int, old: Tree | None = None, spill: Spill | None = None) -> Tree:
    """A tree like one of ``num_rows`` rows with room for ``size``: that of ``old`` where it has this form."""
    leaves, spec = pytree.tree_flatten(tree)
    shapes = [(size, *leaf.shape[1:]) if has_rows(leaf, num_rows) else None for leaf in leaves]
    used, same = pytree.tree_flatten(old)
    if spec == same and all(
        isinstance(b, Tensor | FileRows)
        and (b.shape, b.dtype, b.device) == (shape, a.dtype, a.device)
        and memory_order(a) == memory_order(b)
        for a, b, shape in zip(leaves, used, shapes, strict=True)
    ):
        return old
    made = [leaf if shape is None else _room(leaf, size, spill) for leaf, shape in zip(leaves, shapes, strict=True)]
    return pytree.tree_unflatten(made, spec)


def _room(leaf: Tensor, size: int, spill: Spill | None) -> Tensor | FileRows:
    return empty_rows(leaf, size) if spill is None else spill.room(leaf, size)


def write_rows(into: Tree, tree: Tree, chunk: Chunk, size: int, spill: Spill | None = None) -> Tree:
    """The tree of all ``size`` samples with a chunk's rows in their places; a row that all share is stored once."""
    wholes, spec = pytree.tree_flatten(into)
    parts = pytree.tree_leaves(tree)
    return pytree.tree_unflatten([_write(*pair, chunk, size, spill) for pair in zip(wholes, parts, strict=True)], spec)


def _write(whole: Any, part: Any, chunk: Chunk, size: int, spill: Spill | None) -> Any:
    if not (has_rows(part, chunk.size) or has_rows(part, 1)) or not (has_rows(whole, size) or has_rows(whole, 1)):
        return whole
    if len(whole) != size:
        if torch.equal(whole, part):
            return whole
        one, whole = whole, _room(whole, size, spill)
        for row in range(size):
            whole[row : row + 1] = one
    whole[chunk.rows] = part
    return whole


def copied(tree: Tree) -> Tree:
    return pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, tree)


def copied_rows(tree: Tree, size: int, spill: Spill | None) -> Tree:
    """The same tree with its rows copied, some or all of them into a file."""

    def copy(leaf: Any) -> Any:
        if spill is None or not has_rows(leaf, size):
            return leaf.clone() if torch.is_tensor(leaf) else leaf
        room = _room(leaf[:1], size, spill)
        copy_rows_(room, leaf)
        return room

    return pytree.tree_map(copy, tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    """The same tree on ``device``, out of files; the host does not wait for copies to a GPU."""
    is_async = device.type == "cuda"

    def move(leaf: Any) -> Any:
        leaf = leaf[:] if isinstance(leaf, FileRows) else leaf
        return leaf.to(device, non_blocking=is_async) if torch.is_tensor(leaf) else leaf

    return pytree.tree_map(move, tree)


def in_words(tree: Tree) -> str:
    """Names, dtypes and shapes of the tensors of a batch."""
    named = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_leaves_with_path(tree) if torch.is_tensor(leaf)]
    said = [f"{name} {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}".strip() for name, leaf in named]
    return ", ".join(said)


def has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor | FileRows) and leaf.ndim > 0 and leaf.shape[0] == size


def named_parts(batch: Tree) -> dict[str, Any]:
    """Inputs by name, and the labels, of a dict or a pair; None without labels."""
    inputs, labels = batch if isinstance(batch, tuple) else (batch, None)
    return {"labels": labels, **(inputs if isinstance(inputs, Mapping) else {"input_ids": inputs})}


def mask_of(tree: Tree) -> Tensor | None:
    mask = named_parts(tree).get("attention_mask")
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def num_tokens(tree: Tree) -> int:
    """Tokens per sample where every token counts, so that samples can be shortened; 0 for all other batches."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim != 1]
    if any(leaf.ndim != 2 or leaf.is_floating_point() or (leaf == IGNORED).any() for leaf in leaves):
        return 0
    lengths, mask = {leaf.shape[1] for leaf in leaves}, mask_of(tree)
    return lengths.pop() if len(lengths) == 1 and (mask is None or bool(mask.all())) else 0


def shortened(tree: Tree, length: int) -> Tree:
    return pytree.tree_map(lambda leaf: leaf[:, :length] if isinstance(leaf, Tensor) and leaf.ndim == 2 else leaf, tree)


def _is_number(leaf: Any) -> bool:
    """Whether it is the label of one sample; options of a model may be bools."""
    return leaf.ndim == 0 if isinstance(leaf, Tensor) else isinstance(leaf, Number) and not isinstance(leaf, bool)


def _stack(batch: Any) -> Stack:
    tree = plain_batch(batch)
    sizes = [len(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes or sizes[0] == 0:
        raise ValueError(
            "a batch must be a tensor, a pair (input, target) or a dict of tensors with one sample per row, got "
            f"{type(batch).__name__} {'without rows' if sizes else 'without a tensor; convert lists to tensors'}"
        )
    if isinstance(tree, tuple) and _are_tokens_and_mask(*tree):
        problem = "a pair is (input, target), but this target looks like an attention mask: 0 or 1 for every token"
        raise ValueError(f"{problem}; give a dict: {{'input_ids': ids, 'attention_mask': mask}}, or one with 'labels'")
    inputs = tree[0] if isinstance(tree, tuple) else tree
    for name, leaf in inputs.items() if isinstance(inputs, Mapping) else ():
        is_packed = isinstance(name, str) and (name.startswith("pixel_values") or name.endswith("grid_thw"))
        if is_packed and isinstance(leaf, Tensor) and sizes[0] > 1 and not has_rows(leaf, sizes[0]):
            problem = f"a batch has {sizes[0]} samples, but {name} has {len(leaf)} rows"
            raise ValueError(f"{problem}, which cannot be assigned to samples; give batches of one sample each")
    return Stack(tree, sizes[0])


def _are_tokens_and_mask(ids: Any, mask: Any) -> bool:
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.ndim == 2 and ids.shape == mask.shape):
        return False
    is_binary = bool(((mask == 0) | (mask == 1)).all())
    return is_binary and ids.dtype in (torch.int32, torch.int64) and bool((ids > 1).any())


def plain_batch(batch: Any) -> Tree:
    """A tensor, a dict or a pair of these, whatever classes the loader uses."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if value is not None}
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise ValueError(f"a batch of several parts must be a pair (input, target), got {len(batch)} parts")
        return plain_batch(batch[0]) if len(batch) == 1 else tuple(plain_batch(part) for part in batch)
    return batch


def _merged(stacks: list[Stack]) -> list[Stack]:
    """Neighbours whose tensors differ only in the number of rows become one stack."""
    merged = []
    for _, run in groupby(stacks, lambda stack: _form(stack) or id(stack)):
        first, *others = run
        trees = [stack.tree for stack in others]
        tree = pytree.tree_map(lambda *leaves: torch.cat(leaves), first.tree, *trees) if others else first.tree
        merged.append(Stack(tree, first.size + sum(stack.size for stack in others)))
    return merged


def _form(stack: Stack) -> tuple[Any, ...] | None:
    """What two stacks must share to be merged; None where a leaf has no rows and so belongs to its own batch."""
    leaves, spec = pytree.tree_flatten(stack.tree)
    if not all(has_rows(leaf, stack.size) for leaf in leaves):
        return None
    return spec, *((leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves)
