"""Models that are really smaller on the disk, and back."""

from ..files.sparse_file import load_sparse, save_sparse
from .huggingface import load_model, save_model

__all__ = ["load_model", "load_sparse", "save_model", "save_sparse"]
