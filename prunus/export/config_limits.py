"""Limits of what a config.json may ask for, taken from the tensors in the files, before memory is taken for it."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from ..files.reader import Tensors

MOST_PACKED = 16  # weights in one stored number of a quantised file
MOST_LAYERS = 1000  # of a model with few tensors, whose configuration may have a default that is larger
MOST_LABELS = 30_000  # of a model whose tensors are all smaller
COUNTS = re.compile(r"(layers|n_layer|num_layer|experts|depths?|blocks)$")
LABELS = ("num_labels", "num_classes")
ROPE = ("rope_scaling", "rope_parameters")


def check_counts(values: Mapping[str, Any], tensors: Tensors | None) -> None:
    """Refuse more layers or classes than ``tensors`` allow: transformers makes them before it compares shapes."""
    shapes = [record.layout.shape for record in tensors.records.values()] if tensors else []
    longest = max((max(shape, default=0) for shape in shapes), default=0)
    _check_values(values, max(MOST_LAYERS, len(shapes)), max(MOST_LABELS, longest))


def _check_values(values: Mapping[str, Any], most_layers: int, most_labels: int) -> None:
    for name, value in values.items():
        limit = most_layers if COUNTS.search(str(name)) else most_labels if name in LABELS else math.inf
        several = isinstance(value, list | tuple)  # which may be places, counted from the end
        for number in value if several else [value]:
            if isinstance(number, int) and (number > limit or (number < 0 and limit < math.inf and not several)):
                raise ValueError(f"{name} is {number}, negative or more than the model has tensors")
        if name in ROPE and value is not None:
            _check_rope(str(name), value)
        elif isinstance(value, Mapping):
            _check_values(value, most_layers, most_labels)


def _check_rope(name: str, value: Any) -> None:
    """ValueError unless it is a mapping of numbers and of names of types, for all layers or for each kind of them."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {repr(value)[:80]}, but should be a mapping")
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            _check_rope(f"{name}.{key}", inner)
        elif not str(key).endswith("type"):
            for number in inner if isinstance(inner, list | tuple) else [inner]:
                if number is not None and not (isinstance(number, int | float) and math.isfinite(number)):
                    raise ValueError(f"{name}.{key} is {repr(inner)[:80]}, but should be a number")


def num_stored(tensors: Tensors) -> int:
    """Numbers in the files, zeros among them."""
    return sum(record.layout.numel for record in tensors.records.values())


def bounded_by(tensors: Tensors) -> AbstractContextManager[None]:
    """``bounded`` for a model whose weights are these."""
    return bounded(num_stored(tensors), len(tensors.records), tensors.path)


@contextmanager
def bounded(num_stored: int, num_tensors: int, path: Path) -> Iterator[None]:
    """Refuse a model that is being built as soon as it has far more tensors, or numbers in them, than are stored."""
    num_made = 0

    def counting(most: int) -> Callable[[nn.Module, str, Tensor | None], None]:
        num = 0

        def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            nonlocal num, num_made
            num_made, num = num_made + 1, num + (0 if tensor is None else tensor.numel())
            if num > most:
                raise ValueError(f"{path} stores {num_stored} numbers, but its configuration needs at least {num}")
            if num_made > MOST_PACKED * num_tensors + 10**4:
                raise ValueError(f"{path} stores {num_tensors} tensors, but its configuration needs far more")

        return count

    most = MOST_PACKED * num_stored
    of_buffers = counting(most + 5 * 10**7)  # which no file need hold
    with (
        register_module_parameter_registration_hook(counting(most + 10**6)),
        register_module_buffer_registration_hook(of_buffers),
    ):
        yield
