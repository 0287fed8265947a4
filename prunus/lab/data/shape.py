"""What a model must know of its data."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TokenShape:
    kind: ClassVar[str] = "tokens"
    vocab_size: int
    context: int


@dataclass(frozen=True)
class ImageShape:
    kind: ClassVar[str] = "images"
    channels: int
    size: int  # height and width
    num_classes: int
