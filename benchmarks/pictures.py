"""The pictures in ``docs/pictures``, drawn from the records, and the figures in ``README.md``."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import readme
from .benchmark import Record, newest_records
from .drawing import WIDTH, apart, dot, line, svg, text, ticks
from .repair_page import Figures, figures_of
from .repair_study import WAYS
from .select import OURS
from .size_picture import sizes

MODEL = "stories15M"  # the model that all ways of the picture were measured on
WAY_COLOURS = {"magnitude": "soft", "wanda": "sand", "llmc-sparsegpt": "slate", "repair": "rose", "tuned": "plum"}


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
