"""How a resumed run knows that a setting is the one it began with."""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .samples import digest

PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Seen = dict[int, tuple[int, Any]]  # by id: the number of an object, and the object, so that no other gets this id


def identity(value: Any) -> str:
    """Text that is the same for the same setting in another process, and not for another setting.

    Functions are known by their source, their code and what they hold: defaults and closures. Objects are known by the
    source of their class and what pickle would store, modules by their public attributes, tensors and children. Global
    variables that functions read are not looked at. ValueError where something cannot be known again.
    """
    try:
        return value if isinstance(value, str) else _text(value, {})
    except RecursionError:
        raise ValueError(f"{_name(value)} is nested too deeply for a resumed run to know it; leave out state") from None


def _text(value: Any, seen: Seen) -> str:
    if type(value) in PLAIN:
        return repr(value)
    if id(value) in seen:
        return f"object {seen[id(value)][0]}"
    if type(value) is not tuple:  # Python may share equal tuples or not
        seen[id(value)] = len(seen), value
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(_text(each, seen) for each in value)})"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}({', '.join(sorted(_text(each, seen) for each in value))})"
    if type(value) is dict:
        return f"dict({', '.join(f'{_text(key, seen)}: {_text(each, seen)}' for key, each in value.items())})"
    if is_dataclass(value) and not isinstance(value, type):
        said = [f"{field.name}={_text(getattr(value, field.name), seen)}" for field in fields(value)]
        return f"{type(value).__qualname__}({', '.join(said)})"
    return f"{_name(value)}, {digest([_text(part, seen) for part in _parts(value)])[:16]}"


def _parts(value: Any) -> list[Any]:
    if isinstance(value, ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        has_code = any(isinstance(each, FunctionType) for each in vars(value).values())
        return [value.__module__, _source(value) if has_code else None]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_source(value), value.__code__, cells, value.__defaults__, value.__kwdefaults__, vars(value)]
    if isinstance(value, CodeType):  # of two functions in one line the source is the same
        return [value.co_code, value.co_consts, value.co_names]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, nn.Module):
        public = {key: each for key, each in vars(value).items() if not key.startswith("_")}
        tensors = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        return [type(value), public, tensors, list(value.named_children())]
    try:
        if isinstance(value, Tensor):
            return [digest(value)]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return [value.dtype.str, value.shape, digest(value.tobytes())]
        parts = value.__reduce_ex__(2)
    except Exception as error:
        raise ValueError(
            f"a resumed run could not recognise {_name(value)} ({' '.join(str(error).split())[:80]}); leave out state"
        ) from None
    parts = [parts] if isinstance(parts, str) else parts
    return [type(value), *(list(part) if isinstance(part, Iterator) else part for part in parts)]


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        problem = f"{_name(value)} has no source by which a resumed run could recognise it"
        raise ValueError(f"{problem}; define it in a file, or leave out state") from None


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)
