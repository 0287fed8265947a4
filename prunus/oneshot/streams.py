"""The two streams through a model: activations of the dense one, and of the model as it is compressed so far.

Both travel from block to block. What a group of layers reads in either of them is summed up in Gram matrices.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..input_statistics import one_by_one
from .blocks import Reached
from .calibration import Calibration
from .experts import ExpertInputs, is_stacked, routed
from .forward import outputs, replaced, swapped
from .gram import Gram, Moments, Tokens, sum_over_ranks_
from .groups import Group, input_groups
from .layers import Inputs, Reader, readers
from .resources import free_bytes
from .samples import Chunk, Samples, mask_of
from .shared_work import agreed
from .spill import FileRows, Room, zero_rows

Kind = Literal["dense", "pruned"]
Rows = Tensor | FileRows
Read = tuple[int, Tensor, Tensor | None]  # part of a weight, its inputs (..., in), and which of them are tokens
TOKENS = {"cpu": 1024, "cuda": 16384}  # of a pass
STORED = {"cpu": 1 << 30, "cuda": 1 << 32}  # bytes of a block's inputs, and of its outputs, that may be stored
SHARE = 0.25  # of the free memory that each of them may take, and the activations between blocks
BIAS = "+bias"  # after the name of a weight: the bias of its layer


class Streams:
    """Runs the model from the block where both streams stand.

    Groups are in the order in which the model calls them; ``readers`` are the modules that multiply by each weight,
    ``stacked`` the weights of all experts that one module holds. Without ``has_dense`` there is no dense stream, and
    without ``reads_dense`` moments are of the pruned stream alone.
    """

    def __init__(self, calibration: Calibration, *, has_dense: bool = True, reads_dense: bool = True) -> None:
        self.calibration, self.clock = calibration.shared(), calibration.clock
        self.has_dense, self.reads_dense = has_dense, has_dense and reads_dense
        weights = calibration.weights
        self.stacked = {name: weight.parameter for name, weight in weights.items() if is_stacked(weight)}
        self.readers = readers(calibration.model, list(weights.values()))
        self.readers |= {name: [Reader(weights[name].module, name.rpartition(".")[2])] for name in self.stacked}
        with self.clock.part("forwards"):
            self.groups, self.blocks = input_groups(calibration, self.readers)
            size = calibration.batch_size or _size(calibration)
            self.size = size if calibration.can_batch() else 1  # samples of a pass
        self.dense, self.pruned = (self.calibration.stream(self.blocks) for _ in range(2))
        self.position = 0  # blocks that the pruned stream has left behind
        self.is_same = True  # no weight has changed yet, so that the pruned stream is the dense one too
        self._ahead = False  # the dense stream has left one block more behind
        self._values: dict[str, tuple[nn.Parameter, Tensor]] = {}  # dense ones of weights that passes still read
        self._inputs: dict[tuple[str, int], Rows] = {}  # in the dense model, by group and stack of samples
        self._outputs: dict[tuple[nn.Module, Chunk], Any] = {}  # in the pruned model, of modules that are settled
        self._solved: list[nn.Module] = []  # of this block
        self._settled: list[nn.Module] = []  # these, and modules in which nothing is left to solve
        self._room = Room(0)  # for outputs
        self._here = Chunk(0, 0, 1)  # samples of the pass

    def replace_(self, name: str, parameter: nn.Parameter, value: Tensor, dense: Tensor) -> None:
        """Change a weight or a bias; ``dense`` are the values that the dense stream goes on with."""
        if self.is_same and not self._ahead:
            self.dense.copy_from(self.pruned, self.position)
        self.is_same = False
        if self.has_dense and not self._is_read(name):
            own = dense if dense.device == parameter.device else parameter.detach().clone()
            self._values[name] = parameter, own
        parameter.detach().copy_(value)
        if any(name in group.names and self._is_simple(group) for group in self.groups):
            self._room = self._room if self._solved else self._free_room()
            # what an attention returns changes with each of its weights
            self._solved += [reader.module for reader in self.readers[name] if not reader.is_attention]
            self._settle()

    def _is_read(self, name: str) -> bool:
        """Whether the dense stream has passed all layers of a weight: it went ahead, and stored what they read."""
        if not self._ahead:
            return False
        inside, name = set(self.blocks[self.position].modules()), name.removesuffix(BIAS)
        is_here = all(reader.module in inside for reader in self.readers.get(name, ()))
        return is_here and any(name in group.names and group.stop == self.position for group in self.groups)

    def advance_dense(self) -> None:
        """Take the dense stream one block further, before the pruned one."""
        if self.has_dense and not (self.is_same or self._ahead):
            self._advance("dense")
            self._ahead = True

    def advance(self) -> None:
        """Take the pruned stream to the next block, where the dense one is."""
        self._advance("pruned")
        self.position += 1
        self._ahead = False
        self._inputs.clear()
        self.changed()
        # of a model that is moved block by block, where two streams take little of the free memory
        if self.pruned.offload and 2 * self.pruned.num_bytes <= SHARE * free_bytes(self.calibration.device):
            for stream in (self.dense, self.pruned):
                stream.keep_on(self.calibration.device)
        # a pass runs all that is outside the blocks, wherever it starts
        behind = {module for block in self.blocks[: self.position] for module in block.modules()}
        later = {name for group in self.groups if group.stop >= self.position for name in group.names}
        later |= {name for name, own in self.readers.items() if any(reader.module not in behind for reader in own)}
        self._values = {name: value for name, value in self._values.items() if name.removesuffix(BIAS) in later}

    def changed(self) -> None:
        """Forget what layers of this block returned: weights before them may have changed."""
        self._outputs.clear()
        self._solved.clear()
        self._settled.clear()

    def forget(self) -> None:
        """Free the activations: no pass follows."""
        self._inputs.clear()
        self.changed()
        for stream in (self.dense, self.pruned):
            stream.want(())

    def moments(self, group: Group) -> list[Moments | None]:
        """Second moments of what a group reads: one for each expert, group of a convolution, or query, key and value.

        None where no token arrives. The tokens of an expert are those that the pruned model sends to it.
        """
        name = group.names[0]
        num_parts = max(group.num_inputs, self.readers[name][0].num_groups)
        num_parts = len(self.stacked[name]) if name in self.stacked else num_parts
        grams = [Gram() for _ in range(num_parts)]
        has_dense = self.reads_dense and not (self.is_same or group.is_routed)
        read = self._expert_reads if name in self.stacked else self._reads
        if self.reads_dense and not self._inputs:
            self._store_inputs()

        def collect(chunk: Chunk) -> list[tuple[int, Tokens]]:
            routes: list[tuple[Any, ...]] = []
            with self.clock.part("forwards"):
                pruned = read("pruned", group, chunk, routes)
                dense = read("dense", group, chunk, routes) if has_dense and pruned else []
                if has_dense and len(dense) != len(pruned):  # the dense model sends this sample elsewhere
                    dense = pruned
            with self.clock.part("grams"):
                for _, x, valid in pruned:
                    _check_finite(group, x, valid, self.calibration.samples, chunk)
                parts = [
                    (part, Tokens([x, dense[call][1]] if dense else [x], valid))
                    for call, (part, x, valid) in enumerate(pruned)
                ]
                for _, tokens in parts[:1]:  # others are copied one by one; where even one does not fit, chunks shrink
                    tokens.flatten_()
                return parts

        def add(part_tokens: tuple[int, Tokens]) -> None:
            part, tokens = part_tokens
            with self.clock.part("grams"):
                grams[part].take(tokens)

        visit = partial(self.calibration.visit, self.size, collect, add, make_room=self.changed)
        agreed(self.calibration.ranks, visit)
        if self.calibration.ranks is not None:
            with self.clock.part("sums over ranks"):
                sum_over_ranks_(grams, self.calibration.ranks, self.calibration.device)
        moments: list[Moments | None] = []

        def finish(gram: Gram) -> None:
            moments.append(gram.moments() if gram.num_tokens else None)

        self.calibration.each_once(grams, finish, self.changed)
        return moments

    def _advance(self, kind: Kind) -> None:
        visit = partial(self.calibration.visit, self.size, make_room=self._outputs.clear)
        with self.clock.part("forwards"), self._running(kind):
            getattr(self, kind).advance(self.position, self._forward, visit)
        self.calibration.cost.forwards += len(self.calibration.samples)

    def _forward(self, chunk: Chunk) -> None:
        self._here = chunk
        outputs(self.calibration.model, self.calibration.batch(chunk))

    def _running(self, kind: Kind) -> AbstractContextManager[None]:
        """The model as it is, or with its dense weights from the current position on."""
        if kind == "dense":
            return swapped(dict(self._values.values()))
        return replaced({module: partial(self._output, module) for module in self._settled})

    def _settle(self) -> None:
        """Note solved layers, and modules of the block in which nothing else is left to solve, such as an attention."""
        block = list(self.blocks[self.position].modules()) if self.position < len(self.blocks) else []
        solved = set(self._solved)
        unsolved = {reader.module for own in self.readers.values() for reader in own} - solved
        if block and unsolved.isdisjoint(block):
            return  # a single pass is left, for which nothing has to be stored
        self._settled = []
        for module in block or solved:
            inside = set(module.modules())
            if "forward" not in vars(module) and unsolved.isdisjoint(inside) and not solved.isdisjoint(inside):
                self._settled.append(module)

    def _output(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What a settled module returns, which is the same in every pass over a chunk until the block is left."""
        stored = self._outputs.get((module, self._here))
        if stored is None:
            output = type(module).forward(module, *args, **kwargs)
            self._keep_output(module, output)
            return output
        return pytree.tree_map(_copy, stored)  # the model may change it in place

    def _keep_output(self, module: nn.Module, output: Any) -> None:
        """Store it where there is room, in place of the outputs of what is inside, for which no pass asks any more."""
        tensors = [leaf for leaf in pytree.tree_leaves(output) if leaf is not None]
        if not all(isinstance(leaf, Tensor) and leaf.ndim and leaf.numel() for leaf in tensors):
            return
        inner = [key for part in module.modules() if (key := (part, self._here)) in self._outputs]
        freed = [rows for key in inner for rows in pytree.tree_leaves(self._outputs[key]) if rows is not None]
        if self._room.has(sum(x.nbytes for x in tensors) - sum(rows.nbytes for rows in freed)):
            for rows in freed:
                self._room.give(rows)
            for key in inner:
                del self._outputs[key]
            del freed
            self._outputs[module, self._here] = pytree.tree_map_only(Tensor, self._room.copy, output)

    def _is_simple(self, group: Group) -> bool:
        """Whether its layers read one tensor, once, all in one block and with all tokens."""
        is_once = group.stop == group.start and group.num_calls == group.num_inputs == 1
        return is_once and not group.is_routed and group.names[0] not in self.stacked

    def _free_room(self) -> Room:
        """For the inputs of a block, and for its outputs: a quarter of the limit each, half is for the streams.

        What is beyond it goes to the disk, and all of it where the model is there because it may fill main memory.
        """
        device, memory, spill = self.calibration.device, self.calibration.memory, self.calibration.spill
        free = min(STORED.get(device.type, 1 << 30), SHARE * free_bytes(device))
        if device.type != "cpu" or spill is None:
            return Room(free)
        return Room(0 if memory is None else min(free, memory / 4), spill)

    def _run(self, kind: Kind, chunk: Chunk, last: nn.Module | None) -> None:
        """A pass from the current position that ends with the module ``last``, if it does not end before."""

        def stop(*_: object) -> None:
            raise Reached

        ends = nullcontext() if last is None else last.register_forward_hook(stop)
        with ends, self._running(kind), getattr(self, kind).starting_at(self.position, chunk), suppress(Reached):
            self._forward(chunk)
        self.calibration.cost.forwards += chunk.size

    def _last_block(self, group: Group) -> nn.Module | None:
        """The block in which a group is called for the last time."""
        return self.blocks[group.stop] if group.stop < len(self.blocks) else None

    def _reads(self, kind: Kind, group: Group, chunk: Chunk, _: object) -> list[Read]:
        """What a group of layers reads; the pass ends with the last of its calls."""
        calls: list[tuple[Reader, Inputs]] = []
        readers = self.readers[group.names[0]]

        def store(reader: Reader, inputs: Inputs) -> None:
            inputs = tuple(x.transpose(0, group.sample_dim) for x in inputs)
            calls.append((reader, inputs if group.num_calls == 1 else tuple(x.clone() for x in inputs)))
            if len(calls) == group.num_calls:
                raise Reached

        stored = self._inputs.get((group.names[0], chunk.stack))
        if stored is not None and (kind == "dense" or self.is_same):
            calls = [(readers[0], (stored[chunk.rows],))]
        else:
            with ExitStack() as stack:
                for reader in readers:
                    stack.enter_context(reader.seen_by(store))
                self._run(kind, chunk, self._last_block(group))
        mask, reads = mask_of(self.calibration.batch(chunk)), []
        for reader, inputs in calls:
            parts = inputs * (group.num_inputs // len(inputs))  # a call may give query, key and value as one tensor
            rows = [x for given in parts for x in reader.rows(given)]
            reads += [(part, x, _valid(x, mask)) for part, x in enumerate(rows)]
        return reads

    def _expert_reads(self, kind: Kind, group: Group, chunk: Chunk, routes: list[tuple[Any, ...]]) -> list[Read]:
        """What each of some stacked experts reads; the dense stream's tokens go where the pruned stream's went."""
        (name,) = group.names
        module, mask = self.readers[name][0].module, mask_of(self.calibration.batch(chunk))
        seen = ExpertInputs(self.stacked[name], mask)
        last = self._last_block(group) or (module if group.num_calls == 1 else None)
        with one_by_one(module), routed(module, routes, kind == "dense", mask), seen:
            self._run(kind, chunk, last)
        return [(expert, x, (x != 0).any(-1)) for expert, x in seen.found]

    def _store_inputs(self) -> None:
        """Run the dense block once and store what all its groups read, where that is possible and memory allows it."""
        groups = [group for group in self.groups if group.start == self.position]
        if self._ahead or not all(map(self._is_simple, groups)):
            return
        if self.is_same:
            self.dense.copy_from(self.pruned, self.position)
        sizes = [stack.size for stack in self.calibration.samples.stacks]
        is_trial, seen = True, dict[tuple[str, int], Tensor]()  # one sample tells how much memory all would take
        room = Room(0)

        def store(group: Group, _: Reader, inputs: Inputs) -> None:
            x, key = inputs[0].transpose(0, group.sample_dim), (group.names[0], self._here.stack)
            if is_trial:
                seen[key] = x
                return
            if key not in self._inputs:  # zero where the dense model does not call the layer
                self._inputs[key] = zero_rows(room.take(x, sizes[self._here.stack]))
            self._inputs[key][self._here.rows] = x

        last = self.blocks[self.position] if self.position < len(self.blocks) else None
        with ExitStack() as stack, self.clock.part("forwards"):
            for group in groups:
                for reader in self.readers[group.names[0]]:
                    stack.enter_context(reader.seen_by(partial(store, group)))
            self._run("dense", Chunk(0, 0, 1), last)
            is_trial = False
            num_bytes = sum(x.nbytes for x in seen.values()) * len(self.calibration.samples)
            has_rows = len(seen) == len(groups) and all(x.shape[:1] == (1,) for x in seen.values())
            room = self._free_room()
            if not has_rows or not room.has(num_bytes):
                return
            self._inputs = {key: zero_rows(room.take(x, sizes[0])) for key, x in seen.items()}
            if last is None:
                self.calibration.visit(self.size, lambda chunk: self._run("dense", chunk, None))
            else:
                self._advance("dense")
                self._ahead = True


def _size(calibration: Calibration) -> int:
    stack = max(calibration.samples.stacks, key=lambda stack: stack.size)
    leaf = next(leaf for leaf in pytree.tree_leaves(stack.tree) if isinstance(leaf, Tensor) and leaf.ndim)
    length = leaf.shape[1] if leaf.ndim == 2 and not leaf.is_floating_point() else 32
    return max(1, TOKENS.get(calibration.device.type, 1024) // max(1, length))


def _copy(stored: Any) -> Any:
    return stored[:] if isinstance(stored, FileRows) else stored.clone() if isinstance(stored, Tensor) else stored


def _valid(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Which rows of ``x`` (..., in) are tokens that count."""
    if mask is None or bool(mask.all()):
        return None
    if x.shape[:-1] == mask.shape:
        return mask.bool()
    return mask.flatten().bool() if x.ndim == 2 and len(x) == mask.numel() else None


def _check_finite(group: Group, x: Tensor, valid: Tensor | None, samples: Samples, chunk: Chunk) -> None:
    """``x`` are inputs of the samples of a chunk."""
    if bool(x.sum().isfinite()) or bool(x.isfinite().all()):  # a sum is finite only if all are, and quick
        return
    is_bad = ~x.isfinite().all(-1)
    is_bad = is_bad if valid is None else is_bad & valid
    if not bool(is_bad.any()):
        return
    num = chunk.size
    where = f"samples {samples.number(chunk)} to {samples.number(chunk, num - 1)}"
    if len(x) == num or num == 1:
        where = f"sample {samples.number(chunk, int(is_bad.reshape(num, -1).any(1).nonzero()[0]))}"
    raise ValueError(f"the inputs of {', '.join(group.names)} are not finite; check {where}")
