"""Pages of models: what pruning left of one, and what it learned back from the dense one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ...plot import layers_svg
from ..run_files import RunFiles
from ..schema import AMOUNT, ANY, COUNT, SHARE, TEXT, Maybe, Named, Spec
from .curves import ACCENT, MAX_POINTS, MAX_ROWS, Point, at_most, line_trace
from .numbers import duration, memory, number, plain
from .panel import INK, MUTED, Mark, NumberTable, Page, Panel, Section, Trace, axis, cell, layout
from .records import Json
from .sections import FIELD, written

RECOVERY_FILE = "recovery.json"
RECOVERY: Spec = {
    "before": {},
    "after": {},
    "teacher": {},
    "curve": [{"step": COUNT, "tokens": COUNT}],
    "lr": AMOUNT,
    "lr_reason": TEXT,
    "best_step": COUNT,
    "steps": COUNT,
    "tokens": COUNT,
    "seconds": AMOUNT,
    "num_zeros": COUNT,
    "notes": Maybe([TEXT]),
    "settings": Maybe({}),
}
PRUNED: Spec = {
    "rows": Named({"sparsity": SHARE}),
    "layers": [{"name": TEXT, "sparsity": SHARE, "mask_error": ANY, "error": ANY, "not_repaired": Maybe(TEXT)}],
    "settings": {"model": TEXT},
    "seconds": AMOUNT,
    "peak_bytes": AMOUNT,
    "recovery": Maybe(RECOVERY),
    "sizes": Maybe({"before": {"parameters": COUNT}, "after": {"parameters": COUNT}}),
}
MARKS = {
    "before recovery": Mark(MUTED, "dash", width=1.6),
    "recovered": Mark(ACCENT, width=2.2),
    "teacher": Mark(INK, width=1.6),
}
NAMES = {"accuracy": "accuracy, %", "perplexity": "perplexity", "kl": "KL divergence"}
HOVER = "%{y:.5g}<extra>%{fullData.name}</extra>"
SAME_DATA = "All models on the same held-out data"
KEPT = "The large point is the state that was kept."
TRIALS = " Trials of learning rates are not on the curve, but their {} count."
SQUARES = " If outputs are not logits, the mean square of their difference stands in place of the KL divergence."


def pruned_page(folder: Path) -> Page:
    """The figures of a pruned or shrunk model and a picture of its layers; in between its recovery, if it had one."""
    result = RunFiles(folder).load_checked("result.json", PRUNED)
    rows, recovery, sizes = result["rows"], result.get("recovery"), result.get("sizes")
    metric = next((name for row in rows.values() for name in row if name not in ("sparsity", "parameters")), "metric")
    shown: dict[str, Callable[[float | None], str]] = {}
    if sizes:
        shown["parameters"] = lambda value: "–" if value is None else f"{value:,.0f}"
    if not sizes or any(row["sparsity"] for row in rows.values()):
        shown["sparsity"] = "{:.2%}".format
    shown[metric] = lambda value: "not finite" if value is None else f"{value:.4f}"
    cells = [[name, *(cell(row.get(key), text) for key, text in shown.items())] for name, row in rows.items()]
    table = NumberTable(SAME_DATA, ["model", *shown], cells)
    parts = [Section("held-out", "On held-out data", "", tables=[table])]
    if recovery is not None:
        record = RecoveryRecord(recovery)
        section = record.section
        parts.append(replace(section, text=f"{record.headline}. {record.lede} {section.text}"))
    if result["layers"]:
        parts.append(Section("layers", "Layer by layer", "", picture=layers_svg(result["layers"])))
    headline = f"{max((row['sparsity'] for row in rows.values()), default=0):.0%} of the weights are zero"
    if sizes:
        headline = f"{sizes['after']['parameters']:,} of {sizes['before']['parameters']:,} parameters stay"
    done = "shrunk" if sizes else "pruned"
    peak = f", {memory(result['peak_bytes'])} at the peak" if result["peak_bytes"] else ""  # if it was measured
    cost = f"{done.title()} in {duration(result['seconds'])}{peak}."
    notes = (recovery or {}).get("notes") or ()
    return Page(
        "shrunk model" if sizes else "pruned model", result["settings"]["model"], headline, cost, parts, notes=notes
    )


def recovered_page(folder: Path) -> Page:
    record = RecoveryRecord(RunFiles(folder).load_checked(RECOVERY_FILE, RECOVERY))
    columns = ["model", *(NAMES[metric] for metric in record.metrics)]
    rows = [[name, *(cell(value_of(one, m)) for m in record.metrics)] for name, one in record.models.items()]
    tables = [NumberTable(SAME_DATA, columns, rows)]
    parts = [record.section, Section("held-out", "On held-out data", "", tables=tables)]
    given = [[k, written(v)] for k, v in (record.values.get("settings") or {}).items() if v not in (None, [])]
    if given:
        tables = [NumberTable("What the command was given", FIELD, given, kind="config")]
        parts.append(Section("settings", "Settings", "", tables=tables))
    notes = record.values.get("notes") or ()
    return Page("recovered model", folder.resolve().name, record.headline, record.lede, parts, notes=notes)


def value_of(figures: Json, metric: str) -> float | None:
    """The perplexity is e to the power of the loss; the accuracy is in percent."""
    value = number(figures.get("loss" if metric == "perplexity" else metric))
    if value is None or metric == "kl":
        return value
    return number(math.exp(min(value, 700)) if metric == "perplexity" else 100 * value)


def title_of(metric: str) -> str:
    return f"Held-out {NAMES[metric]}{' from the teacher' * (metric == 'kl')}"


@dataclass(frozen=True)
class RecoveryRecord:
    values: Json

    @cached_property
    def models(self) -> dict[str, Json]:
        """Figures by model; a teacher, where there was one, has a distance from itself."""
        models = dict(zip(MARKS, (self.values[key] for key in ("before", "after", "teacher")), strict=True))
        return {name: one for name, one in models.items() if name != "teacher" or number(one.get("kl")) is not None}

    @cached_property
    def metrics(self) -> list[str]:
        """Accuracy, or else perplexity, where there were labels; and the distance from the teacher."""
        measured = [*self.models.values(), *self.values["curve"]]
        known = [name for name in NAMES if any(value_of(one, name) is not None for one in measured)]
        return [name for name in known if name != "perplexity" or "accuracy" not in known] or ["kl"]

    @property
    def unit(self) -> str:
        return "tokens" if self.metrics[0] == "perplexity" else "tokens or samples"

    @property
    def headline(self) -> str:
        metric = self.metrics[0]
        values = {name: value_of(one, metric) for name, one in self.models.items()}
        shown = {
            name: "no finite value" if value is None else plain(value) + " %" * (metric == "accuracy")
            for name, value in values.items()
        }
        teacher = f"; the teacher has {shown['teacher']}" if metric != "kl" and "teacher" in shown else ""
        name = title_of(metric).removesuffix(", %")
        return f"{name} went from {shown['before recovery']} to {shown['recovered']}{teacher}"

    @property
    def lede(self) -> str:
        one = self.values
        took = f"{one['steps']:,} steps, {one['tokens']:,} {self.unit}, {duration(one['seconds'])}"
        return f"{one['num_zeros']:,} zeros kept; {took}. Learning rate {one['lr']:g}: {one['lr_reason']}."

    @property
    def section(self) -> Section:
        panels = [self.panel(metric) for metric in self.metrics]
        legend = [(name, MARKS[name]) for name in self.models]
        text = KEPT + TRIALS.format(self.unit) * ("trials of" in self.values["lr_reason"])
        text += SQUARES * (self.metrics[0] != "perplexity")
        return Section("recovery", "Recovery", text, panels, legend=legend)

    def panel(self, metric: str) -> Panel:
        """A metric on held-out data over tokens, with lines for the student before and for its teacher."""
        measured = [(one, value_of(one, metric)) for one in self.values["curve"]]
        curve = [Point(one["step"], one["tokens"], y, y, y) for one, y in measured if y is not None]
        traces = [*self._levels(metric, curve), self._curve(curve)]
        values = [y for trace in traces for y in trace["y"]]
        is_steep = bool(values) and metric != "accuracy" and max(values) > 10 * min(values) > 0
        scale = {"type": "log", "dtick": "D2"} if is_steep else {"rangemode": "tozero" if metric == "kl" else "normal"}
        x = axis(self.unit, rangemode="tozero", unifiedhovertitle={"text": f"%{{x:,}} {self.unit}"})
        look = layout(x, axis(NAMES[metric], **scale), hovermode="x unified")
        name, whole = title_of(metric), "{:,}".format
        rows = [[cell(p.step, whole), cell(p.x, whole), cell(p.mean)] for p in at_most(curve, MAX_ROWS)]
        caption = f"{name}, {len(rows)} of {len(measured)} evaluations"
        table = NumberTable(caption, ["step", self.unit, NAMES[metric]], rows)
        return Panel(name, traces, look, table, height=340)

    def _curve(self, curve: Sequence[Point]) -> Trace:
        shown = at_most(curve, MAX_POINTS)
        trace = line_trace("recovered", shown, MARKS["recovered"], HOVER)
        trace["marker"] |= {"size": [11 if p.step == self.values["best_step"] else 5 for p in shown], "opacity": 1}
        return trace | {"mode": "lines+markers", "cliponaxis": False}

    def _levels(self, metric: str, curve: Sequence[Point]) -> list[Trace]:
        """Straight lines, with a point where the curve has one; the teacher's distance from itself is none."""
        places = sorted({0, max(self.values["tokens"], 1), *(p.x for p in curve)})
        left_out = ("recovered", "teacher") if metric == "kl" else ("recovered",)
        levels = {name: value_of(one, metric) for name, one in self.models.items() if name not in left_out}
        return [
            line_trace(name, [Point(0, x, level, level, level) for x in places], MARKS[name], HOVER)
            for name, level in levels.items()
            if level is not None
        ]
