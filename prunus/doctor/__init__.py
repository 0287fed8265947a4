"""Checks what a pruned model promises, reading one tensor at a time and executing nothing from its files."""

from .examine import examine
from .findings import Finding, Layer, Report

__all__ = ["Finding", "Layer", "Report", "examine"]
