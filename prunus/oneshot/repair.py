"""Pruning with repair: block after block, the weights that stay are solved for, and take over from those that go.

Two streams of activations go through the model: that of the dense model and that of the model as pruned so far. Each
group of layers that read the same input is solved when the groups before it have been replaced.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..input_statistics import one_by_one
from ..ops import bits
from .blocks import Reached, Stream
from .experts import ExpertInputs, is_stacked, routed, shares
from .gram import Gram, Moments
from .layers import as_matrix, from_matrix, holders, input_rows, num_groups
from .order import InputGroup, can_batch, input_groups
from .resources import Clock
from .samples import Chunk, mask_of
from .solver import Choose, Repair, Solution, keep_all_but, refine, solve
from .state import RepairState
from .tune import BlockTuner, Tuned
from .walk import Originals, Walk, outputs

TOKENS = {"cpu": 1024, "cuda": 16384}  # of a pass
TUNED_TOGETHER = 4  # samples of a step of tuning
FEW = 0.25  # tokens an input below which an expert is not repaired


@dataclass(frozen=True)
class LayerRepair:
    """What was done to one weight; errors are ``|W' X - W X_d|^2 / |W X_d|^2``, None where they are not known."""

    mask_error: float | None = None  # of the first mask with dense weights
    error: float | None = None
    iterations: int = 0
    damping: float | None = None
    not_repaired: str | None = None  # the reason


Calls = list[tuple[nn.Module, Tensor]]  # layers and what they are called with
Done = Callable[[Sequence[str]], None]  # called with the weights of a group that is finished


class RepairWalk:
    """Prunes and repairs a model in place, group after group.

    ``masks`` are packed masks to repair; without them ``choose`` finds the weights that stay, all but ``num_drop`` of
    each weight where only that number matters. ``live`` are packed
    masks of weights that may stay, by default all that are not zero.
    """

    def __init__(
        self,
        walk: Walk,
        repair: Repair,
        choose: Choose,
        originals: Originals,
        *,
        num_drop: Mapping[str, int] | None = None,
        masks: Mapping[str, Tensor] | None = None,
        live: Mapping[str, Tensor] | None = None,
        size: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.walk, self.repair, self.choose, self.originals = walk, repair, choose, originals
        self.num_drop, self.masks, self.live = num_drop or {}, masks, live or {}
        self.clock = clock or Clock(walk.device)
        self.weights = {weight.name: weight for weight in walk.weights}
        self.size = size or _size(walk)
        self.forwards = 0  # forward passes of one sample
        self.found: dict[str, LayerRepair] = {}
        self.packed: dict[str, Tensor] = {}
        self.tuned: dict[int, Tuned] = {}  # by block
        self._dense: dict[str, Tensor] = {}  # dense values of weights that passes from here on still read
        self._position = 0
        self._is_same = True  # nothing has changed yet, so that the pruned stream is the dense one too

    @torch.no_grad()
    def run(self, done: Done, state: RepairState | None = None) -> None:
        """Go through all weights, but those that ``state`` knows."""
        self._modules = holders(self.walk.model, self.walk.weights)
        with self.clock.part("forwards"):
            stacked = {name: [weight.module] for name, weight in self.weights.items() if is_stacked(weight)}
            plain = {name: modules for name, modules in self._modules.items() if modules}
            groups, blocks = input_groups(self.walk, plain | stacked)
            if not can_batch(self.walk):
                self.size = 1
        device = self.walk.device if self.walk.offload is not None else None
        self._streams = {kind: Stream(blocks, self.walk.samples, device) for kind in ("dense", "pruned")}
        self._blocks = blocks
        self._state = state
        for number, group in enumerate(groups):
            self._advance(group.start, groups)
            path = f"group_{number:05}"
            before = state.load(path) if state else None
            if before is not None:
                self._resume(before)
            else:
                self._repair_experts(group) if group.names[0] in stacked else self._repair_group(group)
                if state:
                    state.save(path, {name: self._content(name) for name in group.names if name in self.found})
            done(group.names)
        if self.repair.tune:
            self._advance(len(blocks), groups)
        for name in self.weights:
            if name not in self.found:
                is_plain = bool(self._modules[name])
                reason = "no sample reached it" if is_plain else "it is no plain linear layer or convolution"
                self._prune_by_magnitude(name, reason)
                done([name])

    def _content(self, name: str) -> dict[str, Any]:
        weight = self.weights[name].parameter.detach()
        return {"weight": weight.cpu(), "mask": self.packed[name].cpu(), "repair": asdict(self.found[name])}

    def _resume(self, content: Mapping[str, Any]) -> None:
        for name, saved in content.items():
            self._replace(name, saved["weight"])
            self.packed[name] = saved["mask"].to(self.weights[name].parameter.device)
            self.found[name] = LayerRepair(**saved["repair"])

    def _advance(self, position: int, groups: Sequence[InputGroup]) -> None:
        """Take both streams to ``position``."""
        while self._position < position:
            for kind in ("pruned",) if self._is_same or self.repair.targets == "own" else ("dense", "pruned"):
                if kind == "pruned" and self.repair.tune and not self._is_same:
                    self._tune()
                with self.clock.part("forwards"), self._running(kind):
                    visit = partial(self.walk.visit, self.size)
                    self._streams[kind].advance(self._position, self._forward, visit)
                self.forwards += len(self.walk.samples)
            self._position += 1
            later = {name for group in groups if group.stop >= self._position for name in group.names}
            self._dense = {name: value for name, value in self._dense.items() if name in later}

    def _tune(self) -> None:
        """Tune the block at this position; the dense stream has gone ahead to what it should give."""
        tuner = BlockTuner(self.walk, self._position, self._streams["pruned"], self._streams["dense"])
        saved = {id(self.weights[name].parameter) for name in self.found}
        for parameter in tuner.parameters:
            if id(parameter) not in saved:
                self.originals.save_all(parameter)
        path = f"block_{self._position:05}"
        before = self._state.load(path) if self._state else None
        with self.clock.part("tune"):
            if before is not None:
                for parameter, value in zip(tuner.parameters, before["parameters"], strict=True):
                    parameter.detach().copy_(value)
                self.tuned[self._position] = Tuned(*before["tuned"])
                return
            found = tuner.run(min(self.size, TUNED_TOGETHER))
        self.tuned[self._position] = found
        if self._state:
            values = [parameter.detach().cpu() for parameter in tuner.parameters]
            self._state.save(path, {"parameters": values, "tuned": [found.before, found.after]})

    def _forward(self, chunk: Chunk) -> None:
        outputs(self.walk.model, self.walk.batch(chunk))

    @contextmanager
    def _running(self, kind: str) -> Iterator[None]:
        """The model as it is, or with its dense weights from the current position on."""
        dense = self._dense if kind == "dense" else {}
        own = {name: self.weights[name].parameter.data for name in dense}
        try:
            for name, value in dense.items():
                self.weights[name].parameter.data = value
            yield
        finally:
            for name, value in own.items():
                self.weights[name].parameter.data = value

    def _repair_group(self, group: InputGroup) -> None:
        grams = self._grams(group)
        if not grams:
            return
        moments = [gram.moments() for gram in grams]
        if group.is_routed and moments[0].num_tokens < FEW * len(moments[0].gram):
            few = f"it has {len(moments[0].gram)} inputs, but only {moments[0].num_tokens} tokens reached it"
            self._write(self._solved(group, moments, replace(self.repair, iterations=0, refine=0)), few)
        else:
            self._write(self._solved(group, moments, self.repair))

    def _grams(self, group: InputGroup) -> list[Gram]:
        """Gram matrices of the inputs, one for each group of a convolution."""
        has_dense = self.repair.targets == "dense" and not (self._is_same or group.is_routed)
        grams = [Gram() for _ in range(num_groups(self._modules[group.names[0]][0]))]
        seen = 0

        def collect(chunk: Chunk) -> tuple[Calls | None, Calls]:
            with self.clock.part("forwards"):
                dense = self._inputs("dense", group, chunk) if has_dense else None
                return dense, self._inputs("pruned", group, chunk)

        def add(chunk: Chunk, found: tuple[Calls | None, Calls]) -> None:
            nonlocal seen
            dense, pruned = found
            mask = mask_of(self.walk.batch(chunk))
            with self.clock.part("grams"):
                for call, (module, x) in enumerate(pruned):
                    self._check_finite(group, x, mask, seen)
                    others = input_rows(module, dense[call][1]) if dense else [None] * len(grams)
                    for gram, x_rows, dense_rows in zip(grams, input_rows(module, x), others, strict=True):
                        gram.add(x_rows, dense_rows, _valid(x_rows, mask))
            seen += chunk.size

        self.walk.visit(self.size, collect, add)
        return [gram for gram in grams if gram.num_tokens]

    def _inputs(self, kind: str, group: InputGroup, chunk: Chunk) -> Calls:
        """Inputs of a group's layers in one pass; the pass ends with the last of them."""
        found: Calls = []

        def store(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter(args or kwargs.values())).detach()
            found.append((module, x if group.num_calls == 1 else x.clone()))
            if len(found) == group.num_calls:
                raise Reached

        def stop(*_: object) -> None:
            raise Reached

        handles = [
            module.register_forward_pre_hook(store, with_kwargs=True) for module in self._modules[group.names[0]]
        ]
        if group.stop < len(self._blocks):  # a layer that this sample does not reach is in this block
            handles.append(self._blocks[group.stop].register_forward_hook(stop))
        try:
            with self._running(kind), self._streams[kind].starting_at(self._position, chunk):
                self._forward(chunk)
        except Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        self.forwards += chunk.size
        return found

    def _repair_experts(self, group: InputGroup) -> None:
        """Repair a weight (expert, out, in): each expert by the tokens that the pruned model sends to it."""
        (name,), weight = group.names, self.weights[group.names[0]]
        grams: dict[int, Gram] = {}

        def collect(chunk: Chunk) -> tuple[Sequence[tuple[int, Tensor | None]], Sequence[tuple[int, Tensor]]]:
            calls: list[tuple[Any, ...]] = []
            mask = mask_of(self.walk.batch(chunk))
            with self.clock.part("forwards"):
                pruned = self._expert_inputs("pruned", group, chunk, calls, mask)
                if self.repair.targets == "own" or self._is_same:
                    return [(0, None)] * len(pruned), pruned
                return self._expert_inputs("dense", group, chunk, calls, mask), pruned

        def add(chunk: Chunk, found: tuple[Sequence[tuple[int, Tensor | None]], Sequence[tuple[int, Tensor]]]) -> None:
            with self.clock.part("grams"):
                for (_, x_dense), (expert, x) in zip(*found, strict=True):
                    self._check_finite(group, x, None, chunk.start)
                    grams.setdefault(expert, Gram()).add(x, x_dense, (x != 0).any(-1))

        self.walk.visit(self.size, collect, add)
        if not grams:
            return  # pruned by its size at the end
        solutions, few, values = [], 0, weight.parameter.detach().to(self.walk.device)
        masks = None if self.masks is None else bits.unpack(self.masks[name], values.shape).to(values.device)
        live = bits.unpack(self.live[name], values.shape).to(values.device) if name in self.live else values != 0
        for expert, num_drop in enumerate(shares(self.num_drop.get(name, 0), len(values))):
            choose = keep_all_but({name: num_drop}) if name in self.num_drop else self.choose
            gram = grams.get(expert)
            num_tokens = gram.num_tokens if gram else 0
            moments = gram.moments() if gram and num_tokens else _no_moments(values)
            is_few = num_tokens < FEW * values.shape[2]
            few += is_few
            repair = replace(self.repair, iterations=0, refine=0, damping=1.0) if is_few else self.repair
            here = {name: values[expert]}
            if masks is None:
                found = solve(here, moments, choose, repair, {name: live[expert]}, self.clock)
            else:
                found = refine(here, {name: masks[expert]}, moments, repair, self.clock)
            solutions.append(found[name])
        reason = f"{few} of {len(values)} experts got too few tokens to be repaired" if few else None
        self._write({name: solutions}, reason)

    def _expert_inputs(
        self, kind: str, group: InputGroup, chunk: Chunk, calls: list[tuple[Any, ...]], mask: Tensor | None
    ) -> list[tuple[int, Tensor]]:
        """What each expert reads in one pass; the dense stream's tokens go where the pruned stream's went."""
        weight = self.weights[group.names[0]]
        seen = ExpertInputs(weight.parameter)

        def stop(*_: object) -> None:
            raise Reached

        at = self._blocks[group.stop] if group.stop < len(self._blocks) else weight.module
        handle = at.register_forward_hook(stop) if group.num_calls == 1 else None
        try:
            with (
                self._running(kind),
                self._streams[kind].starting_at(self._position, chunk),
                one_by_one(weight.module),
                routed(weight.module, calls, kind == "dense", mask),
                seen,
            ):
                self._forward(chunk)
        except Reached:
            pass
        finally:
            if handle is not None:
                handle.remove()
        self.forwards += chunk.size
        return seen.found

    def _check_finite(self, group: InputGroup, x: Tensor, mask: Tensor | None, seen: int) -> None:
        if bool(x.isfinite().all()):
            return
        valid = _valid(x, mask)
        for number, sample in enumerate(x):
            if not bool((sample if valid is None or x.ndim < 3 else sample[valid[number]]).isfinite().all()):
                raise ValueError(
                    f"the inputs of {', '.join(group.names)} are not finite: look at sample {seen + number}"
                )

    def _solved(self, group: InputGroup, moments: Sequence[Moments], repair: Repair) -> dict[str, list[Solution]]:
        """The solution of every weight, for each group of a convolution."""
        weights = {name: self._matrix(name, self.weights[name].parameter.detach()) for name in group.names}
        live = {name: self._mask(name, self.live) for name in group.names if name in self.live}
        if self.masks is None and len(moments) == 1:
            found = solve(weights, moments[0], self.choose, repair, live, self.clock)
            return {name: [solution] for name, solution in found.items()}
        if self.masks is not None:
            masks = {name: self._mask(name, self.masks) for name in group.names}
        else:  # which weights of a grouped convolution stay is WANDA's choice over all of it
            norms = torch.stack([part.gram.diagonal().sqrt() for part in moments])
            scores = {name: w.abs() * norms.repeat_interleave(len(w) // len(norms), 0) for name, w in weights.items()}
            masks = self.choose(scores, live or {name: w != 0 for name, w in weights.items()})
        parts: dict[str, list[Solution]] = {name: [] for name in weights}
        for i, part in enumerate(moments):
            here = {name: weight.chunk(len(moments))[i] for name, weight in weights.items()}
            those = {name: masks[name].chunk(len(moments))[i] for name in weights}
            for name, solution in refine(here, those, part, repair, self.clock).items():
                parts[name].append(solution)
        return parts

    def _matrix(self, name: str, tensor: Tensor) -> Tensor:
        return as_matrix(self.weights[name].module, tensor).to(self.walk.device)

    def _mask(self, name: str, packed: Mapping[str, Tensor]) -> Tensor:
        return self._matrix(name, bits.unpack(packed[name], self.weights[name].parameter.shape))

    def _write(self, found: Mapping[str, Sequence[Solution]], reason: str | None = None) -> None:
        for name, parts in found.items():
            weight = self.weights[name]
            value, mask = (
                from_matrix(weight.module, torch.cat(each), weight.parameter.shape)
                for each in ([part.weight for part in parts], [part.mask for part in parts])
            )
            energy = sum(part.energy for part in parts) or 1.0
            self._replace(name, value)
            self.packed[name] = bits.pack(mask.to(weight.parameter.device))
            self.found[name] = LayerRepair(
                mask_error=sum(part.mask_error * part.energy for part in parts) / energy,
                error=sum(part.error * part.energy for part in parts) / energy,
                iterations=parts[0].iterations,
                damping=max(part.damping for part in parts),
                not_repaired=reason,
            )

    def _prune_by_magnitude(self, name: str, reason: str) -> None:
        weight = self.weights[name]
        value = weight.parameter.detach()
        if self.masks is not None:
            mask = bits.unpack(self.masks[name], value.shape)
        else:
            live = bits.unpack(self.live[name], value.shape) if name in self.live else value != 0
            outputs = weight.outputs or ()
            first = tuple(range(len(outputs)))
            num_rows = math.prod(value.shape[dim] for dim in outputs)

            def rows(tensor: Tensor) -> Tensor:
                return tensor.movedim(outputs, first).reshape(num_rows, -1)

            found = self.choose({name: rows(value.abs().float())}, {name: rows(live)})[name]
            mask = found.view(value.movedim(outputs, first).shape).movedim(first, outputs)
        self._replace(name, value * mask)
        self.packed[name] = bits.pack(mask)
        self.found[name] = LayerRepair(not_repaired=reason)

    def _replace(self, name: str, value: Tensor) -> None:
        """Change a weight in place, and remember its dense values."""
        if self._is_same:
            self._is_same = False
            self._streams["dense"].copy_from(self._streams["pruned"], self._position)
        parameter = self.weights[name].parameter
        saved = self.originals.save_all(parameter)
        self._dense[name] = saved if saved.device == parameter.device else parameter.detach().clone()
        parameter.detach().copy_(value)


@torch.no_grad()
def renew_batch_norms(walk: Walk, size: int, originals: Originals) -> None:
    """Running statistics of batch norms become means over the samples, as the model is now."""
    norms = [
        module
        for module in walk.model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    if not norms or len(walk.samples) < 2:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        for buffer in norm.buffers():
            originals.save_all(buffer)
            walk.renewed.add(buffer)
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    try:
        walk.visit(size, lambda chunk: outputs(walk.model, walk.batch(chunk)))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()


def _size(walk: Walk) -> int:
    """Samples of a pass."""
    group = max(walk.samples.groups, key=lambda group: group.size)
    leaf = next(leaf for leaf in pytree.tree_leaves(group.tree) if isinstance(leaf, Tensor) and leaf.ndim)
    length = leaf.shape[1] if leaf.ndim == 2 and not leaf.is_floating_point() else 32
    return max(1, TOKENS.get(walk.device.type, 1024) // max(1, length))


def _no_moments(experts: Tensor) -> Moments:
    """Moments of an expert that no token reached."""
    dtype = torch.promote_types(experts.dtype, torch.float32)
    return Moments(experts.new_zeros(experts.shape[2], experts.shape[2], dtype=dtype), None, None, 0)


def _valid(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Which rows of ``x`` (..., in) are tokens that count."""
    if mask is None or bool(mask.all()):
        return None
    if x.shape[:-1] == mask.shape:
        return mask.bool()
    return mask.flatten().bool() if x.ndim == 2 and len(x) == mask.numel() else None
