"""Models that are really smaller on the disk, and back."""

from .huggingface import load_model, save_model
from .sparse import load_sparse, save_sparse

__all__ = ["load_model", "load_sparse", "save_model", "save_sparse"]
