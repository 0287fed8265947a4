"""Recovery: a pruned, shrunk or quantised model learns from the dense one."""

from .loss import Figures
from .recover import recover
from .result import Point, Recovery

__all__ = ["Figures", "Point", "Recovery", "recover"]
