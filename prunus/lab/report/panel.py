"""A panel is a chart with its words: caption, description for those who cannot see it, and its numbers as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .numbers import number, plain

Trace = dict[str, Any]

# colours are names of custom properties of the page, which knows light and dark
INK, MUTED, OTHER, GRID, PAPER = (f"var(--{name})" for name in ("ink", "muted", "other", "grid", "paper"))
COLOURS = {"dense": INK, "magnitude": "var(--magnitude)", "random": "var(--random)"}
DASHES = {"dense": "solid", "magnitude": "dash", "random": "dot"}
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
NUM_COLOURS = 4
BAR = 26  # pixels a row of a chart with arms below each other
SAID = 12  # rows of a table that describe a chart
LONG = 36  # letters of a label beside which half a page leaves no room for a chart


@dataclass(frozen=True)
class Number:
    shown: str
    value: float | None


@dataclass(frozen=True)
class Word:
    """A text with a meaning that has a colour."""

    shown: str
    kind: str  # better, worse or none


@dataclass(frozen=True)
class NumberTable:
    """Cells are text, words or numbers; numbers stand to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    looks: Mapping[int, str] = field(default_factory=dict)  # rows that stand out: best, first of a group
    kind: str = ""  # config: names and values
    folded: str = ""  # what a reader opens to see it


@dataclass(frozen=True)
class Panel:
    """One chart: traces and layout for the library, and the same as a table."""

    title: str
    traces: Sequence[Trace]
    layout: dict[str, Any]
    table: NumberTable
    height: int = 300
    is_wide: bool = False  # takes a line of the page by itself

    @property
    def description(self) -> str:
        """What a screen reader says in place of the picture: the end of the table, which follows as a whole."""
        rows = [zip(self.table.columns, row, strict=False) for row in self.table.rows[-SAID:]]
        said = "; ".join(", ".join(f"{name} {getattr(one, 'shown', one)}" for name, one in row) for row in rows)
        return f"{self.title}, {self.table.caption}: {said or 'nothing recorded'}."


@dataclass(frozen=True)
class Mark:
    """How an arm looks in every chart; arms beyond the colours are thin and grey."""

    colour: str
    dash: str = "solid"
    symbol: str = "circle"
    width: float = 2.0


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    text: str
    panels: Sequence[Panel] = ()
    tables: Sequence[NumberTable] = ()
    legend: Sequence[tuple[str, Mark]] = ()
    others: str = ""  # arms that are grey
    picture: str = ""  # SVG of our own


@dataclass(frozen=True)
class Page:
    kind: str  # what it is about
    title: str
    headline: str
    lede: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]] = ()  # names and numbers that stand out
    notes: Sequence[str] = ()


def marks_of(arms: Sequence[str], ranked: Sequence[str]) -> dict[str, Mark]:
    """A look for every arm: controls have their own, the first of ``ranked`` a colour each, the others are grey."""
    coloured = [name for name in arms if name not in COLOURS and name in ranked[:NUM_COLOURS]]
    marks = {name: Mark(COLOURS[name], DASHES[name]) for name in arms if name in COLOURS}
    for place, name in enumerate(coloured):
        marks[name] = Mark(f"var(--arm-{place + 1})", "solid", SYMBOLS[place])
    return {name: marks.get(name, Mark(OTHER, width=1.0)) for name in arms}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12}},
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": GRID,
        "automargin": True,
        "fixedrange": False,
        **more,
    }


def layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The look that all charts share; the page adds fonts and resolves colours."""
    return {
        "xaxis": dict(x),
        "yaxis": dict(y),
        "margin": {"l": 8, "r": 18, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--rule)", "font": {"color": INK}},
        **more,
    }


def dots(labels: Sequence[str], values: Sequence[float | None], marks: Sequence[Mark]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(values),
        "y": list(labels),
        "marker": {"color": [m.colour for m in marks], "symbol": [m.symbol for m in marks], "size": 10},
    }


def arms_panel(
    title: str,
    traces: Sequence[Trace],
    x: Mapping[str, Any],
    table: NumberTable,
    arms: Sequence[str],
    *,
    two_lines: bool = False,
) -> Panel:
    height = 80 + (BAR * 3 // 2 if two_lines else BAR) * len(arms)
    look = layout(x, axis("", type="category", dtick=1), hovermode="closest")
    return Panel(title, traces, look, table, height, is_wide=any(len(arm) > LONG for arm in arms))


def cell(value: Any, show: Callable[[float | None], str] = plain) -> Number:
    """A number for a table, as text in four digits or as ``show`` writes it; a dash for anything else."""
    return Number(show(number(value)), number(value))
