"""Tuning of a pruned block: its kept weights, biases and norms learn to give the outputs of the dense block.

The pruned block reads the pruned stream; its outputs should be those of the dense block on the dense stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import Reached, Stream
from .resources import is_out_of_memory, release
from .samples import Chunk, Tree, mask_of
from .walk import Walk, outputs

EPOCHS, RATE = 8, 1e-4
HELD_OUT = 10  # one sample of so many decides whether tuning helped


@dataclass(frozen=True)
class Tuned:
    """Mean square error of a block's outputs on held-out samples; tuning was undone unless it fell."""

    before: float
    after: float

    @property
    def helped(self) -> bool:
        return self.after < self.before


class BlockTuner:
    """Tunes block ``k``: inputs are the pruned stream's, targets the dense stream's one position on."""

    def __init__(self, walk: Walk, k: int, pruned: Stream, dense: Stream) -> None:
        self.walk, self.k, self.pruned, self.dense = walk, k, pruned, dense
        self.block = pruned.blocks[k]
        elsewhere = {p for m in walk.model.modules() if m not in {*self.block.modules()} for p in m.parameters(False)}
        own = dict.fromkeys(p for p in self.block.parameters() if p.is_floating_point() and p not in elsewhere)
        self.parameters: list[nn.Parameter] = list(own)

    def run(self, size: int) -> Tuned:
        """Tune over batches of ``size`` samples, fewer where memory runs out."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        while True:
            try:
                return self._run(size, before)
            except BaseException as error:
                self._write(before)
                if not is_out_of_memory(error) or size == 1:
                    raise
            size = max(1, size // 2)
            release(self.walk.device)

    def _run(self, size: int, before: Sequence[Tensor]) -> Tuned:
        chunks = list(self.walk.samples.chunks(1))
        held = chunks[HELD_OUT - 1 :: HELD_OUT] or chunks[-1:]
        training = [chunk for chunk in chunks if chunk not in held] or chunks
        first = self._error(held)
        masters = [value.to(torch.promote_types(value.dtype, torch.float32), copy=True) for value in before]
        self._learn(_batches(training, size, self.k), masters)
        found = Tuned(first, self._error(held))
        if not found.helped:
            self._write(before)
        return found

    def _learn(self, batches: Sequence[Sequence[Chunk]], masters: Sequence[Tensor]) -> None:
        """Adam with a rate that falls to zero; what is zero stays zero."""
        optimizer = torch.optim.Adam(masters, RATE)
        kept = [value != 0 if value.ndim > 1 else None for value in masters]
        for number, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(batches))
            with torch.enable_grad():
                for parameter in self.parameters:
                    parameter.requires_grad_(True)
                try:
                    loss = torch.stack([self._loss(chunk) for chunk in batch]).mean()
                    grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                finally:
                    for parameter in self.parameters:
                        parameter.requires_grad_(False)
            for master, mask, grad in zip(masters, kept, grads, strict=True):
                if grad is not None:
                    master.grad = grad.to(master.dtype) if mask is None else grad.to(master.dtype) * mask
            optimizer.step()
            self._write(masters, kept)

    def _write(self, values: Sequence[Tensor], kept: Sequence[Tensor | None] | None = None) -> None:
        for i, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            parameter.detach().copy_(value)
            mask = kept[i] if kept else None
            if mask is not None:  # a weight that stays is not to count as pruned
                lost = mask & (parameter == 0)
                parameter.detach().masked_fill_(lost, torch.finfo(parameter.dtype).tiny)

    def _error(self, chunks: Sequence[Chunk]) -> float:
        return torch.stack([self._loss(chunk).double() for chunk in chunks]).mean().item()

    def _loss(self, chunk: Chunk) -> Tensor:
        found: list[Tensor] = []

        def stop(module: nn.Module, args: object, output: Tree) -> None:
            found.append(_first(output))
            raise Reached

        handle = self.block.register_forward_hook(stop)
        batch = self.walk.batch(chunk)
        try:
            with self.pruned.starting_at(self.k, chunk):
                outputs(self.walk.model, batch)
        except Reached:
            pass
        finally:
            handle.remove()
        difference = (found[0] - _first(self.dense.stored(self.k + 1, chunk))).float().square()
        mask = mask_of(batch)
        if mask is not None and difference.shape[:2] == mask.shape:
            difference = difference[mask.bool()]
        return difference.mean()


def _first(tree: Tree) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _batches(chunks: Sequence[Chunk], size: int, seed: int) -> list[list[Chunk]]:
    """Batches of all epochs: the samples in a new order each time, neighbours in one group run as one chunk."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(EPOCHS):
        order = torch.randperm(len(chunks), generator=generator).tolist()
        found += [[chunks[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
    return found
