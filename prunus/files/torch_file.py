"""Files of ``torch.save``, read without executing what is in them."""

import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch


def read_torch_file(file: Path | BinaryIO, mmap: bool = False) -> Any:
    """What ``torch.save`` wrote, if it is plain values and tensors alone; ValueError for anything else.

    With ``mmap``, tensors are mapped where the file allows it: files from before 2020 are read whole.
    """
    mmap = mmap and zipfile.is_zipfile(file)
    try:
        return torch.load(str(file) if isinstance(file, Path) else file, "cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise ValueError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """The few words that matter: torch goes on to advise to execute the file."""
    said = str(error)
    cause = re.search(r"WeightsUnpickler error:\s*([^\n]+)", said)
    if not cause and not isinstance(error, RuntimeError | OSError | EOFError):
        return "torch.save did not write it"
    lines = (cause[1] if cause else said).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
