"""Checks what a pruned model promises, reading one tensor at a time and executing nothing from its files."""

from .examine import examine
from .findings import Diagnosis, Finding, TensorReport

__all__ = ["Diagnosis", "Finding", "TensorReport", "examine"]
