"""What the options of several commands share."""

import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
TokenType = Literal["auto", "uint16", "uint32"]
Bits = Literal[8, 4, 3]
StartToken = Literal["auto", "yes", "no"]
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def check_new_folder(out: Path) -> None:
    """Refuse a folder that is there, or cannot be made."""
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{out} cannot be written: {above} is no folder that you may write to")


def number_of(budget: str) -> int:
    """A number such as 500k, 20M or 1B."""
    text, unit = budget.strip().lower().replace("_", ""), 1
    if text[-1:] in UNITS:
        text, unit = text[:-1], UNITS[text[-1]]
    try:
        number = round(float(text) * unit)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ValueError(f"a budget is a number of tokens, as 500k, 20M or 1B, got {budget!r}")
    return number
