"""Markdown tables, and where a figure was measured."""

from collections.abc import Mapping, Sequence
from typing import Any


def where(environment: Mapping[str, Any]) -> str:
    """Machine and versions that a figure was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['machine']}; Python {environment['python']}, {versions}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A Markdown table whose first column and those of ``words`` are left-aligned and the others right-aligned."""
    lines = [headings, ["---" if i in (0, *words) else "---:" for i in range(len(headings))], *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
