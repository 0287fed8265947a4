"""Running sparse models: weights kept sparse in memory, products with them, and advice on when they are faster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decoder import Decoder
    from .linear import SparseLinear, sparsify_, unsparsify_
    from .load import load_packed
    from .semi_structured import semi_structured_

_HOME = {
    "Decoder": "decoder",
    "SparseLinear": "linear",
    "load_packed": "load",
    "semi_structured_": "semi_structured",
    "sparsify_": "linear",
    "unsparsify_": "linear",
}
__all__ = ["Decoder", "SparseLinear", "load_packed", "semi_structured_", "sparsify_", "unsparsify_"]


def __getattr__(name: str) -> Any:
    """Names are resolved when they are first used, so that importing one part does not wait for the others."""
    if name not in _HOME:
        raise AttributeError(f"module 'prunus.sparse' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
