"""Student and teacher before a recovery: what is refused, what learns, and in which dtype."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ..eligible import check_patterns, eligible, matches, plain_name, unwrapped_model
from ..grids import on_grids
from ..oneshot.blocks import blocks_of
from ..oneshot.forward import modes_kept
from ..ranks import is_dtensor, local
from .folder import narrowed

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
