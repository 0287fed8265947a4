"""Prunus prunes neural networks while they train, from what Adam already knows, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import load_model, load_sparse, save_model, save_sparse
    from .oneshot import BlockTuning, QuantizeResult, Repair, Result, ShrinkResult, prune, quantize, search, shrink
    from .optim import AdamWPrune, Spam
    from .pruner import Event, Pruner
    from .rate import Rate, parameter_groups
    from .recovery import Recovery, recover
    from .regrow import Regrow
    from .schedule import Constant, OneShot, Ramp
    from .score import SCORES
    from .select import Global, NofM, PerLayer, PerRow
    from .sparse import Decoder, sparsify_

__version__ = "0.1.0"

_NAMES = {  # by module
    "export": "load_model load_sparse save_model save_sparse",
    "oneshot": "BlockTuning QuantizeResult Repair Result ShrinkResult prune quantize search shrink",
    "optim": "AdamWPrune Spam",
    "pruner": "Event Pruner",
    "rate": "Rate parameter_groups",
    "recovery": "Recovery recover",
    "regrow": "Regrow",
    "schedule": "Constant OneShot Ramp",
    "score": "SCORES",
    "select": "Global NofM PerLayer PerRow",
    "sparse": "Decoder sparsify_",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [
    "SCORES", "AdamWPrune", "BlockTuning", "Constant", "Decoder", "Event", "Global", "NofM", "OneShot", "PerLayer",
    "PerRow", "Pruner", "QuantizeResult", "Ramp", "Rate", "Recovery", "Regrow", "Repair", "Result", "ShrinkResult",
    "Spam", "load_model", "load_sparse", "parameter_groups", "prune", "quantize", "recover", "save_model",
    "save_sparse", "search", "shrink", "sparsify_",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are resolved when they are first used, so that ``prunus --help`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'prunus' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
