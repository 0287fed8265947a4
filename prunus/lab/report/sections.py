"""The parts of a page, in the order of reading: the finding first, the configuration last."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..run import Run
from .cells import CONTROLS, ArmRow, Source
from .comparison import cost_panels, difference_panels, memory_of, outside, overlap_panels, quality_panel
from .curves import compared_panels, run_panels
from .numbers import fixed, number, plain, short_percent, signed, with_minus
from .panel import Mark, Number, NumberTable, Section, Word, cell, marks_of
from .sparsity import compared_maps, path_mark, run_map, shared_paths, sparsity_panel

FRAME = "The frame is that of the last three quarters of the run."
SPARSITY = (
    "Lines are what the schedule asked for at each event, points are zeros counted in the weights. Arms that took the "
    "same path are one line."
)
LAYERS = "Share of each layer that is zero at the end of the run, mean over seeds."
OVERLAP = (
    "Of the weights that an arm or magnitude removed, the share that both removed (Jaccard). An arm near 1 is "
    "magnitude under another name; the dotted line is what two masks share by chance."
)
NO_OVERLAP = "Not known here: prunus study compares the masks of its runs, and this folder holds no such comparison."
NO_LAYERS = "Not recorded: no run has been evaluated yet."


def sections(source: Source) -> list[Section]:
    return [*(_compared(source) if source.is_comparison else _of_run(source)), _configuration(source)]


def _of_run(source: Source) -> list[Section]:
    record, heat = source.record, run_map(source.record)
    size, what = record.run.eval_size, "windows" if record.unit == "tokens" else record.unit
    held_out = f"Held-out data are its first {size:,} {what}, or all if it has fewer. " if size else ""
    lines = [("training", Mark("var(--muted)", width=1.2)), ("held-out", Mark("var(--arm-1)"))]
    parts = [
        Section(
            "training",
            "Training",
            f"Loss and quality over {record.unit}. {held_out}{FRAME}",
            run_panels(record),
            legend=lines,
        )
    ]
    if record.run.score != "none":
        panel = sparsity_panel({source.cells[0].arm: record}, {source.cells[0].arm: Mark("var(--arm-1)")})
        text = "The line is what the schedule asked for at each event; points are zeros counted in the weights."
        parts.append(Section("sparsity", "Sparsity", text, [panel]))
        text = "Share of each layer that is zero, counted at every evaluation." if heat else NO_LAYERS
        parts.append(Section("layers", "Layers", text, [heat] if heat else []))
    return parts


def _compared(source: Source) -> list[Section]:
    ended = [row for row in source.rows if row.mean is not None]  # from the best, at the highest sparsity of each arm
    ranked = sorted(ended, key=lambda row: (-row.sparsity, source.record.metric.sign * (row.mean or 0)))
    ranking = dict.fromkeys(row.arm for row in ranked)
    marks = marks_of(source.arms, [arm for arm in ranking if arm in source.arms and arm not in CONTROLS])
    legend = [(arm, mark) for arm, mark in marks.items() if mark.width > 1]
    shared = {"legend": legend, "others": ", ".join(arm for arm, mark in marks.items() if mark.width <= 1)}
    heat, overlaps = compared_maps(source), overlap_panels(source, marks)
    far = ", ".join(f"{row.arm} at {short_percent(row.sparsity)}" for row in outside(source))
    seeds = sorted({len(row.values) for row in source.rows if row.values}) or [0]
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    bars = f"Mean on held-out data at the end of the run; bars are one standard deviation over seeds ({many} per arm)."
    bars += f" Outside the frame: {far}." if far else ""
    quality = Section("quality", "Quality against sparsity", bars, [quality_panel(source, marks)])
    overlap = Section("overlap", "Mask overlap", OVERLAP if overlaps else NO_OVERLAP, overlaps)
    if not source.cells:  # a study without its runs
        return [_verdicts(source, marks), quality, overlap]
    frame = f"{FRAME[:-1]}, without {far}, which may leave it." if far else FRAME
    means = f"Mean over seeds, by {source.record.unit} read; the shaded area spans the seeds. {frame}"
    loss, metric = (compared_panels(source, marks, what, outside(source)) for what in ("loss", "quality"))
    curves = [panel for pair in zip(loss, metric, strict=True) for panel in pair]
    return [
        _verdicts(source, marks),
        replace(quality, **shared),
        Section("training", "Training", means, curves, **shared),
        _sparsity(source, marks),
        Section("layers", "Layers", LAYERS if heat else NO_LAYERS, heat),
        overlap,
        Section("cost", "Time and memory", _cost_text(source), cost_panels(source)),
    ]


def _sparsity(source: Source, marks: Mapping[str, Mark]) -> Section:
    """A panel for each sparsity; where arms take different paths to the highest, a legend says which."""
    panels, paths = [], {}
    for sparsity in source.sparsities:
        records = {arm: runs[0] for arm in source.arms if (runs := source.runs(arm, sparsity))}
        panels.append(sparsity_panel(records, marks, f", {short_percent(sparsity)} at the end"))
        paths = shared_paths(records)
    legend = [(", ".join(arms), path_mark(arms, marks)) for arms in paths.values()] if len(paths) > 1 else []
    return Section("sparsity", "Sparsity", SPARSITY, panels, legend=legend)


def _cost_text(source: Source) -> str:
    machines = sorted({str(cell.environment.get("machine", "an unknown machine")) for cell in source.cells})
    where = f"on {machines[0]}" if len(machines) == 1 else f"on different machines ({'; '.join(machines)})"
    missing = " Peak memory was not recorded." * all(memory_of(cell) is None for cell in source.cells)
    cold = " Runs that were the first of their process, which takes its start-up, are left out of the time."
    first = any(cell.more.get("cold") for cell in source.cells)
    most = max((number(cell.more.get("at_once")) or 1 for cell in source.cells), default=1)
    shared = f" Up to {most:g} runs shared a device, which makes each slower." if most > 1 else ""
    return f"Bars are means, points single runs, {where}. Time is that of steps alone.{shared}{cold * first}{missing}"


def _verdicts(source: Source, marks: Mapping[str, Mark]) -> Section:
    metric, sign = source.record.metric.name, source.record.metric.sign
    rows = sorted(source.rows, key=lambda row: (row.sparsity, row.mean is None, sign * (row.mean or 0)))
    is_study = any(row.verdict for row in rows)
    looks = {}
    for place, row in enumerate(rows):
        first = place > 0 and rows[place - 1].sparsity != row.sparsity
        equal = [other for other in rows if other.sparsity == row.sparsity > 0 and other.budget == source.budget]
        leads = equal[:1] == [row] and row.verdict.startswith("better")
        looks[place] = " ".join(["best"] * leads + ["first"] * first)
    study = ["difference, 95 %", "verdict"] if is_study else []
    table = NumberTable(
        f"Held-out {metric} at the end, from the best to the worst of each sparsity",
        ["arm", "sparsity", metric, *study, "± sd", "seeds"],
        [_verdict_row(row, is_study) for row in rows],
        looks=looks,
    )
    read = {(run.run.total_steps * run.per_step, run.run.data) for run in source.cells}
    alike = f"all read the same number of {source.record.unit} from the same data, but may differ in other ways"
    alike = "they differ in budget or data" if len(read) > 1 else alike
    text = (
        "Differences are to magnitude, or to the arm named behind a dash, of dense arms to dense, and paired: the same "
        "seed has the same first weights and the same batches."
        if is_study
        else f"These runs are no study, so there are no verdicts: {alike}."
    )
    return Section("verdicts", "Verdicts", text, difference_panels(source, marks), tables=[table])


def _verdict_row(row: ArmRow, is_study: bool) -> list[Any]:
    cells: list[Any] = [
        row.arm + (f" (budget × {plain(row.budget, 3)})" if row.budget != 1 else ""),
        Number(short_percent(row.sparsity) if row.sparsity else "–", row.sparsity),
        cell(row.mean),
    ]
    if is_study:
        kind = next((word for word in ("better", "worse") if row.verdict.startswith(word)), "none")
        half = f" ± {fixed(row.half_width, row.decimals)}" if row.half_width is not None else ""
        other = "" if row.same_as or row.against in ("", "magnitude", "dense") else f", against {row.against}"
        mixed = f"; {row.mixed}" if row.mixed and row.verdict and not row.same_as else ""
        said = with_minus(row.verdict) + other + mixed
        cells += [Number(signed(row.difference, row.decimals) + half, row.difference), Word(said, kind)]
    return [*cells, Number(fixed(row.spread, row.decimals), row.spread), cell(len(row.values), str)]


FIELD = ("field", "value")
OWN = ("out", "seed", "sparsity", "resume")  # what every run has for itself


def _configuration(source: Source) -> Section:
    base, defaults = source.base.to_json(), Run().to_json()
    configs = [cell.run.to_json() for cell in source.cells]
    shared = [
        name
        for name in base
        if not source.is_comparison or (name not in OWN and len({str(config[name]) for config in configs}) == 1)
    ]
    rows = [[name, written(base[name])] for name in shared]
    own = [[name, written(base[name])] for name in shared if base[name] != defaults[name]]
    environment = [[name, written(value)] for name, value in source.record.environment.items()]
    title = "Shared by all runs" if source.is_comparison else "This run"
    tables = [
        NumberTable(f"{title}: what differs from the defaults", FIELD, own, kind="config"),
        NumberTable("Environment", FIELD, environment, kind="config"),
        NumberTable(f"{title}: all fields", FIELD, rows, kind="config", folded=f"All {len(rows)} fields"),
    ]
    if source.is_comparison:
        tables.insert(1, _differences(source, base))
    text = "As the folder says it." if source.is_comparison else "All that decides what this run computes."
    if source.study:
        text = f"Everything that all arms share has the hash {source.study['hash']}."
    return Section("configuration", "Configuration and environment", text, tables=tables)


def _differences(source: Source, base: Mapping[str, Any]) -> NumberTable:
    planned = {arm["name"]: arm["changes"] for arm in source.study.get("arms", ())}
    rows = []
    for arm in source.arms:
        changes = planned.get(arm)
        if changes is None:
            run = next((cell.run for cell in source.cells if cell.arm == arm), source.base)
            changes = {n: v for n, v in run.to_json().items() if n not in OWN and v != base[n]}
        rows.append([arm, ", ".join(f"{name} = {written(value)}" for name, value in changes.items()) or "nothing"])
    return NumberTable("What each arm changes, apart from sparsity and seed", ["arm", "changes"], rows, kind="config")


def written(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
