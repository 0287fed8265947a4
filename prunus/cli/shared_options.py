"""What the options of several commands share."""

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..files.json_file import read_json

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
TokenType = Literal["auto", "uint16", "uint32"]
Bits = Literal[8, 4, 3]
StartToken = Literal["auto", "yes", "no"]
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def given(command: Any, *names: str) -> list[str]:
    """Those of a command's options that do not have their default, as they are written."""
    defaults = {option.name: option.default for option in fields(command)}
    return [f"--{name.replace('_', '-')}" for name in names if getattr(command, name) != defaults[name]]


def check_not_negative(command: Any, *names: str) -> None:
    for name in names:
        if (getattr(command, name) or 0) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(command, name)}")


def check_new_folder(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{out} cannot be written: {above} is not a folder that you can write to")


def number_of(budget: str) -> int:
    text, unit = budget.strip().lower().replace("_", ""), 1
    if text[-1:] in UNITS:
        text, unit = text[:-1], UNITS[text[-1]]
    try:
        number = round(float(text) * unit)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise ValueError(f"a budget is a number of tokens, such as 500k, 20M or 1B, got {budget!r}")
    return number


def size_in_bytes(text: str) -> int:
    """Bytes from a number with a unit; units are powers of a thousand."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMG]?)B?\s*", text.upper())
    size = int(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"a size is a positive number with B, KB, MB or GB, such as 5GB, got {text!r}")
    return size


def is_written(figures: Path, unfinished: Path, settings: Any) -> bool:
    """Whether a command with these settings has written its result, and has only its own folder left to remove."""
    return unfinished.is_dir() and figures.is_file() and read_json(figures).get("settings") == settings


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
