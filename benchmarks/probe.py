"""Does the gradient probe help? The study, and ``docs/probe.md`` from its files: no figure in that page is typed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import tyro

from prunus.lab.study.tables import markdown_table
from prunus.ops.machine import device_of

from .probe_figures import SLIGHT, USABLE, Comparison, Figures, read_figures, spread, verdict
from .probe_models import CASES, smaller, subject_for, write_images, write_tokens
from .probe_study import RANDOM, STRATEGIES, UNPROBED, Design, Study

Model = Literal["stories15M", "SmolLM2-135M", "ResNet-20"]


@dataclass(frozen=True)
class Command:
    """Does the gradient probe help? Prunes three models by each strategy with and without it, at equal sparsity.

    The folder --data holds stories15M/ (a Hugging Face folder, with calib.u16 and valid.u16), SmolLM2-135M/ (its .gguf
    file, with calib.u16 and valid.u16 as prepare makes them from --text) and ResNet-20/ (its weights as .th, with
    cifar10.npz as prepare makes it from --cifar10).

    prepare: those files. run: the study, a JSON file for each model and seed; an interrupted run continues.
    page: docs/probe.md from all files.
    """

    what: tyro.conf.Positional[Literal["prepare", "run", "page"]]  # what to do
    data: Path = Path("runs/evidence")  # prepare, run: folder of models and data
    text: Path | None = None  # prepare: text to make tokens of
    cifar10: Path | None = None  # prepare: folder of CIFAR-10
    models: tuple[Model, ...] = ("stories15M", "SmolLM2-135M", "ResNet-20")  # run: which
    seeds: tuple[int, ...] = (0, 1, 2)  # run: which calibration samples
    small: bool = False  # run: few samples, one level and one tau, to try it; its figures mean nothing
    device: str = "cpu"  # run: cpu or cuda
    results: Path = Path("benchmarks/evidence")  # run, page: folder of the JSON files
    page: Path = Path("docs/probe.md")  # page: file to write

    def run(self) -> None:
        {"prepare": self._prepare, "run": self._run, "page": self._write_page}[self.what]()

    def _prepare(self) -> None:
        if self.text is None and self.cifar10 is None:
            raise ValueError("prepare makes something of --text or --cifar10, but neither was given")
        written = []
        if self.text is not None:
            written += write_tokens(self.data / "SmolLM2-135M", self.text)
        if self.cifar10 is not None:
            written.append(write_images(self.data / "ResNet-20", self.cifar10))
        for path in written:
            print(f"{path} written")

    def _run(self) -> None:
        device = device_of(self.device)
        torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
        design = Design((0.5,), (1.0,)) if self.small else Design()
        for name in self.models:
            case = smaller(CASES[name]) if self.small else CASES[name]
            for seed in self.seeds:
                study = Study(case, design, seed, self.results)
                study.run(lambda case=case, seed=seed: subject_for(case, self.data, seed, device))
                print(f"{study.path}: complete")

    def _write_page(self) -> None:
        text = page(self.results)
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(text)
        print(f"{self.page} written")


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
    cases = read_figures(folder)
    _check_equal(cases)
    return INTRODUCTION + verdict(cases) + METHOD.format(slight=SLIGHT, **USABLE) + "\n".join(map(_section, cases))


def _check_equal(cases: Sequence[Figures]) -> None:
    """Raise RuntimeError where two models that the page calls equally sparse are not."""
    for case in cases:
        for (strategy, level, way, tau), rows in case.rows.items():
            other = {"probed": "alone, as sparse", "exact": "alone", "target": "alone"}.get(way, way)
            beside = case.rows[strategy, level, other, None if other == "alone" else tau]
            if any(abs(row.sparsity - beside[seed].sparsity) > 1e-6 for seed, row in rows.items()):
                raise RuntimeError(f"{case.name}, {strategy} at {level}: {way} and {other} are not equally sparse")


def _section(case: Figures) -> str:
    settings, metric = case.settings, case.metric
    gained = "percent of perplexity" if metric == "perplexity" else "points of accuracy"
    return f"""
## {case.name}

{settings["about"]}. {_data(case)} {_origin(case)}

### {case.name}: {metric} at exactly the level

{_levels(case)}

### {case.name}: the probe as it is defined ({settings["schedule"]})

Each cell: the sparsity that the probe left; {metric} probed, of the strategy alone as sparse, and of a veto by lot; \
what the probe gains over the strategy alone ({gained}, positive is better). Clear differences are marked: \
**better**, *worse*.

{_defined(case)}
"""


def _data(case: Figures) -> str:
    settings, tokens = case.settings, case.metric == "perplexity"
    unit = f"windows of {settings['length']} tokens" if tokens else "images"
    seeds = ", ".join(map(str, case.seeds))
    text = (
        f"Calibrated on {settings['samples']} {unit}, seeds {seeds}; {case.metric} on {settings['held_out']:,} "
        f"held-out {unit}."
    )
    if case.unfinished:
        seeds = ", ".join(map(str, case.unfinished))
        text += f" **The runs of seeds {seeds} were interrupted**: n is the number of seeds where some are missing."
    return " ".join([text, *case.notes])


def _origin(case: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in case.environments[0]["versions"].items())
    machines = "; ".join(dict.fromkeys(environment["machine"] for environment in case.environments))
    commits = ", ".join(dict.fromkeys(str(environment["commit"]) for environment in case.environments))
    return f"{machines}; {versions}; {', '.join(dict.fromkeys(case.dates))}, commit {commits}."


def _levels(case: Figures) -> str:
    levels = case.settings["levels"]
    lines = [["dense", *[case.number(case.dense)] * len(levels)]]
    for name in (RANDOM, *STRATEGIES, *UNPROBED):
        lines.append([name, *(case.mean_and_spread((name, level, "alone", None)) for level in levels)])
    for name in STRATEGIES:
        for tau in case.settings["taus"]:
            lines.append([f"{name}, probe tau {tau:g}", *(_exact(case, name, level, tau) for level in levels)])
        lines.append([f"{name}, probe by ratios", *(_marked(case, name, level, "target") for level in levels)])
    return markdown_table(["", *(f"{level:.0%}" for level in levels)], lines)


def _exact(case: Figures, name: str, level: float, tau: float) -> str:
    share = fmean(row.beyond or 0.0 for row in case.of(name, level, "exact", tau))
    return _marked(case, name, level, "exact", tau) + (f" ({share:.0%} beyond)" if share >= 0.005 else "")


def _marked(case: Figures, name: str, level: float, way: str, tau: float | None = None) -> str:
    """The figure, with a mark where it differs clearly from the strategy's alone."""
    comparison = case.compared((name, level, way, tau), (name, level, "alone", None))
    return mark(case.mean_and_spread((name, level, way, tau)), comparison)


def mark(text: str, comparison: Comparison | None) -> str:
    sign = {"better": "**", "worse": "*"}.get(comparison.outcome, "") if comparison else ""
    return f"{sign}{text}{sign}"


def _defined(case: Figures) -> str:
    levels = case.settings["levels"]
    lines = []
    for name in STRATEGIES:
        for tau in case.settings["taus"]:
            lines.append([f"{name}, tau {tau:g}", *(_cell(case, name, level, tau) for level in levels)])
    return markdown_table(["", *(f"candidates {level:.0%}" for level in levels)], lines)


def _cell(case: Figures, name: str, level: float, tau: float) -> str:
    ways = ("probed", "alone, as sparse", "by lot")
    sparsity = [row.sparsity for row in case.of(name, level, "probed", tau)]
    comparison = case.compared((name, level, "probed", tau), (name, level, "alone, as sparse", tau))
    figures = ", ".join(case.number(case.mean(name, level, way, tau)) for way in ways)
    gain = "" if comparison is None else f"; {comparison.gain:+.2f} ± {spread(comparison.gains):.2f}"
    return mark(f"{fmean(sparsity):.1%}: {figures}{gain}", comparison)
