"""Prunus prunes neural networks while they train, from what Adam already knows, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import load_model, load_sparse, save_model, save_sparse
    from .oneshot import Bisection, Levels, Limit, Probe, Repair, SearchOptions, Tune, prune, search
    from .optim import AdamWPrune, Spam
    from .pruner import Event, Pruner
    from .rate import Rate, parameter_groups
    from .regrow import Regrow
    from .schedule import Constant, OneShot, Ramp
    from .score import SCORES
    from .select import Global, NofM, PerLayer, PerRow

__version__ = "0.1.0"

_HOME = {
    "AdamWPrune": "optim",
    "Bisection": "oneshot",
    "Constant": "schedule",
    "Event": "pruner",
    "Global": "select",
    "Levels": "oneshot",
    "Limit": "oneshot",
    "NofM": "select",
    "OneShot": "schedule",
    "SearchOptions": "oneshot",
    "PerLayer": "select",
    "PerRow": "select",
    "Probe": "oneshot",
    "Pruner": "pruner",
    "Ramp": "schedule",
    "Rate": "rate",
    "Regrow": "regrow",
    "Repair": "oneshot",
    "SCORES": "score",
    "Spam": "optim",
    "Tune": "oneshot",
    "load_model": "export",
    "load_sparse": "export",
    "parameter_groups": "rate",
    "prune": "oneshot",
    "save_model": "export",
    "save_sparse": "export",
    "search": "oneshot",
}
__all__ = [
    "SCORES",
    "AdamWPrune",
    "Bisection",
    "Constant",
    "Event",
    "Global",
    "Levels",
    "Limit",
    "NofM",
    "OneShot",
    "PerLayer",
    "PerRow",
    "Probe",
    "Pruner",
    "Ramp",
    "Rate",
    "Regrow",
    "Repair",
    "SearchOptions",
    "Spam",
    "Tune",
    "load_model",
    "load_sparse",
    "parameter_groups",
    "prune",
    "save_model",
    "save_sparse",
    "search",
]


def __getattr__(name: str) -> Any:
    """Names are resolved when they are first used, so that ``prunus --help`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'prunus' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
