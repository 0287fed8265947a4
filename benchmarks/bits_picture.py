"""The picture of ``docs/evidence/bits.md``: what models lose over the bits that they take a weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .bits_figures import ORDER, SHRUNK, SPARSE, USABLE, Arm, BitsFigures, read_figures
from .bits_forms import FORMS
from .drawing import INK, MOSS, PLUM, SAND, SLATE, SMALL, SOFT, new_axes, new_figure
from .study import level_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

    def points(self, model: BitsFigures) -> list[Arm]:
        """The best arm of each level and number of bits, however it was rounded, from few bits to many."""
        best: dict[tuple[str, int], Arm] = {}
        for arm in (arm for arm in model.arms if arm.way in self.ways and arm.is_usable):
            key = arm.level, bits_of(arm)
            if self.bits in (None, key[1]):
                best[key] = min(best.get(key, arm), arm, key=lambda arm: arm.loss)
        return sorted(best.values(), key=lambda arm: arm.bits)


def bits_of(arm: Arm) -> int:
    """Of a kept weight."""
    return FORMS[arm.form].bits if arm.form else 16


FAMILIES = (
    Family("dense in 16 to 2 bits", SLATE, ("dense",), None),
    Family("sparse, 16 bits", PLUM, SPARSE, 16),
    Family("sparse, 4 bits", PLUM, SPARSE, 4),
    Family("shrunk, 16 bits", SAND, SHRUNK, 16),
    Family("shrunk, 4 bits", SAND, SHRUNK, 4),
    Family("smaller, 16 bits", MOSS, ("small",), 16),
    Family("smaller, 4 bits", MOSS, ("small",), 4),
)


def bits(folder: Path, studies: Path) -> "Figure":
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


def _panel(axes: "Axes", model: BitsFigures) -> None:
    curves = [(family, family.points(model)) for family in FAMILIES]
    for family, arms in curves:
        if arms:
            style = DASHED if family.bits == 16 else "solid"
            axes.plot(*_places(arms), "o", color=family.colour, markersize=4, clip_on=False)
            axes.plot(*_places(arms), color=family.colour, linestyle=style, label=family.name)
            _label(axes, family, arms)
    shown = [arm for _, arms in curves for arm in arms]
    least, low, high = min(arm.bits for arm in shown), *(100 * end(arm.loss for arm in shown) for end in (min, max))
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set(xlim=(0.85 * least, 18), ylim=(min(0.0, low) - 0.2, 1.3 * max(high, LINEAR)))
    axes.set_xticks(BITS, [f"{value}" for value in BITS])
    percents = [value for value in TICKS if value <= 1.3 * max(high, LINEAR)]
    axes.set_yticks(percents, [f"{value:+d} %" if value else "dense" for value in percents])
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel("bits a weight", color=SOFT, fontsize=SMALL)
    axes.minorticks_off()


def _places(arms: Sequence[Arm]) -> tuple[list[float], list[float]]:
    return [arm.bits for arm in arms], [100 * arm.loss for arm in arms]


def _label(axes: "Axes", family: Family, arms: Sequence[Arm]) -> None:
    """Levels beside the points; of dense models their bits. Smaller ones speak by their place."""
    for arm in arms if family.bits != 16 and family.colour != MOSS else ():
        text = level_name(arm.level) if arm.level else str(bits_of(arm))
        shift, aligned = {SLATE: ((0, 5), "center"), PLUM: ((-4, -8), "right"), SAND: ((5, 1), "left")}[family.colour]
        style = {"color": family.colour, "fontsize": 7, "ha": aligned}
        axes.annotate(text, (arm.bits, 100 * arm.loss), shift, textcoords="offset points", **style)
