"""Pruning after training: by a strategy, with or without the gradient probe, and the search for how far to go."""

from .drop_experts import DroppedExperts, ExpertLayer
from .limit import Bisection, Levels, Limit, SearchOptions, Trial, Tune
from .options import Distill, Repair
from .probe import Probe
from .prune import prune
from .result import Found, Layer, Result
from .search import search

__all__ = [
    "Bisection",
    "Distill",
    "DroppedExperts",
    "ExpertLayer",
    "Found",
    "Layer",
    "Levels",
    "Limit",
    "Probe",
    "Repair",
    "Result",
    "SearchOptions",
    "Trial",
    "Tune",
    "prune",
    "search",
]
