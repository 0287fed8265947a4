"""The model that a student learns from: dense, frozen, on the student's device or sharded over its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..eligible import eligible
from ..oneshot.forward import modes_kept, outputs, replaced
from ..oneshot.head import Head
from ..oneshot.offload import Offload
from ..oneshot.resources import fits
from ..oneshot.samples import Tree
from ..ranks import is_dtensor

MOST_ZEROS = 0.2  # of a dense model's weights: those read from 4-bit files have some


class Teacher:
    """A frozen model in evaluation mode, in its own dtype."""

    def __init__(self, model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
        check_dense(model)
        self.model, self.device, self.offload = model, device, offload
        self._weights = eligible(model, takes_frozen=True).weights if offload else []
        self._tensors = [*model.parameters(), *model.buffers()]

    @contextmanager
    def open(self, *, place: bool = True) -> Iterator["Teacher"]:
        """While this is open the teacher can be run; then its modes, devices and flags are as before.

        With ``offload`` its weights stay in main memory, and one block at a time is on the device.
        """
        homes = {tensor: tensor.data for tensor in self._tensors}
        with modes_kept(self.model):
            try:
                self.model.eval().requires_grad_(False)
                if place and not self.offload:
                    self._place()
                with Offload(self.model, self._weights, self.device).open() if self.offload else nullcontext():
                    yield self
            finally:
                for tensor, home in homes.items():
                    if not is_dtensor(tensor):
                        tensor.data = home

    def _place(self) -> None:
        def move(device: torch.device) -> None:
            for tensor in self._tensors:
                tensor.data = tensor.data.to(device)

        if fits(partial(move, self.device), self.device, partial(move, torch.device("cpu"))):
            return
        num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        raise ValueError(
            f"the teacher needs {num_bytes / 2**30:.1f} GiB, more than {self.device} has left; --offload-teacher "
            "(offload_teacher=True) keeps it in main memory, one block at a time on the device"
        )

    def shard_like(self, student: nn.Module) -> None:
        """Shard the teacher by FSDP2 as the student is: modules of the same classes, over the same ranks."""
        units = {type(module).__mro__[1] for module in student.modules() if isinstance(module, FSDPModule)}
        sharded: Any = next(p for p in student.parameters() if is_dtensor(p))
        mesh = sharded.device_mesh
        inner = [module for module in self.model.modules() if type(module) in units and module is not self.model]
        for module in reversed(inner):
            if not isinstance(module, nn.Embedding | nn.Linear | nn.LayerNorm):
                fully_shard(module, mesh=mesh)
        # the head is read outside the model's own forward, where its weights must still be whole
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)

    @torch.no_grad()
    def outputs(self, batch: Tree) -> Any:
        return outputs(self.model, batch)

    @torch.no_grad()
    def hidden(self, batch: Tree, head: nn.Linear) -> tuple[Tensor, Head]:
        """What the head reads, and the head; its logits are not computed."""
        seen: list[Tensor] = []

        def stop(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden.new_zeros(*hidden.shape[:-1], 1)

        with replaced({head: stop}):
            outputs(self.model, batch)
        return seen[0], Head(head.weight.detach(), None if head.bias is None else head.bias.detach())


def check_dense(model: nn.Module) -> None:
    """Refuse a teacher that is pruned itself: at least half of its matrices have many zeros."""
    matrices = [p.detach() for p in model.parameters() if p.ndim > 1 and p.numel()]
    shares = sorted(1 - int(matrix.count_nonzero()) / matrix.numel() for matrix in matrices)
    if shares and shares[len(shares) // 2] > MOST_ZEROS:
        raise ValueError(
            f"the teacher is itself pruned: half of its matrices have {shares[len(shares) // 2]:.0%} zeros or more; "
            "give the dense model"
        )
