"""``docs/benchmarks.md`` from the files that benchmarks left: no figure in it is typed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import read_record

INTRODUCTION = """# Benchmarks

This page is made by `prunus bench page` from the JSON files in `benchmarks/results/`; nothing in it is
typed. All methods of a table ran in one process, one after the other or in turns. Run them on your
own machine with `prunus bench select` and `prunus bench step`.
"""

SELECT = """Masks of {num_weights:,} weights ({layers} layers of {dim} x {dim}) at {sparsity:.0%} by {score}, \
median of {repeat}. Extra memory is the peak beyond weights and moments, the masks included. "Off by" is \
how many more weights than asked are kept (negative: fewer); torch.nn.utils.prune ranks by magnitude, which reads less.
"""

STEP = """A step of a GPT with {num_weights:,} weights, {num_prunable:,} of them prunable, at {sparsity:.0%}, \
no event among the steps; medians over {repeat} rounds in which the arms take turns. Overhead is the median \
over rounds of the time beyond the arm it stands beside, in the same round.
"""


def page(folder: Path) -> str:
    """The page for all records in ``folder``, the newest of each kind and machine."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: (read_record(path)["date"], path.stat().st_mtime)):
        record = read_record(path)
        newest[record["what"], record["environment"]["machine"]] = record | {"file": path.name}
    if not newest:
        raise ValueError(f"there are no results in {folder}; run prunus bench select first")
    sections = [SECTIONS[what](record) for (what, _), record in sorted(newest.items())]
    return "\n".join([INTRODUCTION, *sections])


def _select(record: dict[str, Any]) -> str:
    rows = record["rows"]
    ours = next(row for row in rows if row["method"] == "prunus, exact")
    lines = [
        (
            row["method"],
            f"{row['ms']:.1f}",
            f"{row['ms'] / ours['ms']:.2f}",
            "not measured" if row["extra_mib"] is None else f"{row['extra_mib']:.1f}",
            f"{row['kept_too_many']:,}",
        )
        for row in rows
    ]
    headings = ("method", "ms", "times ours", "extra MiB", "off by")
    return _section("Finding the masks", record, SELECT, table(headings, lines))


def _step(record: dict[str, Any]) -> str:
    lines = [
        (
            row["arm"],
            row["optimizer"],
            f"{row['tokens']:,}",
            f"{row['ms']:.1f}",
            f"{row['overhead']:+.2%}" if row["arm"] != row["beside"] else "",
            row["beside"] if row["arm"] != row["beside"] else "",
        )
        for row in record["rows"]
    ]
    headings = ("arm", "optimizer", "tokens", "ms", "overhead", "beside")
    return _section("Keeping them: a training step", record, STEP, table(headings, lines))


SECTIONS = {"select": _select, "step": _step}


def _section(title: str, record: dict[str, Any], text: str, body: str) -> str:
    environment = record["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    origin = (
        f"{environment['machine']}; Python {environment['python']}, {versions}; "
        f"{record['date']}, commit {environment['commit']}; `{record['file']}`"
    )
    return f"## {title}\n\n{origin}\n\n{text.format(**record['settings'])}\n{body}\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is left-aligned and the others right-aligned."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
