"""Sections and tables of the pages that benchmarks make."""

from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float | None, form: str) -> str:
    """The value as ``form`` writes it, or nothing where there is none."""
    return "" if value is None else form.format(value)


def where(environment: Mapping[str, Any]) -> str:
    """Machine and versions that a figure was made with."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['machine']}; Python {environment['python']}, {versions}"


def section(title: str, record: dict[str, Any], text: str, body: str) -> str:
    environment = record["environment"]
    origin = f"{where(environment)}; {record['date']}, commit {environment['commit']}; `{record['file']}`"
    note = f"{record['settings']['note']}\n\n" if "note" in record["settings"] else ""
    return f"## {title}\n\n{origin}\n\n{text.format(**record['settings'])}\n{note}{body}\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A Markdown table whose first column and those of ``words`` are left-aligned and the others right-aligned."""
    lines = [headings, ["---" if i in (0, *words) else "---:" for i in range(len(headings))], *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
