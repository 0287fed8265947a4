"""The page of the demo: what each model lost, and how large it is. It has no script."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

from ..run_files import RunFiles
from ..schema import AMOUNT, COUNT, TEXT, Named, Spec
from .numbers import plain, short_percent, signed
from .panel import NumberTable, Page, Section, cell

DEMO_FILE = "demo.json"
DEMO: Spec = {
    "rows": [{"name": TEXT, "done": TEXT, "perplexity": AMOUNT, "num_bytes": COUNT}],
    "texts": Named(TEXT),
    "prompt": TEXT,
    "settings": {"steps": COUNT, "sparsity": AMOUNT},
}
ABOUT = (
    "One seed of a small GPT on Python's own source. Perplexity is per byte, on files that were not trained on; sizes "
    "are those of the files of weights, embedding included."
)
WRAPPED = 'style="white-space: pre-wrap; overflow-wrap: anywhere"'
LINE, BARS = 30, ((124, 195), (335, 145))  # pixels: of a row, and where each column of bars begins and how wide it is


@dataclass(frozen=True)
class Row:
    name: str
    done: str
    perplexity: float
    num_bytes: int


def change(row: Row, dense: Row) -> str:
    """What a model adds to the perplexity of the dense one, with a sign and never a negative zero."""
    return f"{round(row.perplexity / dense.perplexity - 1, 3) + 0.0:+.1%}"


def in_one_line(rows: Sequence[Row], sparsity: float) -> str:
    """What zeros cost in each way of setting them after training, and what the smallest file saves."""
    ways = {"magnitude": "by magnitude alone", "repaired": "with repair", "recovered": "recovered"}
    parts = ", ".join(f"{change(row, rows[0])} {ways[row.name]}" for row in rows if row.name in ways)
    least = min(rows, key=lambda row: row.num_bytes)
    share = least.num_bytes / rows[0].num_bytes
    size = f"{least.name} ({change(least, rows[0])}) the file has {share:.0%} of the bytes"
    return f"{short_percent(sparsity)} zeros after training: perplexity {parts}; {size}"


def demo_page(folder: Path) -> Page:
    values = RunFiles(folder).load_checked(DEMO_FILE, DEMO)
    rows = [Row(**{name: row[name] for name in Row.__annotations__}) for row in values["rows"]]
    if not rows or not rows[0].perplexity or not rows[0].num_bytes:
        raise ValueError(f"{folder / DEMO_FILE} has no dense model to compare with; run prunus demo again")
    shares = [r.perplexity / rows[0].perplexity - 1 for r in rows]
    cells = [
        [r.name, r.done, cell(r.perplexity), cell(100 * share, partial(signed, decimals=1)), cell(r.num_bytes / 1e6)]
        for r, share in zip(rows, shares, strict=True)
    ]
    columns = ["model", "what was done", "perplexity", "change, %", "MB"]
    table = NumberTable("All models on the same held-out data", columns, cells)
    texts = "".join(f"<h3>{escape(n)}</h3><pre {WRAPPED}>{escape(t)}</pre>" for n, t in values["texts"].items())
    after = f"After {values['prompt'].strip()!r}, drawn with the same random numbers."
    parts = [
        Section("models", "What each model lost, and how large it is", "", picture=_bars(rows)),
        Section("numbers", "The numbers", "", tables=[table]),
        Section("texts", "What they write", after, picture=texts),
    ]
    return Page("demo", folder.resolve().name, in_one_line(rows, values["settings"]["sparsity"]), ABOUT, parts)


def _bars(rows: Sequence[Row]) -> str:
    added, sizes = [max(0.0, r.perplexity / rows[0].perplexity - 1) for r in rows], [r.num_bytes for r in rows]
    headings = zip(BARS, ("perplexity", "file"), strict=True)
    drawn = [_text(start, 14, heading, "muted") for (start, _), heading in headings]
    for number, row in enumerate(rows):
        y = LINE * (number + 1)
        drawn.append(_text(0, y + 14, row.name, "ink"))
        says = f"{plain(row.perplexity)}" + (f" ({change(row, rows[0])})" if number else "")
        for (start, width), values, said, colour in (
            (BARS[0], added, says, "arm-2"),
            (BARS[1], sizes, f"{row.num_bytes / 1e6:.2f} MB", "arm-1"),
        ):
            length = (width - 110) * values[number] / (max(values) or 1)
            drawn.append(
                f'<rect x="{start}" y="{y + 2}" width="{length:.1f}" height="16" style="fill: var(--{colour})"/>'
            )
            drawn.append(_text(start + length + 6, y + 14, said, "soft"))
    height = LINE * (len(rows) + 1)
    return (
        f'<svg viewBox="0 0 480 {height}" role="img" aria-label="Perplexity and size of each model" '
        f'style="width: 100%; max-width: 46rem; font: 12px var(--sans)">{"".join(drawn)}</svg>'
    )


def _text(x: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" style="fill: var(--{colour})">{escape(words)}</text>'
