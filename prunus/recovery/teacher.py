"""The model that a student learns from, frozen, on its device or sharded over its ranks; and what is asked of both."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..eligible import check_patterns, eligible, matches, plain_name, unwrapped_model
from ..grids import on_grids
from ..oneshot.blocks import blocks_of
from ..oneshot.forward import modes_kept, outputs, replaced
from ..oneshot.head import Head
from ..oneshot.offload import Offload
from ..oneshot.resources import fits
from ..oneshot.samples import Tree
from ..ranks import is_dtensor, local

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


OF_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")  # which it sets on a model


def check_values(model: nn.Module) -> None:
    if any(getattr(module, "is_packed", False) for module in model.modules()):
        raise ValueError("the model has sparse layers, which cannot learn: call unsparsify_(model) first")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; load the weights first")


def loaded(teacher: nn.Module | str | Path | None) -> nn.Module | None:
    if isinstance(teacher, str | Path):
        from ..export.huggingface import load_any_model

        return load_any_model(Path(teacher))
    if teacher is not None and not isinstance(teacher, nn.Module):
        raise ValueError(
            f"teacher must be a model, a folder or None, got {type(teacher).__name__}; from a Result, pass "
            "result.dense()"
        )
    return None if teacher is None else unwrapped_model(teacher)


def check_apart(student: nn.Module, teacher: nn.Module) -> None:
    own = {local(p).untyped_storage().data_ptr(): name for name, p in student.named_parameters() if p.numel()}
    for parameter in teacher.parameters():
        if parameter.numel() and (name := own.get(local(parameter).untyped_storage().data_ptr())):
            raise ValueError(
                f"teacher and student share {name}, so the teacher would learn too; pass result.dense(), or a "
                "separately loaded model"
            )


def warn_if_whole(student: nn.Module, teacher: nn.Module) -> None:
    """A student that is neither sparse nor smaller nor in few bits."""
    sizes = [sum(p.numel() for p in each.parameters()) for each in (student, teacher)]
    has_zeros = any(not bool(local(p).detach().all()) for p in student.parameters() if p.ndim > 1)
    if sizes[0] >= sizes[1] and not has_zeros and not on_grids(student):
        warnings.warn(
            "the student has no zeros and as many weights as its teacher: nothing was pruned, or its zeros were "
            "filled; give the pruned model",
            stacklevel=3,
        )


@contextmanager
def learning(student: nn.Module, train: str | Sequence[str]) -> Iterator[dict[nn.Parameter, torch.dtype]]:
    """What ``train`` names learns, in float32; then flags and dtypes are as before, and no kept weight is zero.

    Yields the dtypes that parameters had.
    """
    globs = [train] if isinstance(train, str) else list(train)
    named = {plain_name(name): p for name, p in student.named_parameters()}
    check_patterns(globs, named)
    dtypes = {parameter: parameter.dtype for parameter in named.values()}
    wrapping = {name: vars(student).get(name) for name in OF_ACCELERATE}
    fields = getattr(getattr(student, "config", None), "__dict__", {})
    use_cache = {key: fields[key] for key in ("use_cache",) if key in fields}
    with modes_kept(student):
        try:
            for name, parameter in named.items():
                learns = parameter.is_floating_point() and (not globs or matches(name, globs))
                parameter.requires_grad_(learns)
                if learns and parameter.dtype in (torch.float16, torch.bfloat16):
                    parameter.data = parameter.data.float()
            yield dtypes
        finally:
            fields.pop("use_cache", None)  # which the Trainer sets to False, and a folder would say
            fields.update(use_cache)
            for name, value in wrapping.items():
                vars(student).pop(name, None)
                if value is not None:
                    vars(student)[name] = value
            for parameter, dtype in dtypes.items():
                parameter.grad = None
                if parameter.dtype != dtype and not is_dtensor(parameter):
                    parameter.data = narrowed(parameter.data, dtype)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In a dtype of 16 bits; what is not zero stays so."""
    narrow = values.to(dtype, copy=True)
    return narrow.masked_fill_((narrow == 0) & (values != 0), torch.finfo(dtype).tiny)


@contextmanager
def compiled_blocks(*models: nn.Module | None) -> Iterator[None]:
    """Blocks of the models compiled: equal ones share a graph."""
    given = [model for model in models if model is not None]
    blocks = [block for model in given for block in blocks_of(model, eligible(model, takes_frozen=True).weights)]
    try:
        for block in blocks:
            block.compile()
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
