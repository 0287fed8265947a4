"""Pruning after training: by a strategy, with or without the gradient probe, and the search for how far to go."""

from .probe import Probe
from .prune import prune
from .result import Layer, Result

__all__ = ["Layer", "Probe", "Result", "prune"]
