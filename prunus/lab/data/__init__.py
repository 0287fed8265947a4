from .batches import ImageData, ImageShape, Labelled, TokenData, TokenShape
from .datasets import load

__all__ = ["ImageData", "ImageShape", "Labelled", "TokenData", "TokenShape", "load"]
