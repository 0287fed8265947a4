"""Pruning after training: by a score or by the solver, with or without the gradient probe, and how far to go."""

from .drop_experts import ExpertLayer
from .options import Bisection, BlockTuning, Levels, Limit, Repair, TauTuning, Trial
from .probe import Probe
from .prune import prune
from .quantize import quantize
from .result import Layer, QuantizeResult, Result, SearchResult
from .search import search
from .shrink import shrink
from .shrink_result import ShrinkResult, ShrunkLayer

__all__ = [
    "Bisection", "BlockTuning", "ExpertLayer", "Layer", "Levels", "Limit", "Probe", "QuantizeResult", "Repair",
    "Result", "SearchResult", "ShrinkResult", "ShrunkLayer", "TauTuning", "Trial", "prune", "quantize", "search",
    "shrink",
]  # fmt: skip
