"""Models larger than memory: one block at a time is read from where it is stored, and passes go block by block.

All batches pass one block before the next block runs, so that each block is read once, not once for every batch.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..eligible import eligible
from ..ops.machine import give_back
from .blocks import SAME, Stream, blocks_of, is_near, is_stubbed
from .forward import first_tensor
from .resources import FAILURES, is_out_of_memory
from .samples import Chunk, Samples, Stack
from .spill import Spill

Read = Callable[[str], Tensor]  # the values of a parameter, by name
View = Callable[[Tensor], Tensor]
RECLAIMED = 1 << 27  # bytes of read values after which free memory goes back to the system
_OFFLOADS: "WeakKeyDictionary[nn.Module, DiskOffload]" = WeakKeyDictionary()


class DiskOffload:
    """The parameters of a model's blocks, which are read when their block runs and dropped when another one does.

    In between one NaN stands for all elements of a parameter, so that nothing computes with it unseen. Parameters
    outside the blocks, or of several, stay. Who changes a block stores it, and says by ``stored`` what reads it.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], read: Read) -> None:
        self.blocks, self.read = list(blocks), read  # without the model, which would live as long as this
        self.stored: dict[str, Read] = {}  # of parameters that were changed
        self._views: dict[str, list[View]] = {}  # what else becomes of values when they are read
        self.num_reads = 0  # of a block
        self._num_bytes = 0  # that were read since memory was given back
        names = {parameter: name for name, parameter in model.named_parameters()}
        layers = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
        homes = Counter(parameter for block in self.blocks for parameter in block.parameters())
        alone = {parameter for parameter in names if layers[parameter] == homes[parameter] == 1}
        self._names = {
            block: {parameter: names[parameter] for parameter in block.parameters() if parameter in alone}
            for block in self.blocks
        }
        self._homes = {name: block for block, own in self._names.items() for name in own.values()}
        self._here: list[nn.Module] = []  # blocks that are in memory
        self._held: list[nn.Module] = []  # those of them that stay
        self._other: Read | None = None  # in place of the values that parameters have now
        self._is_open = False
        for block in self.blocks:
            self._drop(block)
        _OFFLOADS[model] = self

    @property
    def names(self) -> Collection[str]:
        return self._homes.keys()

    @property
    def parameters(self) -> set[Tensor]:
        return {parameter for own in self._names.values() for parameter in own}

    def num_bytes(self, block: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._names[block])

    @contextmanager
    def open(self) -> Iterator[None]:
        """While this is open, the model runs: a block is read before its forward, or that of a layer in it."""
        if self._is_open:
            yield
            return
        handles = [
            module.register_forward_pre_hook(partial(self._run, block))
            for block in self.blocks
            for module in block.modules()
            if module is block or not self._names[block].keys().isdisjoint(module._parameters.values())
        ]
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            for handle in handles:
                handle.remove()
            self.clear()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The same for a call that changes the model: after an exception parameters have the values of before."""
        stored = dict(self.stored)
        try:
            with self.open():
                yield
        except BaseException:
            self.stored = stored
            raise

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """The blocks of these parameters in memory until this is closed, with all that is changed in them."""
        blocks = list(dict.fromkeys(self._homes[name] for name in names if name in self._homes))
        self._held += blocks
        try:
            for block in blocks:
                self._enter(block)
            yield
        finally:
            for block in blocks:
                self._held.remove(block)

    @contextmanager
    def reading(self, read: Read) -> Iterator[None]:
        """While this is open, blocks have other values."""
        self.clear()
        before, self._other = self._other, read
        try:
            yield
        finally:
            self._other = before
            self.clear()

    def now(self) -> Read:
        """What reads the values that parameters have now, however they are changed later."""
        stored, read = dict(self.stored), self.read
        return lambda name: stored.get(name, read)(name)

    def clear(self) -> None:
        """Drop every block that is not held."""
        for block in [block for block in self._here if block not in self._held]:
            self._drop(block)

    def value(self, name: str) -> Tensor:
        """What a parameter holds now; OSError, which no pass takes for a failure of the model, if it cannot be read."""
        try:
            value = (self._other or self.stored.get(name) or self.read)(name)
        except ValueError as error:
            raise OSError(str(error)) from error
        for view in self._views.get(name, ()):
            value = view(value)
        self._num_bytes += value.nbytes
        if self._num_bytes > RECLAIMED:  # a tensor seldom fits into the hole that one of its size left in the heap
            self._num_bytes = 0
            give_back()
        return value

    def put_view(self, name: str, view: View, parameter: nn.Parameter | None = None) -> None:
        """Read a parameter through a function from now on; another one takes its place where its shape changes."""
        self._views.setdefault(name, []).append(view)
        self._take(name, parameter)

    def drop_view(self, name: str, parameter: nn.Parameter | None = None) -> None:
        self._views[name].pop()
        self._take(name, parameter)

    def _take(self, name: str, parameter: nn.Parameter | None) -> None:
        block = self._homes[name]
        self.clear()
        if parameter is not None:
            own = self._names[block]
            self._names[block] = {parameter if own[one] == name else one: own[one] for one in own}

    def _run(self, block: nn.Module, *_: Any) -> None:
        if not is_stubbed(block):
            self._enter(block)

    def _enter(self, block: nn.Module) -> None:
        if block in self._here:
            return
        self.clear()  # before the next one takes memory
        self._here.append(block)
        self.num_reads += 1
        for parameter, name in self._names[block].items():
            value = self.value(name)
            if value.shape != parameter.shape or value.dtype != parameter.dtype:
                there, here = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (value, parameter))
                raise OSError(f"{name} is {there} on disk, but {here} in the model; has its folder changed?")
            parameter.data = value

    def _drop(self, block: nn.Module) -> None:
        for parameter in self._names[block]:
            parameter.data = nothing_like(parameter)
        if block in self._here:
            self._here.remove(block)


def disk_offload_of(model: nn.Module) -> DiskOffload | None:
    """That of a model whose blocks are read from disk."""
    return _OFFLOADS.get(model)


def opened(model: nn.Module) -> AbstractContextManager[None]:
    """While this is open, the model runs, wherever its weights are."""
    offload = disk_offload_of(model)
    return nullcontext() if offload is None else offload.open()


def nothing_like(parameter: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """One element that stands for all, of a tensor of this shape, or of another one."""
    value = math.nan if parameter.is_floating_point() else 0
    shape = parameter.shape if shape is None else shape
    return torch.full((), value, dtype=parameter.dtype, device="cpu").expand(shape)


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
