"""What all benchmarks have in common: options, a JSON file of what was measured, and a section of the page.

A benchmark is a module with a ``Command``, which measures, and ``SECTIONS``, which draw the records it wrote.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch

from prunus.files.json_file import write_json
from prunus.lab.study.tables import markdown_table, measured_on
from prunus.lab.tracking import commit, environment, machine
from prunus.schedule import check_sparsity

Row = dict[str, Any]
Measured = tuple[str, dict[str, Any], list[Row]]  # what was measured, settings, rows
Record = dict[str, Any]  # a JSON file


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """Options of every benchmark."""

    threads: int = 0  # CPU threads; 0 leaves torch's choice
    results: Path = Path("benchmarks/results")  # folder of the JSON files

    @abstractmethod
    def measure(self) -> Measured: ...

    def run(self) -> None:
        """Measure, print the rows, and write them."""
        self._check()
        if self.threads:
            torch.set_num_threads(self.threads)
        what, settings, rows = self.measure()
        print_rows(rows)
        print(f"written to {write_record(what, settings, rows, self.results)}")

    def _check(self) -> None:
        """Refuse sizes at which nothing could be measured."""
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if name == "sparsity":
                check_sparsity(value)
            elif isinstance(value, int | tuple) and not isinstance(value, bool):
                least = 0 if name == "threads" else 1
                if min(value if isinstance(value, tuple) else (value,), default=0) < least:
                    raise ValueError(f"--{name} must be at least {least}, got {value}")


def print_rows(rows: Sequence[Row]) -> None:
    """The rows as a table, a column for each key."""
    headings = list(dict.fromkeys(name for row in rows for name in row))
    values = [[row.get(heading, "") for heading in headings] for row in rows]
    lines = [headings, *([f"{v:.4g}" if isinstance(v, float) else str(v) for v in line] for line in values)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_record(what: str, settings: dict[str, Any], rows: list[Row], folder: Path) -> Path:
    """Write ``<what>_<machine>_<date>_<commit>.json`` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    about = _slug(f"{what} {settings.get('weights', '')}")
    path = folder / f"{about}_{_slug(machine())}_{date.today()}_{commit() or 'installed'}.json"
    content = {"what": what, "date": str(date.today()), "environment": environment(), "settings": settings}
    write_json(path, content | {"rows": rows})
    return path


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def newest_records(folder: Path) -> list[Record]:
    """The newest record of each kind, machine and set of weights, with the name of its file."""
    found = [(path, json.loads(path.read_text())) for path in folder.glob("*.json")]
    newest: dict[tuple[str, str, str], Record] = {}
    for path, record in sorted(found, key=lambda each: (each[1]["date"], each[0].stat().st_mtime)):
        about = record["settings"].get("weights", "")
        newest[record["what"], record["environment"]["machine"], about] = record | {"file": path.name}
    return [record for _, record in sorted(newest.items())]


def section(title: str, record: Record, text: str, body: str) -> str:
    """A section of a page: where the record was made, ``text`` filled in from its settings, then ``body``."""
    environment = record["environment"]
    origin = f"{measured_on(environment)}; {record['date']}, commit {environment['commit']}; `{record['file']}`"
    note = f"{record['settings']['note']}\n\n" if "note" in record["settings"] else ""
    return f"## {title}\n\n{origin}\n\n{text.format(**record['settings'])}\n{note}{body}\n"


def table_of(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A Markdown table; a column is ``heading: "key:format"``, and a value that is missing or None is an empty cell."""

    def cell(row: Row, column: str) -> str:
        key, _, form = column.partition(":")
        return "" if row.get(key) is None else format(row[key], form)

    return markdown_table(list(columns), [[cell(row, column) for column in columns.values()] for row in rows])
