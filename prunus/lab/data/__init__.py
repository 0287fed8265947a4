from .images import ImageData, Labelled
from .load import load
from .shape import ImageShape, TokenShape
from .tokens import TokenData

__all__ = ["ImageData", "ImageShape", "Labelled", "TokenData", "TokenShape", "load"]
