from .batches import ImageData, ImageShape, Labelled, TokenData, TokenShape
from .load import load

__all__ = ["ImageData", "ImageShape", "Labelled", "TokenData", "TokenShape", "load"]
