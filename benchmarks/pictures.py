"""The pictures in ``docs/pictures``, drawn from the records, and the figures in ``README.md``."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunus.plot import Axes, Figure

from .benchmark import filled, newest_records
from .bits_picture import bits, stored
from .drawing import (
    INK,
    LINE,
    MOSS,
    PLUM,
    ROSE,
    SAND,
    SLATE,
    SMALL,
    SOFT,
    apart,
    log_ticks,
    new_axes,
    new_figure,
    themed,
)
from .figures import ModelFigures, rows_of_study, runs_of_study
from .repair_figures import read_figures
from .repair_study import WAYS
from .select import OURS
from .summary import choices

MODEL = "stories15M"  # the model that all ways of the picture were measured on
METHOD_NAMES = {
    OURS: "prunus",
    "exact: cat, topk": "torch.topk",
    "sampled: 1 %, cached scores": "sample of 1 %",
    "sampled: 2 % of cat": "sample of 2 %",
    "torch.nn.utils.prune (magnitude)": "torch.nn.utils.prune",
    "exact: cat, kthvalue": "torch.kthvalue",
}
WAY_COLOURS = {"magnitude": SOFT, "wanda": SAND, "llmc-sparsegpt": SLATE, "repair": ROSE, "tuned": PLUM}


def quality(folder: Path) -> Figure:
    """Perplexity over sparsity: the ways of others, repair, and the dense model; a dot is a draw of the samples."""
    model = next(model for model in read_figures(folder) if model.name == MODEL)
    levels = [level for level in model.levels if level != "2:4"]
    ways = [way for way in WAY_COLOURS if all(model.values(way, level) for level in levels)]
    about = "perplexity on held-out text, lower is better"
    figure = new_figure(
        4.3, f"How good a model stays: {MODEL}, pruned after training", about, _draws(model, ways, levels)
    )
    axes = new_axes(figure, (0.6, 0.85, 4.0, 2.75))
    low, high = model.dense * 0.8, 1.3 * max(max(model.values(way, levels[-1]).values()) for way in ways)
    axes.set(yscale="log", ylim=(low, high), xlim=(0, int(levels[-1])))
    axes.set_xlabel("of the weights are zero", color=SOFT)
    axes.set_yticks(log_ticks(low, high), [f"{value:g}" for value in log_ticks(low, high)])
    axes.set_xticks([0, *map(int, levels)], [f"{level} %" for level in ("0", *levels)])
    axes.minorticks_off()
    axes.axhline(model.dense, color=MOSS, linewidth=1.5, linestyle=(0, (4, 3)))
    ends = [("dense", model.dense, MOSS)]
    for way in ways:
        means = [model.mean(way, level) or 0.0 for level in levels]
        is_ours = way in ("repair", "tuned")
        axes.plot(
            [0, *map(int, levels)], [model.dense, *means], color=WAY_COLOURS[way], linewidth=2 if is_ours else 1.5
        )
        dots = [(int(level), value) for level in levels for value in model.values(way, level).values()]
        axes.plot(*zip(*dots, strict=True), "o", color=WAY_COLOURS[way], markersize=4.5, clip_on=False)
        ends.append((_short(way), means[-1], WAY_COLOURS[way]))
    heights = apart([math.log(value / low) / math.log(high / low) for _, value, _ in ends], 0.068)
    for height, (name, value, colour) in zip(heights, ends, strict=True):
        bold = "bold" if colour in (ROSE, PLUM) else "normal"
        words = f"{name}  {model.number(value)}"
        axes.text(1.03, height, words, transform=axes.transAxes, color=colour, fontweight=bold, va="center")
    return figure


def _short(way: str) -> str:
    names = {"magnitude": "magnitude", "repair": "prunus", "tuned": "prunus, tuned"}
    return names.get(way) or WAYS[way].title.split()[0]


def _draws(model: ModelFigures, ways: Sequence[str], levels: Sequence[str]) -> str:
    """How many draws stand behind the dots."""
    counts = {way: min(len(model.values(way, level)) for level in levels) for way in ways if way != "magnitude"}
    fewer = "".join(f", {num} of {_short(way)}" for way, num in counts.items() if num < model.num_seeds)
    size = f"{model.settings['samples']} x {model.settings['length']}"
    draws = f"A dot is one draw of {size} calibration tokens; {model.num_seeds} draws"
    return f"{draws}{fewer}. More: docs/evidence/repair.md"


def event(folder: Path) -> Figure:
    """Time of finding masks, ours beside the ways of others, on the machine and weights with the most of them."""
    records = [record for record in newest_records(folder, "select") if len(record["rows"]) > 6]
    if not records:
        raise ValueError(f"there is no record of finding masks in {folder}; run python -m benchmarks select")
    record = max(records, key=lambda record: record["settings"]["num_weights"])
    rows = sorted((row for row in record["rows"] if row["method"] in METHOD_NAMES), key=lambda row: row["ms"])
    settings, machine = record["settings"], record["environment"]["machine"]
    title = f"How long it takes to find the masks: {settings['num_weights'] / 1e6:,.0f} million weights"
    about = f"{machine}, {settings['dtype']}, {settings['score']}, {settings['sparsity']:.0%}"
    below = "The axis is logarithmic. torch.nn.utils.prune goes by magnitude. More: docs/evidence/benchmarks.md"
    figure = new_figure(3.4, title, about, below)
    axes = new_axes(figure, (1.75, 0.65, 2.0, 1.95), grid="x")
    left = rows[0]["ms"] / 2
    axes.set(xscale="log", xlim=(left, 1.1 * rows[-1]["ms"]), ylim=(-0.6, len(rows) - 0.4))
    axes.set_xticks([10, 100, 1000], ["10 ms", "100 ms", "1 s"])
    axes.set_yticks(range(len(rows)), [METHOD_NAMES[row["method"]] for row in rows])
    axes.minorticks_off()
    places = {"time": 1.47, "memory": 1.96, "count off by": 2.43}
    for heading, place in places.items():
        axes.text(place, 1.04, heading, transform=axes.transAxes, color=SOFT, fontsize=SMALL, ha="right")
    for y, row in enumerate(rows):
        colour, weight = (PLUM, "bold") if row["method"] == OURS else (SLATE, "normal")
        axes.hlines(y, left, row["ms"], color=colour, linewidth=1.5)
        axes.plot(row["ms"], y, "o", color=colour, markersize=8, clip_on=False)
        axes.get_yticklabels()[y].set(color=PLUM if row["method"] == OURS else INK, fontweight=weight)
        time = f"{row['ms']:,.0f} ms" if row["ms"] >= 100 else f"{row['ms']:.1f} ms"
        cells = (time, f"{row['extra_mib']:,.0f} MiB", f"{abs(row['kept_too_many']):,}")
        style: dict[str, Any] = {"color": INK, "fontweight": weight, "ha": "right", "va": "center"}
        for place, cell in zip(places.values(), cells, strict=True):
            axes.text(place, y, cell, transform=axes.get_yaxis_transform(), **style)
    return figure


def flow(side: int = 8) -> Figure:
    """score -> select -> mask -> apply, on a weight of ``side`` x ``side`` that is pruned to half by bitter7."""
    draw, num = random.Random(7), side * side
    weights = [draw.gauss(0, 1) for _ in range(num)]
    scores = [abs(w) * draw.uniform(0.2, 1.0) ** 0.5 for w in weights]  # the second factor is v^(1/4)
    order = sorted(range(num), key=lambda index: scores[index])
    kept = set(order[num // 2 :])
    about = "the schedule says when and how much, the selector says where"
    figure = new_figure(2.8, "An event: score, select, mask, apply", about)
    steps = {"score": "what matters", "select": "the exact cut", "mask": "one bit a weight", "apply": "zeros stay zero"}
    every = [new_axes(figure, (0.25 + 1.73 * index, 0.55, 1.12, 1.12), grid=None) for index in range(4)]
    for axes, (name, below) in zip(every, steps.items(), strict=True):
        axes.set_title(name, color=PLUM, fontweight="bold", fontsize=10)
        axes.set_xlabel(below, color=SOFT, fontsize=SMALL, labelpad=8)
    for axes in every[:3]:
        arrow = {"arrowstyle": "->", "color": SOFT, "linewidth": 1.5}
        axes.annotate("", (1.46, 0.5), (1.08, 0.5), xycoords="axes fraction", arrowprops=arrow)
    _grid(every[0], side, dict(enumerate(scores)), PLUM)
    _grid(every[2], side, dict.fromkeys(kept, 1.0), INK)
    _grid(every[3], side, {index: abs(weights[index]) for index in kept}, MOSS)
    heights = [scores[index] for index in order]
    every[1].stairs(heights[: num // 2], range(num // 2 + 1), fill=True, color=LINE)
    every[1].stairs(heights[num // 2 :], range(num // 2, num + 1), fill=True, color=PLUM)
    every[1].axvline(num / 2, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    return figure


def _grid(axes: Axes, side: int, values: Mapping[int, float], colour: str) -> None:
    """A square for each weight, stronger for a larger value; one without a value is empty."""
    from matplotlib.colors import to_rgba

    axes.set(xlim=(-0.5, side - 0.5), ylim=(side - 0.5, -0.5))
    places = [(index % side, index // side) for index in values]
    shades = [to_rgba(colour, 0.1 + 0.9 * value / max(values.values())) for value in values.values()]
    axes.scatter(*zip(*places, strict=True), s=75, marker="s", color=shades, linewidths=0)
    empty = [(index % side, index // side) for index in range(side * side) if index not in values]
    axes.scatter([x for x, _ in empty], [y for _, y in empty], s=60, marker="s", facecolors="none", edgecolors=LINE)


@dataclass(frozen=True)
class Series:
    """Models of one kind, the whole dense one first: a label and an arm with its sparsity for each."""

    name: str
    colour: str
    models: tuple[tuple[str, str, float], ...]


def _pruned(*levels: int) -> Series:
    return Series("pruned", PLUM, tuple((f"{level} %", "bitter7 rate 1", level / 100) for level in levels))


SIZES = {  # title, study: what its models are compared with
    ("51 M weights, books", "gpt2-rates"): (
        Series("fewer blocks", SAND, (("4 blocks", "dense, 4 blocks", 0.0), ("2 blocks", "dense, 2 blocks", 0.0))),
        Series("narrower", SLATE, (("448", "dense, width 448", 0.0), ("384", "dense, width 384", 0.0))),
        _pruned(50, 80, 90),
    ),
    ("0.8 M weights, Python's source", "gpt2-tiny-rates"): (
        Series("fewer blocks", SAND, (("2 blocks", "dense, 2 blocks", 0.0), ("1 block", "dense, 1 block", 0.0))),
        Series("narrower", SLATE, (("96", "dense, width 96", 0.0), ("64", "dense, width 64", 0.0))),
        _pruned(50, 80),
    ),
}


def sizes(studies: Path) -> Figure:
    """Perplexity over stored bytes: a GPT that was pruned while it trained, and dense ones that are smaller."""
    about = "perplexity on held-out text over megabytes in a file, lower is better; equal tokens"
    below = "A dot is a seed. Pruned by bitter7, rate 1. More: docs/evidence/results.md"
    figure = new_figure(4.2, "Pruned, or smaller from the start?", about, below)
    for panel, ((name, study), series) in enumerate(SIZES.items()):
        axes = new_axes(figure, (0.65 + 3.15 * panel, 0.85, 2.75, 2.3))
        axes.set_title(name, loc="left", color=INK, fontweight="bold", fontsize=10)
        _panel(axes, studies / study, series)
    lines = figure.axes[0].lines[: len(next(iter(SIZES.values())))]
    figure.legend(handles=lines, loc=(0.03, 0.075), ncols=3, frameon=False, labelcolor="linecolor")
    return figure


def _panel(axes: Axes, study: Path, series: Sequence[Series]) -> None:
    rows, stored, whole = rows_of_study(study), _megabytes(study), ("dense", 0.0)
    for each in series:
        keys = [whole, *((arm, level) for _, arm, level in each.models)]
        axes.plot(
            [stored[key] for key in keys], [rows[key]["mean"] for key in keys], color=each.colour, label=each.name
        )
    labels = [(label, (arm, level), each.colour) for each in series for label, arm, level in each.models]
    for label, key, colour in [*labels, ("dense", whole, MOSS)]:
        values = rows[key]["values"]
        axes.plot([stored[key]] * len(values), values, "o", color=colour, markersize=4)
        above = colour == SAND
        place = (stored[key], max(values) if above else min(values))
        shift = (3 if colour == SLATE else 0, 6 if above else -6)
        aligned = {"ha": "left" if colour == SLATE else "center", "va": "bottom" if above else "top"}
        axes.annotate(label, place, shift, textcoords="offset points", color=colour, fontsize=SMALL, **aligned)
    axes.margins(0.12)


def _megabytes(study: Path) -> dict[tuple[str, float], float]:
    """What a model of an arm and sparsity takes in a file in bfloat16: the values that are not zero, a bit a weight."""
    megabytes = {}
    for cell, result in runs_of_study(study):
        mask = result["num_prunable"] / 8 if cell["sparsity"] else 0
        values = result["num_parameters"] - result["sparsity"] * result["num_prunable"]
        megabytes[cell["arm"], cell["sparsity"]] = (2 * values + mask) / 1e6
    return megabytes


def figures(folder: Path, studies: Path) -> dict[str, tuple[Figure, str]]:
    """Every picture and its title, by the name of its file."""
    return {
        "quality.svg": (quality(folder), "Quality over sparsity after pruning"),
        "event.svg": (event(folder), "Time of finding the masks"),
        "flow.svg": (flow(), "An event: score, select, mask, apply"),
        "bits.svg": (bits(folder, studies), "Quality over bits a weight: dense, sparse and smaller models"),
        "stored.svg": (stored(folder, studies), "Quality over bytes: dense, sparse, shrunk and smaller models"),
        "sizes.svg": (sizes(studies), "Quality over size: pruned while training, and smaller from the start"),
    }


@dataclass(frozen=True)
class Pictures:
    """Draw docs/pictures from all results, and write the figures of README.md between their marks."""

    results: Path = Path("benchmarks/results")  # folder of the JSON files
    studies: Path = Path("studies")  # folder of the finished studies
    out: Path = Path("docs/pictures")  # folder to write
    readme: Path = Path("README.md")  # page whose figures are written anew

    def run(self) -> None:
        parts = {"figures": choices(self.results, self.studies)}
        contents = {self.readme: filled(self.readme.read_text(), parts)}
        for name, (figure, title) in figures(self.results, self.studies).items():
            contents[self.out / name] = themed(figure, title)
        self.out.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            path.write_text(content)
            print(f"{path} written")
