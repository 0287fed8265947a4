"""Running sparse models: weights kept sparse in memory, products with them, and advice on when they are faster."""

from .decoder import Decoder
from .linear import SparseLinear, sparsify_, unsparsify_
from .load import load_packed
from .semi_structured import semi_structured_

__all__ = ["Decoder", "SparseLinear", "load_packed", "semi_structured_", "sparsify_", "unsparsify_"]
