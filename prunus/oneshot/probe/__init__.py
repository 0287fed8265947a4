"""The gradient probe: candidates are reduced to a tenth, and those whose gradient then grows too much stay."""

from .prober import Probe

__all__ = ["Probe"]
