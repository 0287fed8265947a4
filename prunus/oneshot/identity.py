"""How a resumed run knows that a setting is the one it began with."""

import inspect
import re
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .samples import digest

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of functions and objects, another in every process


def identity(value: Any) -> str:
    """Text that is the same for the same setting in another process, and not for another setting.

    Functions and objects without a text of their own are known by their source and what they hold: defaults, closures
    and attributes. Global variables that they read are not looked at. ValueError where there is no source.
    """
    if not ADDRESS.search(text := str(value)):
        return text
    if isinstance(value, partial):
        held: list[Any] = [value.func, value.args, value.keywords]
        source = "partial"
    else:
        function = getattr(value, "__func__", value)
        is_function = inspect.isfunction(function)
        try:
            source = inspect.getsource(function if is_function else type(value))
        except (OSError, TypeError):
            raise ValueError(
                f"{text} has no source by which a resumed run could know it; define it in a file, or leave out state"
            ) from None
        held = [vars(getattr(value, "__self__", value))]
        if is_function:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            held += [cells, function.__defaults__, function.__kwdefaults__]
    leaves = [leaf for leaf in pytree.tree_leaves(held) if leaf is not value]
    constants = [digest(leaf) if isinstance(leaf, Tensor) else identity(leaf) for leaf in leaves]
    return f"{getattr(value, '__qualname__', type(value).__qualname__)}, {digest([source, *constants])[:16]}"
