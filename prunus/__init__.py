"""Prunus prunes neural networks while they train, from what Adam already knows, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import load_model, load_sparse, save_model, save_sparse
    from .optim import AdamWPrune, Spam
    from .schedule import Constant, OneShot, Ramp
    from .score import SCORES
    from .select import Global, NofM, PerLayer, PerRow
    from .training import Event, Pruner

__version__ = "0.1.0"

_HOME = {
    "AdamWPrune": "optim",
    "Constant": "schedule",
    "Event": "training",
    "Global": "select",
    "NofM": "select",
    "OneShot": "schedule",
    "PerLayer": "select",
    "PerRow": "select",
    "Pruner": "training",
    "Ramp": "schedule",
    "SCORES": "score",
    "Spam": "optim",
    "load_model": "export",
    "load_sparse": "export",
    "save_model": "export",
    "save_sparse": "export",
}
__all__ = [
    "SCORES",
    "AdamWPrune",
    "Constant",
    "Event",
    "Global",
    "NofM",
    "OneShot",
    "PerLayer",
    "PerRow",
    "Pruner",
    "Ramp",
    "Spam",
    "load_model",
    "load_sparse",
    "save_model",
    "save_sparse",
]


def __getattr__(name: str) -> Any:
    """Names are resolved when they are first used, so that ``prunus --help`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'prunus' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
