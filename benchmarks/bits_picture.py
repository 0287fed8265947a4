"""What models lose over the bits that they take a weight, and one of them over its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunus.plot import Axes, Figure

from .bits_figures import ORDER, SHRUNK, SPARSE, USABLE, Arm, BitsFigures, percent, read_figures
from .bits_study import GROUPS
from .drawing import INK, MOSS, PLUM, SAND, SLATE, SMALL, SOFT, new_axes, new_figure
from .recover_figures import read_figures as read_recovered
from .shrink_figures import LEARNED
from .shrink_figures import read_figures as read_shrunk
from .study import level_name, share_of

DASHED = (0, (4, 3))
LINEAR = 1.0  # percent up to which the axis is not logarithmic
TICKS = (0, 1, 3, 10, 30)  # percent above dense
BITS = (2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Family:
    """A curve: arms of some ways, in so many bits, or with None in any number."""

    name: str
    colour: str
    ways: tuple[str, ...]
    bits: int | None

    def points(self, arms: Sequence[Arm]) -> list[Arm]:
        """The best arm of each level and number of bits, however it was rounded, from few bits to many."""
        best: dict[tuple[str, int], Arm] = {}
        for arm in (arm for arm in arms if arm.way in self.ways and arm.is_usable):
            key = arm.level, arm.num_bits
            if self.bits in (None, key[1]):
                best[key] = min(best.get(key, arm), arm, key=lambda arm: arm.loss)
        return sorted(best.values(), key=lambda arm: arm.bits)


FAMILIES = (
    Family("dense in 16 to 2 bits", SLATE, ("dense",), None),
    Family("sparse, 16 bits", PLUM, SPARSE, 16),
    Family("sparse, 4 bits", PLUM, SPARSE, 4),
    Family("shrunk, 16 bits", SAND, SHRUNK, 16),
    Family("shrunk, 4 bits", SAND, SHRUNK, 4),
    Family("smaller, 16 bits", MOSS, ("small",), 16),
    Family("smaller, 4 bits", MOSS, ("small",), 4),
)


PLAIN = ("", *map(str, GROUPS))  # forms that every family has
WORDS = {  # family: which of its points have words, how far from the point, and which end of them is there
    "dense in 16 to 2 bits": {
        "16": ((0, 8), "center"),
        "8": ((0, -9), "center"),
        "4": ((-7, -6), "right"),
        "3": ((6, 3), "left"),
        "2": ((0, 8), "center"),
    },
    "sparse, 16 bits": {"50": ((7, 5), "left"), "80": ((7, 4), "left")},
    "sparse, 4 bits": dict.fromkeys(("50", "80", "90"), ((-7, -4), "right")),
    "shrunk, 16 bits": {"25": ((7, 2), "left"), "50": ((-7, -1), "right")},
    "smaller, 16 bits": {"50": ((-7, -1), "right"), "75": ((7, 4), "left")},
}


def shrunk_arms(folder: Path, name: str) -> list[Arm]:
    """The best shrunk and recovered model of each level, in 16 bits, by another study of the same model."""
    arms = []
    for model in read_shrunk(folder):
        for level in model.levels if model.name == name else ():
            if best := model.best(LEARNED, level):
                loss = model.above(best, level)
                assert loss is not None
                arms.append(Arm("shrink-recover", level, "", 16 * float(1 - share_of(level)), loss))
    return arms


def stored(folder: Path, studies: Path) -> Figure:
    """The picture of ``README.md``: what one model loses over the megabytes of its blocks, with words at the points."""
    model = next(model for model in read_figures(folder, studies) if model.figures.name == ORDER[0])
    arms = [arm for arm in model.arms if arm.form in PLAIN] + shrunk_arms(folder, model.figures.name)
    weights = next(iter(model.figures.rows["dense", ""].values()))["num_weights"]
    about = (
        f"increase in perplexity over dense (log scale), by size of the blocks' weights in a file; {model.figures.name}"
    )
    control = next(each for each in read_recovered(folder) if each.name == model.figures.name)
    trained = control.beside("control", "").replace("%", " %")
    below = (
        "Sparse and shrunk models learned from the dense one for 360 steps. With as many more steps, the dense one\n"
        f"itself changes by {trained}. Smaller: trained from the start with fewer weights. More: docs/evidence/bits.md"
    )
    figure = new_figure(5.2, "How small a model gets, and what that costs", about, below)
    axes = new_axes(figure, (0.6, 1.4, 5.95, 3.1))
    for family in FAMILIES:
        if points := family.points(arms):
            places = _draw(axes, family, points, weights / 8e6, 5, 1.8)
            _say(axes, family, points, places)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR / 2, linscale=LINEAR / 2)
    axes.set(xlim=(2.1, 90), ylim=(-0.3, 20))
    axes.set_xticks([5, 10, 20, 50], ["5 MB", "10 MB", "20 MB", "50 MB"])
    axes.set_yticks([0, 1, 3, 10], ["dense", "+1 %", "+3 %", "+10 %"])
    axes.minorticks_off()
    place = {"loc": (0.03, 0.115), "ncols": 3, "columnspacing": 1.6}
    figure.legend(handles=axes.lines[1::2], frameon=False, labelcolor="linecolor", fontsize=SMALL, **place)
    return figure


def _draw(
    axes: Axes, family: Family, points: Sequence[Arm], scale: float, size: int, width: float
) -> tuple[list[float], list[float]]:
    """A curve with its points; where these are."""
    places = [scale * arm.bits for arm in points], [100 * arm.loss for arm in points]
    axes.plot(*places, "o", color=family.colour, markersize=size, clip_on=False)
    style = DASHED if family.bits == 16 else "solid"
    axes.plot(*places, color=family.colour, linestyle=style, linewidth=width, label=family.name)
    return places


def _say(axes: Axes, family: Family, points: Sequence[Arm], places: tuple[list[float], list[float]]) -> None:
    """What a point is, in words."""
    for arm, x, y in zip(points, *places, strict=True):
        key = arm.level or str(arm.num_bits)
        if key in WORDS[family.name]:
            shift, end = WORDS[family.name][key]
            what = "bits" if not arm.level else "% zeros" if arm.way in SPARSE else "% fewer"
            size = f"{x:.0f} MB, " if family.bits != 16 else ""
            loss = "" if key in ("2", "3") else f": {size}{percent(arm.loss).replace('%', ' %')}"
            style = {"color": family.colour, "fontsize": SMALL, "ha": end, "va": "center"}
            axes.annotate(f"{key} {what}{loss}", (x, y), shift, textcoords="offset points", **style)


def bits(folder: Path, studies: Path) -> Figure:
    """A panel for each model; a curve for each family."""
    models = [model for model in read_figures(folder, studies) if model.figures.name in ORDER]
    about = "what is added to the dense model's perplexity, over bits a weight of its blocks"
    below = f"Means over seeds; of several ways the best; up to {USABLE:+.0%}. More: docs/evidence/bits.md"
    figure = new_figure(4.6, "Prune, quantise, or both?", about, below)
    width = 6.7 / max(1, len(models))
    for panel, model in enumerate(models):
        axes = new_axes(figure, (0.6 + panel * width, 1.2, width - 0.62, 2.5))
        axes.set_title(model.figures.name, loc="left", color=INK, fontweight="bold", fontsize=10)
        _panel(axes, model)
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    ordered = [handles[family.name] for family in FAMILIES if family.name in handles]
    if ordered:
        place = {"loc": (0.03, 0.07), "ncols": 4, "columnspacing": 1.2}
        figure.legend(handles=ordered, frameon=False, labelcolor="linecolor", fontsize=SMALL, **place)
    return figure


def _panel(axes: Axes, model: BitsFigures) -> None:
    curves = [(family, family.points(model.arms)) for family in FAMILIES]
    for family, arms in curves:
        if arms:
            _draw(axes, family, arms, 1.0, 4, 1.5)
            _label(axes, family, arms)
    shown = [arm for _, arms in curves for arm in arms]
    least, low, high = min(arm.bits for arm in shown), *(100 * end(arm.loss for arm in shown) for end in (min, max))
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set(xlim=(0.6 * least, 18), ylim=(min(0.0, low) - 0.2, 1.3 * max(high, LINEAR)))
    axes.set_xticks(BITS, [f"{value}" for value in BITS])
    percents = [value for value in TICKS if value <= 1.3 * max(high, LINEAR)]
    axes.set_yticks(percents, [f"{value:+d} %" if value else "dense" for value in percents])
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("bits a weight", color=SOFT, fontsize=SMALL)
    axes.minorticks_off()


def _label(axes: Axes, family: Family, arms: Sequence[Arm]) -> None:
    """Levels beside the points; of dense models their bits. Smaller ones speak by their place."""
    for arm in arms if family.bits != 16 and family.colour != MOSS else ():
        text = level_name(arm.level) if arm.level else str(arm.num_bits)
        shift, aligned = {SLATE: ((0, 5), "center"), PLUM: ((-4, -8), "right"), SAND: ((0, -10), "center")}[
            family.colour
        ]
        style = {"color": family.colour, "fontsize": 7, "ha": aligned}
        axes.annotate(text, (arm.bits, 100 * arm.loss), shift, textcoords="offset points", **style)
