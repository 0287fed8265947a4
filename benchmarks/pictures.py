"""The pictures in ``docs/pictures``, drawn from the records, and the figures in ``README.md``.

An SVG carries both of its themes, and a background of its own, so that it can be read wherever it is shown.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from . import readme
from .benchmark import Record, newest_records
from .repair_page import Figures, figures_of
from .repair_study import WAYS
from .select import OURS

WIDTH = 680
MODEL = "stories15M"  # the model that all ways of the picture were measured on
COLOURS = {  # class: light, dark
    "paper": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#30363d"),
    "plum": ("#8a1c4a", "#f0709f"),
    "rose": ("#c2557f", "#d98aa9"),
    "moss": ("#57741f", "#a3c65c"),
    "sand": ("#8b6a2b", "#d8b26a"),
    "slate": ("#4a6280", "#8fb0d6"),
}
WAY_COLOURS = {"magnitude": "soft", "wanda": "sand", "llmc-sparsegpt": "slate", "repair": "rose", "tuned": "plum"}


# Parts of a picture


def svg(height: int, title: str, parts: Sequence[str]) -> str:
    """A whole file; every line of ``parts`` is one element."""
    themes = [
        "".join(f".{name}{{fill:{pair[i]}}}.s-{name}{{stroke:{pair[i]}}}" for name, pair in COLOURS.items())
        for i in (0, 1)
    ]
    lines = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">
<title id="title">{escape(title)}</title>
<style>
text{{font:15px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.h{{font-size:18px;font-weight:600}}.b{{font-weight:600}}.small{{font-size:13px}}.no-fill{{fill:none}}
{themes[0]}
@media (prefers-color-scheme:dark){{{themes[1]}}}
</style>
<rect class="paper" width="{WIDTH}" height="{height}" rx="10"/>
{lines}
</svg>
"""


def text(x: float, y: float, words: str, classes: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" class="no-fill s-{colour}" stroke-width="{width}"{dashed}/>'


def dot(x: float, y: float, colour: str, radius: float = 3.5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{colour}"/>'


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Heights of labels, moved down as far as is needed for ``gap`` between neighbours."""
    found, last = [0.0] * len(places), -math.inf
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        last = found[index] = max(places[index], last + gap)
    return found


def ticks(low: float, high: float) -> Iterator[float]:
    """1, 3, 10, 30, ... between two numbers."""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (value for value in (10.0**power, 3 * 10.0**power) if low <= value <= high)


# The pictures


def quality(folder: Path) -> str:
    """Perplexity over sparsity: the ways of others, repair, and the dense model; a dot is a draw of the samples."""
    model = next(model for model in figures_of(folder) if model.name == MODEL)
    levels = [level for level in model.levels if level != "2:4"]
    ways = [way for way in WAY_COLOURS if all(model.values(way, level) for level in levels)]
    largest = max(value for way in ways for level in levels for value in model.values(way, level).values())
    low, high, top, bottom, left, right = model.dense * 0.8, largest * 1.3, 76, 350, 62, 452

    def x(sparsity: float) -> float:
        return left + (right - left) * sparsity / int(levels[-1])

    def y(value: float) -> float:
        return bottom - (bottom - top) * math.log(value / low) / math.log(high / low)

    title = f"How good a model stays: {MODEL}, pruned after training"
    parts = [text(24, 34, title, "ink h")]
    parts.append(text(24, 58, "perplexity on held-out text, lower is better", "soft"))
    for value in ticks(low, high):
        parts.append(line([(left, y(value)), (right, y(value))], "line"))
        parts.append(text(left - 8, y(value) + 5, f"{value:g}", "soft", "end"))
    parts += [text(x(int(level)), bottom + 24, f"{level} %", "soft", "middle") for level in ("0", *levels)]
    parts.append(text((left + right) / 2, bottom + 46, "of the weights are zero", "soft", "middle"))
    parts.append(line([(left, y(model.dense)), (right, y(model.dense))], "moss", 2, "5 4"))
    ends = [(y(model.dense), "dense", model.dense, "moss")]
    for way in ways:
        colour, means = WAY_COLOURS[way], [(level, model.mean(way, level) or 0.0) for level in levels]
        path = [(x(0), y(model.dense)), *((x(int(level)), y(mean)) for level, mean in means)]
        parts.append(line(path, colour, 3 if way in ("repair", "tuned") else 2))
        parts += [dot(x(int(level)), y(v), colour) for level in levels for v in model.values(way, level).values()]
        ends.append((path[-1][1], _short(way), means[-1][1], colour))
    places = apart([end[0] for end in ends], 19)
    for place, (_, name, value, colour) in zip(places, ends, strict=True):
        weight = " b" if colour in ("rose", "plum") else ""
        parts.append(text(right + 12, place + 5, f"{name}  {model.number(value)}", colour + weight))
    parts.append(text(24, bottom + 76, _draws(model, ways, levels), "soft small"))
    return svg(bottom + 96, f"{title}: {', '.join(f'{name} {model.number(v)}' for _, name, v, _ in ends)}", parts)


def _short(way: str) -> str:
    names = {"magnitude": "magnitude", "repair": "prunus", "tuned": "prunus, tuned"}
    return names.get(way) or WAYS[way].title.split()[0]


def _draws(model: Figures, ways: Sequence[str], levels: Sequence[str]) -> str:
    """How many draws stand behind the dots."""
    counts = {way: min(len(model.values(way, level)) for level in levels) for way in ways if way != "magnitude"}
    fewer = [f"{num} of {_short(way)}" for way, num in counts.items() if num < model.num_seeds]
    settings = model.settings
    return (
        f"A dot is one draw of {settings['samples']} x {settings['length']} calibration tokens; {model.num_seeds} draws"
        + (f", {', '.join(fewer)}" if fewer else "")
        + ". More: docs/repair.md"
    )


def event(folder: Path) -> str:
    """Time of finding masks, ours beside the ways of others, on the machine and weights with the most of them."""
    record = _largest(folder)
    settings, rows = record["settings"], {row["method"]: row for row in record["rows"]}
    names = {
        "exact: cat, kthvalue": "torch.kthvalue",
        "torch.nn.utils.prune (magnitude)": "torch.nn.utils.prune",
        "sampled: 2 % of cat": "sample of 2 %",
        "sampled: 1 %, cached scores": "sample of 1 %",
        "exact: cat, topk": "torch.topk",
        OURS: "prunus",
    }
    found = sorted((rows[method] | {"name": name} for method, name in names.items()), key=lambda row: -row["ms"])
    low, high, left, right, top, step = min(row["ms"] for row in found) / 2, found[0]["ms"], 190, 386, 104, 32

    def x(ms: float) -> float:
        return left + (right - left) * math.log(ms / low) / math.log(high / low)

    num = f"{settings['num_weights'] / 1e6:,.0f} million weights"
    title = f"How long it takes to find the masks: {num}"
    machine = record["environment"]["machine"]
    parts = [text(24, 34, title, "ink h")]
    parts.append(
        text(24, 58, f"{machine}, {settings['dtype']}, {settings['score']}, {settings['sparsity']:.0%}", "soft")
    )
    bottom = top + step * len(found) - 12
    parts += [text(480, 84, "time", "soft small", "end"), text(572, 84, "memory", "soft small", "end")]
    parts += [text(664, 84, "count off by", "soft small", "end")]
    for value in (10.0**power for power in range(4) if low <= 10.0**power <= high):
        parts.append(line([(x(value), top - 14), (x(value), bottom)], "line"))
        parts.append(
            text(
                x(value),
                bottom + 18,
                f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s",
                "soft small",
                "middle",
            )
        )
    for index, row in enumerate(found):
        y, is_ours = top + step * index, row["name"] == "prunus"
        colour, weight = ("plum", " b") if is_ours else ("slate", "")
        number = f"{row['ms']:,.0f}" if row["ms"] >= 100 else f"{row['ms']:.1f}"
        parts.append(text(left - 14, y + 5, row["name"], f"{colour if is_ours else 'ink'}{weight}", "end"))
        parts += [line([(left, y), (x(row["ms"]), y)], colour, 2), dot(x(row["ms"]), y, colour, 6)]
        parts.append(text(480, y + 5, f"{number} ms", f"ink{weight}", "end"))
        parts.append(text(572, y + 5, f"{row['extra_mib']:,.0f} MiB", f"ink{weight}", "end"))
        parts.append(text(664, y + 5, f"{abs(row['kept_too_many']):,}", f"ink{weight}", "end"))
    parts.append(
        text(
            24,
            bottom + 46,
            "The axis is logarithmic. torch.nn.utils.prune goes by magnitude. More: docs/benchmarks.md",
            "soft small",
        )
    )
    return svg(int(bottom + 66), title, parts)


def _largest(folder: Path) -> Record:
    """The record of the most weights that has the ways of others."""
    found = [record for record in newest_records(folder) if record["what"] == "select" and len(record["rows"]) > 6]
    if not found:
        raise ValueError(f"there is no record of finding masks in {folder}; run python -m benchmarks select")
    return max(found, key=lambda record: record["settings"]["num_weights"])


def flow(side: int = 8) -> str:
    """score -> select -> mask -> apply, on a weight of ``side`` x ``side`` that is pruned to half by bitter7."""
    draw = random.Random(7)
    weights = [draw.gauss(0, 1) for _ in range(side * side)]
    scores = [abs(w) * draw.uniform(0.2, 1.0) ** 0.5 for w in weights]  # the second factor is v^(1/4)
    order = sorted(range(side * side), key=lambda index: scores[index])
    dropped, cell, top = set(order[: side * side // 2]), 14, 112
    size = cell * side
    lefts = [24 + index * (WIDTH - 48 - size) / 3 for index in range(4)]

    def grid(left: float, opacity: Sequence[float], colour: str) -> Iterator[str]:
        for index, value in enumerate(opacity):
            x, y = left + cell * (index % side), top + cell * (index // side)
            shown = f'class="{colour}" fill-opacity="{value:.2f}"' if value else 'class="no-fill s-line"'
            yield f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{cell - 2}" height="{cell - 2}" rx="2" {shown}/>'

    largest, heaviest = max(scores), max(map(abs, weights))
    steps = [
        ("score", "what matters"),
        ("select", "the exact cut"),
        ("mask", "one bit a weight"),
        ("apply", "zeros stay zero"),
    ]
    parts = [text(24, 34, "An event: score, select, mask, apply", "ink h")]
    parts.append(text(24, 58, "the schedule says when and how much, the selector says where", "soft"))
    for index, (left, (name, about)) in enumerate(zip(lefts, steps, strict=True)):
        parts.append(text(left + size / 2, top - 16, name, "plum b", "middle"))
        parts.append(text(left + size / 2, top + size + 26, about, "soft small", "middle"))
        if index < 3:
            start, end, y = left + size + 14, lefts[index + 1] - 14, top + size / 2
            parts.append(line([(start, y), (end, y)], "soft", 2))
            parts.append(line([(end - 7, y - 5), (end, y), (end - 7, y + 5)], "soft", 2))
    parts += grid(lefts[0], [0.1 + 0.9 * score / largest for score in scores], "plum")
    width = size / len(order)
    for place, index in enumerate(order):  # scores in order, those below the cut in grey
        tall = size * scores[index] / largest
        where = (
            f'x="{lefts[1] + width * place:.2f}" y="{top + size - tall:.2f}" width="{width:.2f}" height="{tall:.2f}"'
        )
        parts.append(f'<rect {where} class="{"line" if index in dropped else "plum"}"/>')
    middle = lefts[1] + size / 2
    parts.append(line([(middle, top - 4), (middle, top + size + 4)], "ink", 1.5, "4 3"))
    parts += grid(lefts[2], [0.0 if index in dropped else 1.0 for index in range(side * side)], "ink")
    kept = [0.0 if index in dropped else 0.1 + 0.9 * abs(w) / heaviest for index, w in enumerate(weights)]
    parts += grid(lefts[3], kept, "moss")
    return svg(top + size + 48, "An event: score, select, mask, apply", parts)


@dataclass(frozen=True)
class Series:
    """Models of one kind, the whole dense one first: a label and an arm with its sparsity for each."""

    name: str
    colour: str
    models: tuple[tuple[str, str, float], ...]


def _pruned(*levels: int) -> Series:
    return Series("pruned", "plum", tuple((f"{level} %", "bitter7 rate 1", level / 100) for level in levels))


SIZES = {  # title, study: what its models are compared with
    ("51 M weights, books", "gpt2-rates"): (
        Series("fewer blocks", "sand", (("4 blocks", "dense, 4 blocks", 0.0), ("2 blocks", "dense, 2 blocks", 0.0))),
        Series("narrower", "slate", (("448", "dense, width 448", 0.0), ("384", "dense, width 384", 0.0))),
        _pruned(50, 80, 90),
    ),
    ("0.8 M weights, Python's source", "gpt2-tiny-rates"): (
        Series("fewer blocks", "sand", (("2 blocks", "dense, 2 blocks", 0.0), ("1 block", "dense, 1 block", 0.0))),
        Series("narrower", "slate", (("96", "dense, width 96", 0.0), ("64", "dense, width 64", 0.0))),
        _pruned(50, 80),
    ),
}


def sizes(studies: Path) -> str:
    """Perplexity over stored bytes: a GPT that was pruned while it trained, and dense ones that are smaller."""
    title, top, bottom = "Pruned, or smaller from the start?", 112, 330
    parts = [text(24, 34, title, "ink h")]
    about = "perplexity on held-out text over megabytes in a file, lower is better; equal tokens"
    parts.append(text(24, 58, about, "soft"))
    for panel, ((name, study), series) in enumerate(SIZES.items()):
        parts += _panel(studies / study, name, series, (72 + 316 * panel, 340 + 316 * panel, top, bottom))
    return svg(bottom + 92, title, [*parts, *_footer(bottom)])


def _panel(study: Path, name: str, series: Sequence[Series], box: tuple[float, float, float, float]) -> Iterator[str]:
    rows = {(row["arm"], row["sparsity"]): row for row in json.loads((study / "study_result.json").read_text())["rows"]}
    stored = _megabytes(study)
    whole = ("dense", 0.0)
    keys = [whole, *((arm, level) for each in series for _, arm, level in each.models)]
    left, right, top, bottom = box
    values = [value for key in keys for value in rows[key]["values"]]
    low, high = _wider(min(values), max(values))
    least, most = _wider(min(stored[key] for key in keys), max(stored[key] for key in keys))

    def x(key: tuple[str, float]) -> float:
        return left + (right - left) * (stored[key] - least) / (most - least)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    yield text(left, top - 20, name, "ink b")
    for value in _round_ticks(low, high):
        yield line([(left, y(value)), (right, y(value))], "line")
        yield text(left - 8, y(value) + 5, f"{value:g}", "soft", "end")
    for value in _round_ticks(least, most):
        place = left + (right - left) * (value - least) / (most - least)
        yield text(place, bottom + 22, f"{value:g}", "soft", "middle")
    for each in series:
        own = [whole, *((arm, level) for _, arm, level in each.models)]
        yield line([(x(key), y(rows[key]["mean"])) for key in own], each.colour, 2)
        for label, arm, level in each.models:
            places = [y(value) for value in rows[arm, level]["values"]]
            yield from (dot(x((arm, level)), place, each.colour, 3) for place in places)
            height = {"plum": max(places) + 17, "sand": min(places) - 8}.get(each.colour, max(places) + 5)
            side = ("end", -8) if each.colour == "slate" else ("middle", 0)
            yield text(x((arm, level)) + side[1], height, label, f"{each.colour} small", side[0])
    places = [y(value) for value in rows[whole]["values"]]
    yield from (dot(x(whole), place, "moss", 3) for place in places)
    yield text(x(whole), max(places) + 17, "dense", "moss small b", "middle")


def _wider(low: float, high: float) -> tuple[float, float]:
    """Both, moved apart for a margin."""
    return low - 0.12 * (high - low), high + 0.1 * (high - low)


def _megabytes(study: Path) -> dict[tuple[str, float], float]:
    """What a model of an arm and sparsity takes in a file in bfloat16: the values that are not zero, a bit a weight."""
    found = {}
    for text_of_run in (study / "runs.jsonl").read_text().splitlines():
        run = json.loads(text_of_run)
        cell, result = run["cell.json"], run["result.json"]
        mask = result["num_prunable"] / 8 if cell["sparsity"] else 0
        values = result["num_parameters"] - result["sparsity"] * result["num_prunable"]
        found[cell["arm"], cell["sparsity"]] = (2 * values + mask) / 1e6
    return found


def _round_ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two others."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _footer(bottom: float) -> Iterator[str]:
    for index, each in enumerate(next(iter(SIZES.values()))):
        yield line([(24 + 150 * index, bottom + 47), (44 + 150 * index, bottom + 47)], each.colour, 3)
        yield text(50 + 150 * index, bottom + 52, each.name, each.colour)
    yield text(24, bottom + 76, "A dot is a seed. Pruned by bitter7, rate 1. More: docs/results.md", "soft small")


def pictures(folder: Path, studies: Path) -> dict[str, str]:
    """Every picture by the name of its file."""
    drawn = {"quality.svg": quality(folder), "event.svg": event(folder), "flow.svg": flow()}
    return drawn | {"sizes.svg": sizes(studies)}


@dataclass(frozen=True)
class Pictures:
    """Draw docs/pictures from all results, and write the figures of README.md between their marks."""

    results: Path = Path("benchmarks/results")  # folder of the JSON files
    studies: Path = Path("studies")  # folder of the finished studies
    out: Path = Path("docs/pictures")  # folder to write
    readme: Path = Path("README.md")  # page whose figures are written anew

    def run(self) -> None:
        page = readme.page(self.readme.read_text(), self.results, self.studies)
        drawn = pictures(self.results, self.studies)
        self.out.mkdir(parents=True, exist_ok=True)
        for path, content in {self.readme: page, **{self.out / name: drawn[name] for name in drawn}}.items():
            path.write_text(content)
            print(f"{path} written")
