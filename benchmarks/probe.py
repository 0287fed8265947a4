"""Does the gradient probe help? The study, and ``docs/probe.md`` from its files: no figure in that page is typed."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from prunus.lab.study.tables import markdown_table
from prunus.ops.machine import device_of

from .probe_study import CASES, RANDOM, STRATEGIES, UNPROBED, Row, Study, load_model

Model = Literal["stories15M", "SmolLM2-135M", "ResNet-20"]
Key = tuple[str, float, str, float | None]  # strategy, level, way, tau
SLIGHT = 0.1  # percent of perplexity, or points of accuracy, that nobody would miss
USABLE = {"perplexity": 2.0, "accuracy": 0.9}  # times the dense model's: what a pruned one may have at most, at least
BESIDE = {"exact": "alone", "target": "alone", "probed": "alone, as sparse"}  # what a way is compared with
TITLES = {
    "exact": "At exactly the level, its veto with replacements",
    "target": "At exactly the level, by the smallest ratios",
    "probed": "As it is defined, beside the strategy alone as sparse",
}


@dataclass(frozen=True)
class Evidence:
    """Does the gradient probe help? Prunes three models by each strategy with and without it, at equal sparsity.

    The folder --data holds stories15M/ (a Hugging Face folder, with calib.u16 and valid.u16), SmolLM2-135M/ (its .gguf
    file, with calib.u16 and valid.u16: tokens of both halves of the validation text of wikitext-2, without special
    ones) and ResNet-20/ (its weights as .th, with the .bin files of CIFAR-10).

    run: the study, a JSON file for each model and seed; an interrupted run continues. page: docs/probe.md from all
    files.
    """

    what: tyro.conf.Positional[Literal["run", "page"]]  # what to do
    data: Path = Path("runs/evidence")  # run: folder of models and data
    models: tuple[Model, ...] = ("stories15M", "SmolLM2-135M", "ResNet-20")  # run: which
    seeds: tuple[int, ...] = (0, 1, 2)  # run: which calibration samples
    small: bool = False  # run: few samples, one level and one tau, to try it; its figures mean nothing
    device: str = "cpu"  # run: cpu or cuda
    results: Path = Path("benchmarks/evidence")  # folder of the JSON files
    page: Path = Path("docs/probe.md")  # page: file to write

    def run(self) -> None:
        if self.what == "page":
            text = page(self.results)
            self.page.parent.mkdir(parents=True, exist_ok=True)
            self.page.write_text(text)
            print(f"{self.page} written")
            return
        device = device_of(self.device)
        torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
        for case in (case for case in CASES if case.case in self.models):
            case = case.small() if self.small else case
            for seed in self.seeds:
                study = Study(case, seed, self.results)
                study.run(lambda case=case, seed=seed: load_model(case, self.data, seed, device))
                print(f"{study.path}: complete")


# Figures: means over seeds, and comparisons at equal sparsity


@dataclass(frozen=True)
class Comparison:
    """One model against another of the same sparsity; ``gains`` are percent, a seed each, and positive is better."""

    strategy: str
    level: float
    tau: float | None
    gains: tuple[float, ...]
    usable: bool  # the better of both is

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def outcome(self) -> str:
        """Better or worse where all of several seeds agree and the mean is two standard errors away from zero.

        A mean below ``SLIGHT`` is neither.
        """
        if len(self.gains) < 2 or abs(self.gain) < SLIGHT:
            return "unclear"
        error = 2 * spread(self.gains) / len(self.gains) ** 0.5
        if min(self.gains) > 0 and self.gain > error:
            return "better"
        return "worse" if max(self.gains) < 0 and self.gain < -error else "unclear"


@dataclass(frozen=True)
class Figures:
    """All files of one model, a seed each, and their rows by seed."""

    files: list[dict[str, Any]]
    rows: dict[Key, dict[int, Row]]

    @property
    def settings(self) -> dict[str, Any]:
        return self.files[0]["settings"]

    @property
    def metric(self) -> str:
        return self.files[0]["metric"]

    def mean(self, key: Key) -> float:
        """Mean over seeds; the worst there is where one is not finite."""
        worst = float("inf") if self.metric == "perplexity" else 0.0
        return statistics.fmean(worst if row.value is None else row.value for row in self.rows[key].values())

    def number(self, value: float) -> str:
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return "not finite" if value == float("inf") else f"{value:.4g}" if value < 1e4 else f"{value:.1e}"

    def mean_and_spread(self, key: Key) -> str:
        values = [row.value for row in self.rows[key].values()]
        finite = [value for value in values if value is not None]
        mean = self.number(self.mean(key)) + (f" (n = {len(values)})" if len(values) < len(self.files) else "")
        if len(finite) < len(values) or len(set(finite)) < 2:
            return mean
        return f"{mean} ± {100 * spread(finite):.2f}" if self.metric == "accuracy" else f"{mean} ± {spread(finite):.2g}"

    def compared(self, key: Key, beside: str | None = None) -> Comparison | None:
        """With its own of the way ``beside``, over the seeds that have both; None where a value is not finite."""
        strategy, level, way, tau = key
        other = other_key(key, beside or BESIDE[way])
        gains = []
        for seed in sorted(self.rows[key].keys() & self.rows[other].keys()):
            a, b = self.rows[key][seed].value, self.rows[other][seed].value
            if a is None or b is None:
                return None
            gains.append(100 * (1 - a / b) if self.metric == "perplexity" else 100 * (a - b))
        usable = self.is_usable(self.mean(key)) or self.is_usable(self.mean(other))
        return Comparison(strategy, level, tau, tuple(gains), usable)

    def is_usable(self, value: float) -> bool:
        limit = USABLE[self.metric] * self.mean(DENSE)
        return value <= limit if self.metric == "perplexity" else value >= limit

    def against(self, way: str, beside: str | None = None) -> list[Comparison]:
        """Every model of one way beside its own of another."""
        found = [self.compared(key, beside) for key in self.rows if key[2] == way]
        return [each for each in found if each is not None]


DENSE: Key = (RANDOM, 0.0, "alone", None)


def other_key(key: Key, way: str) -> Key:
    """The model of another way that stands beside one; the strategy alone has no tau."""
    return key[0], key[1], way, None if way == "alone" else key[3]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_figures(folder: Path) -> list[Figures]:
    """Figures of all models in a folder.

    ValueError where no seed is finished, or seeds differ in more than the seed; RuntimeError where two models that
    the page calls equally sparse are not.
    """
    by_model: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("probe_*.json")):
        file = json.loads(path.read_text())
        by_model.setdefault(file["settings"]["case"], []).append(file | {"path": path})
    if not by_model:
        raise ValueError(f"there are no figures in {folder}; python -m benchmarks evidence run makes them")
    found = []
    for name, files in by_model.items():
        rows: dict[Key, dict[int, Row]] = {}
        for file in files:
            seed = file["settings"]["seed"]
            if file["settings"] != files[0]["settings"] | {"seed": seed}:
                raise ValueError(
                    f"{file['path']} and {files[0]['path']} differ in their settings; run one of them anew"
                )
            for row in (Row(**row) for row in file["rows"]):
                rows.setdefault((row.strategy, row.level, row.way, row.tau), {})[seed] = row
        if not any(is_complete(file) for file in files):
            raise ValueError(f"no file of {name} is complete; python -m benchmarks evidence run does what is missing")
        for key, by_seed in rows.items():
            beside = rows[other_key(key, BESIDE.get(key[2], key[2]))]
            if any(abs(row.sparsity - beside[seed].sparsity) > 1e-6 for seed, row in by_seed.items()):
                raise RuntimeError(
                    f"{name}, {key[0]} at {key[1]}: {key[2]} and what is beside it are not equally sparse"
                )
        found.append(Figures(files, rows))
    return found


def is_complete(file: dict[str, Any]) -> bool:
    return len(file["done"]) == file["num_steps"]


# The verdict: words that follow from the figures


def verdict(models: Sequence[Figures]) -> str:
    """The answer in a sentence, where the probe is clearly better at most levels and taus and nowhere worse, models."""
    every = [each for model in models for way in BESIDE for each in model.against(way)]
    exceptions = []
    for model in models:
        for strategy, counts in _by_strategy(model).items():
            if not counts["worse"] and 2 * counts["better"] > counts.total():
                share = f"{counts['better']} of {counts.total()} better, ruined models counted in"
                exceptions.append(f"{model.settings['case']}, {strategy}, {model.settings['schedule']} ({share})")
    answer = _answer(every)
    if exceptions:
        answer += f" As it is defined it helps at most levels, and hurts at none, in: {'; '.join(exceptions)}."
    lines = [f"- **{model.settings['case']}.** {_line(model)}\n" for model in models]
    return "".join([answer, "\n\n", *lines])


def _answer(every: Sequence[Comparison]) -> str:
    usable = [each for each in every if each.usable]
    counts = _counts(usable or every)
    total = max(1, counts.total())
    better, worse = counts["better"] / total, counts["worse"] / total
    if not (better or worse):
        answer = "No clear effect of the probe is seen"
    elif better > 2 * worse and better > 0.5:
        answer = "The probe helps in most cases"
    elif worse > 2 * better and worse > 0.5:
        answer = "The probe does not help: at equal sparsity it makes most models worse"
    elif better > worse:
        answer = "The probe helps more often than it hurts, but not in most cases"
    else:
        answer = "The probe does not help: it hurts at least as often as it helps"
    return f"{answer}. Of all comparisons with the strategy alone at equal sparsity {_clear(every)}; of those in which \
one of both models is still usable, {_clear(usable)}."


def _line(model: Figures) -> str:
    parts = []
    for way, title in TITLES.items():
        every = model.against(way)
        usable, counts = [each for each in every if each.usable], _counts(every)
        ruined = f"ruined models counted in, {counts['better']} better and {counts['worse']} worse of {len(every)}"
        parts.append(f"{title}: {_clear(usable)}{_extremes(model, usable)}; {ruined}.")
    by_strategy = [
        f"{strategy} {counts['better']} better and {counts['worse']} worse of {counts.total()}"
        for strategy, counts in _by_strategy(model).items()
    ]
    parts.append(f"By strategy, as it is defined and at all levels: {'; '.join(by_strategy)}.")
    lot = [each for each in model.against("probed", "by lot") if each.usable]
    parts.append(f"Beside a veto by lot of as many weights: {_clear(lot)}.")
    return " ".join([*parts, _best_strategies(model)])


def _counts(comparisons: Iterable[Comparison]) -> Counter[str]:
    return Counter(each.outcome for each in comparisons)


def _clear(comparisons: Sequence[Comparison]) -> str:
    counts = _counts(comparisons)
    if not comparisons:
        return "there is none"
    return f"{counts['better']} of {len(comparisons)} are clearly better, {counts['worse']} clearly worse"


def _by_strategy(model: Figures) -> dict[str, Counter[str]]:
    """Outcomes of the probe as it is defined."""
    found = model.against("probed")
    return {name: _counts(each for each in found if each.strategy == name) for name in STRATEGIES}


def _extremes(model: Figures, comparisons: Sequence[Comparison]) -> str:
    """The largest clear gain and loss."""
    unit = "%" if model.metric == "perplexity" else "points"
    parts = []
    for outcome, pick in (("better", max), ("worse", min)):
        if clear := [each for each in comparisons if each.outcome == outcome]:
            most = pick(clear, key=lambda each: each.gain)
            where = f"{most.strategy} at {most.level:.0%}" + ("" if most.tau is None else f", tau {most.tau:g}")
            parts.append(f"at most {abs(most.gain):.2g} {unit} {outcome} ({where})")
    return f"; {' and '.join(parts)}" if parts else ""


def _best_strategies(model: Figures) -> str:
    """The best and the worst strategy without the probe at each level."""
    parts = []
    for level in model.settings["levels"]:
        keys: list[Key] = [(name, level, "alone", None) for name in (*STRATEGIES, *UNPROBED)]
        best, worst = (pick(keys, key=model.mean) for pick in (min, max))
        if model.metric == "accuracy":
            best, worst = worst, best
        if model.is_usable(model.mean(best)):
            figures = f"{model.mean_and_spread(best)}; {worst[0]} {model.mean_and_spread(worst)}"
            parts.append(f"{level:.0%}: {best[0]} ({figures})")
    if not parts:
        return "No strategy leaves a usable model at any level."
    return f"What helps is the choice of the strategy, of which the best and the worst are, at {'; '.join(parts)}."


# The page

INTRODUCTION = """# Does the gradient probe help?

This page is made by `python -m benchmarks evidence page` from the JSON files in `benchmarks/evidence/`, its words \
too. `python -m benchmarks evidence run` makes the files (`--help` says from what data); an interrupted run continues \
where it stopped, and models and seeds may be run on different machines.

## In short

"""

METHOD = """
## What is compared

A strategy proposes weights to prune. The probe reduces them to a tenth and vetoes those whose largest gradient over \
the calibration samples grows by more than the fraction tau. A veto leaves the model less sparse, and a less sparse \
model is nearly always a better one: a comparison at the sparsity that was asked for would flatter the probe. So each \
comparison here is at equal sparsity, in three ways.

- **As it is defined.** The probe runs on the candidates at the level. The strategy alone then prunes to the \
sparsity that the probe has left, in its own scope and to the weight: where rows or layers would round, lots decide \
which of them gives one more. Beside them a veto by lot: of each weight as many candidates as the probe kept are kept \
at random, which shows what the probe's choice is worth beyond their number.
- **At exactly the level, with replacements.** Candidates are taken at 1.2 times the level and probed all at once \
(joint). Of those within tau the lowest scores are pruned, in the strategy's scope, until the sparsity is the level's \
own; where too few pass, the lowest scores beyond tau follow ("beyond" says how many of the pruned those are). One \
probe serves every tau.
- **At exactly the level, by ratios** (`tau="target"`): of the same candidates the smallest ratios go, over all \
layers, whatever their score.

Figures are means over the calibration seeds ± the standard deviation of a sample; held-out data is never calibrated \
on. The masks of magnitude alone do not depend on the samples, so that it has no spread. A comparison is made seed by \
seed; it is called clear where there are several, all agree in sign and the mean is more than two standard errors away \
from nothing and at least {slight:g} (percent of perplexity, points of accuracy). A model is called usable while its \
perplexity is below {perplexity:g} times the dense model's, or its accuracy above {accuracy:g} of it.
"""


def page(folder: Path) -> str:
    """The page for all files in ``folder``."""
    models = read_figures(folder)
    return INTRODUCTION + verdict(models) + METHOD.format(slight=SLIGHT, **USABLE) + "\n".join(map(_section, models))


def _section(model: Figures) -> str:
    settings, metric = model.settings, model.metric
    name, levels, taus = settings["case"], settings["levels"], settings["taus"]
    gained = "percent of perplexity" if metric == "perplexity" else "points of accuracy"
    exact = [["dense", *[model.number(model.mean(DENSE))] * len(levels)]]
    for strategy in (RANDOM, *STRATEGIES, *UNPROBED):
        exact.append([strategy, *(model.mean_and_spread((strategy, level, "alone", None)) for level in levels)])
    for strategy in STRATEGIES:
        for tau in taus:
            cells = (_exact(model, (strategy, level, "exact", tau)) for level in levels)
            exact.append([f"{strategy}, probe tau {tau:g}", *cells])
        cells = (_exact(model, (strategy, level, "target", None)) for level in levels)
        exact.append([f"{strategy}, probe by ratios", *cells])
    defined = [
        [f"{strategy}, tau {tau:g}", *(_defined(model, (strategy, level, "probed", tau)) for level in levels)]
        for strategy in STRATEGIES
        for tau in taus
    ]
    return f"""
## {name}

{settings["about"]}. {_origin(model)}

### {name}: {metric} at exactly the level

{markdown_table(["", *(f"{level:.0%}" for level in levels)], exact)}

### {name}: the probe as it is defined ({settings["schedule"]})

Each cell: the sparsity that the probe left; {metric} probed, of the strategy alone as sparse, and of a veto by lot; \
what the probe gains over the strategy alone ({gained}, positive is better). Clear differences are marked: \
**better**, *worse*.

{markdown_table(["", *(f"candidates {level:.0%}" for level in levels)], defined)}
"""


def _origin(model: Figures) -> str:
    """Data, seeds, notes, machines and versions."""

    def joined(values: Iterable[Any], by: str = ", ") -> str:
        return by.join(dict.fromkeys(map(str, values)))

    settings, files, made = model.settings, model.files, [file["environment"] for file in model.files]
    unit = f"windows of {settings['length']} tokens" if model.metric == "perplexity" else "images"
    samples = f"Calibrated on {settings['samples']} {unit}, seeds {joined(f['settings']['seed'] for f in files)}"
    parts = [f"{samples}; {model.metric} on {settings['held_out']:,} held-out {unit}."]
    if unfinished := joined(file["settings"]["seed"] for file in files if not is_complete(file)):
        lack = "n is the number of seeds where some are missing."
        parts.append(f"**The runs of seeds {unfinished} were interrupted**: {lack}")
    parts += dict.fromkeys(file["note"] for file in files if "note" in file)
    versions = ", ".join(f"{name} {version}" for name, version in made[0]["versions"].items())
    machines, commits = joined((each["machine"] for each in made), "; "), joined(each["commit"] for each in made)
    return " ".join([*parts, f"{machines}; {versions}; {joined(file['date'] for file in files)}, commit {commits}."])


def _marked(text: str, comparison: Comparison | None) -> str:
    sign = {"better": "**", "worse": "*"}.get(comparison.outcome, "") if comparison else ""
    return f"{sign}{text}{sign}"


def _exact(model: Figures, key: Key) -> str:
    """The figure, marked where it differs clearly from the strategy's alone, and the share beyond tau."""
    share = statistics.fmean(row.beyond or 0.0 for row in model.rows[key].values())
    beyond = f" ({share:.0%} beyond)" if share >= 0.005 else ""
    return _marked(model.mean_and_spread(key), model.compared(key)) + beyond


def _defined(model: Figures, key: Key) -> str:
    sparsity = statistics.fmean(row.sparsity for row in model.rows[key].values())
    figures = ", ".join(model.number(model.mean(other_key(key, way))) for way in ("probed", BESIDE["probed"], "by lot"))
    comparison = model.compared(key)
    gain = "" if comparison is None else f"; {comparison.gain:+.2f} ± {spread(comparison.gains):.2f}"
    return _marked(f"{sparsity:.1%}: {figures}{gain}", comparison)
