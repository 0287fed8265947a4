"""Checkpoints: written whole or not at all, read without executing anything."""

from pathlib import Path
from typing import Any

import torch

from ..files import write_atomically
from ..ops.saved import read_saved

FORMAT = "prunus-checkpoint-1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """State written by ``save_checkpoint``; a missing, truncated or foreign file is a ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        state = read_saved(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole checkpoint of prunus: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of prunus: it lacks the mark {FORMAT!r}")
    return state
