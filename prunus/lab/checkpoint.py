"""Checkpoints: written whole or not at all, read without executing anything, in one file or in pieces.

One process writes checkpoint.pt. Ranks write a folder ``checkpoint-STEP`` and, at the end of a run, checkpoint.pt too.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ..files.atomic import write_atomically
from ..files.torch_file import read_saved

FORMAT = "prunus-checkpoint-1"
PIECES = re.compile(r"checkpoint-(\d+)")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run folder's; where there is a checkpoint.pt, it is the newest.

    What a crash left half written bears another name and is never taken.
    """
    if not path.is_dir() or (path / ".metadata").is_file():
        return path
    whole = path / "checkpoint.pt"
    found = [p for p in path.glob("checkpoint-*") if PIECES.fullmatch(p.name) and (p / ".metadata").is_file()]
    return whole if whole.is_file() or not found else max(found, key=lambda p: int(p.name.rpartition("-")[2]))


def drop_pieces(folder: Path, but: Path | None = None) -> None:
    """Remove the checkpoints in pieces of a run folder, whole or only begun, all but one."""
    for path in folder.glob("checkpoint-*"):
        if path != but and PIECES.fullmatch(path.name.removesuffix(".part")):
            shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """State that ``save_checkpoint`` or ranks wrote, whole; a missing, truncated or foreign one is a ValueError."""
    if (path / ".metadata").is_file():
        from .named import from_names
        from .pieces import load_pieces

        state = from_names(load_pieces(path, {}), whole=True)
        return {key: value for key, value in state.items() if key != "digest"}
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        state = read_saved(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole checkpoint of prunus: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of prunus: it lacks the mark {FORMAT!r}")
    return state
