"""Where tensors come from: names and shapes first, values one at a time."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.reader import located
from .report import Finding


@dataclass(frozen=True)
class Stored:
    """A tensor that is read when ``load`` is called, and the file it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: str
    load: Callable[[], Tensor]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    @classmethod
    def of(cls, name: str, tensor: Tensor, place: str) -> "Stored":
        """A tensor that is in memory, or mapped into it."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype), place, lambda: tensor.detach())


@dataclass
class Source:
    """What a path holds; ``findings`` and ``notes`` are those of reading it."""

    path: Path
    kind: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    masks: dict[str, Stored] = field(default_factory=dict)  # boolean, or packed bits
    config: dict[str, Any] = field(default_factory=dict)  # config.json of Hugging Face
    run: dict[str, Any] = field(default_factory=dict)  # options of ``prunus train``
    state: dict[str, Any] = field(default_factory=dict)  # the pruner's step and due
    moments: list[dict[str, Any]] = field(default_factory=list)  # optimizer state of weights that have a mask
    digests: dict[str, str] = field(default_factory=dict)  # by the place that stores them
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)  # files that stay open until all is read

    def find(self, kind: str, where: str, what: str, todo: str) -> None:
        self.findings.append(Finding(kind, where, what, todo))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def open_source(path: Path) -> Source:
    """The model, checkpoint or file at ``path``; what is none of them is a ValueError."""
    from . import checkpoint, distributed, folder

    if path.is_dir():
        if (path / ".metadata").is_file():
            return distributed.read(path)
        if (path / "checkpoint.pt").is_file():
            return checkpoint.read(path / "checkpoint.pt")
        if pieces := [p.parent for p in path.glob("checkpoint-*/.metadata") if p.parent.name[11:].isdecimal()]:
            return distributed.read(max(pieces, key=lambda p: int(p.name[11:])))
        if ranks := checkpoint.rank_files(path):
            return checkpoint.read_ranks(path, ranks)
        return folder.read(path)
    path = located(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return folder.read_file(path)
    return checkpoint.read(path)
