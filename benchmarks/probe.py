"""Does the gradient probe help? The study, and the tables of ``docs/evidence/probe.md`` from its files."""

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

from .benchmark import filled
from .figures import SIGNS, outcome_of
from .probe_study import MODELS, RANDOM, STRATEGIES, UNPROBED, Evaluated, ProbeStudy, load_model
from .study import finite, gains

ModelName = Literal["stories15M", "SmolLM2-135M", "ResNet-20"]
Key = tuple[str, float, str, float | None]  # strategy, level, way, tau
DENSE: Key = (RANDOM, 0.0, "alone", None)
USABLE = {"perplexity": 2.0, "accuracy": 0.9}  # times the dense model's: what a pruned one may have at most, at least
BESIDE = {"exact": "alone", "target": "alone", "probed": "alone, as sparse"}  # what a way is compared with
TITLES = {  # way, what it is compared with: what the table calls it
    ("exact", "alone"): "at exactly the level, with replacements",
    ("target", "alone"): "at exactly the level, by ratios",
    ("probed", "alone, as sparse"): "as it is defined",
    ("probed", "by lot"): "as it is defined, beside a veto by lot",
}


@dataclass(frozen=True)
class Evidence:
    """Does the gradient probe help? Prunes three models by each strategy with and without it, at equal sparsity.

    The folder --data holds stories15M/ (a Hugging Face folder, with calib.u16 and valid.u16), SmolLM2-135M/ (its .gguf
    file, with calib.u16 and valid.u16: tokens of both halves of the validation text of wikitext-2, without special
    ones) and ResNet-20/ (its weights as .th, with the .bin files of CIFAR-10).

    run: the study, a JSON file for each model and seed; an interrupted run continues. page: the tables of
    docs/evidence/probe.md from all files.
    """

    what: tyro.conf.Positional[Literal["run", "page"]]  # what to do
    data: Path = Path("runs/evidence")  # run: folder of models and data
    models: tuple[ModelName, ...] = ("stories15M", "SmolLM2-135M", "ResNet-20")  # run: which
    seeds: tuple[int, ...] = (0, 1, 2)  # run: which calibration samples
    small: bool = False  # run: few samples, one level and one tau, to try it; its figures mean nothing
    device: str = "cpu"  # run: cpu or cuda
    results: Path = Path("benchmarks/evidence")  # folder of the JSON files
    page: Path = Path("docs/evidence/probe.md")  # page: file whose tables are written anew

    def run(self) -> None:
        if self.what == "page":
            self.page.write_text(filled(self.page.read_text(), parts(read_figures(self.results))))
            print(f"{self.page} written")
            return
        device = device_of(self.device)
        torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
        for model in (model for model in MODELS if model.case in self.models):
            model = model.small() if self.small else model
            for seed in self.seeds:
                study = ProbeStudy(model, seed, self.results)
                study.run(lambda model=model, seed=seed: load_model(model, self.data, seed, device))
                print(f"{study.path}: complete")


@dataclass(frozen=True)
class Comparison:
    """One model against another of the same sparsity; ``gains`` are percent, a seed each, and positive is better."""

    strategy: str
    gains: tuple[float, ...]
    usable: bool  # the better of both is

    @property
    def gain(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def outcome(self) -> str:
        """``outcome_of`` the seeds, if the mean is two standard errors away from zero too."""
        is_far = abs(self.gain) > 2 * spread(self.gains) / len(self.gains) ** 0.5
        return (outcome_of(self.gains) if is_far else "") or "unclear"


@dataclass(frozen=True)
class ProbeFigures:
    """All files of one model, a seed each, and their rows by seed."""

    files: list[dict[str, Any]]
    rows: dict[Key, dict[int, Evaluated]]

    @property
    def settings(self) -> dict[str, Any]:
        return self.files[0]["settings"]

    @property
    def metric(self) -> str:
        return self.files[0]["metric"]

    def values(self, key: Key) -> dict[int, float | None]:
        return {seed: row.value for seed, row in self.rows[key].items()}

    def mean(self, key: Key) -> float:
        return statistics.fmean(finite(self.values(key), self.metric).values())

    def number(self, value: float) -> str:
        if self.metric == "accuracy":
            return f"{value:.2%}"
        return "not finite" if value == float("inf") else f"{value:.4g}" if value < 1e4 else f"{value:.1e}"

    def mean_and_spread(self, key: Key) -> str:
        values = [*self.values(key).values()]
        numbers = [value for value in values if value is not None]
        mean = self.number(self.mean(key)) + (f" (n = {len(values)})" if len(values) < len(self.files) else "")
        if len(numbers) < len(values) or len(set(numbers)) < 2:
            return mean
        return mean + (f" ± {100 * spread(numbers):.2f}" if self.metric == "accuracy" else f" ± {spread(numbers):.2g}")

    def compared(self, key: Key, beside: str | None = None) -> Comparison | None:
        """With its own of the way ``beside``, over the seeds that have both; None where a value is not finite."""
        other = other_key(key, beside or BESIDE[key[2]])
        both = [self.values(each) for each in (key, other)]
        if any(values[seed] is None for values in both for seed in both[0].keys() & both[1].keys()):
            return None
        here, beside_it = (finite(values, self.metric) for values in both)
        usable = self.is_usable(self.mean(key)) or self.is_usable(self.mean(other))
        return Comparison(key[0], tuple(gains(here, beside_it, self.metric)), usable)

    def is_usable(self, value: float) -> bool:
        limit = USABLE[self.metric] * self.mean(DENSE)
        return value <= limit if self.metric == "perplexity" else value >= limit

    def against(self, way: str, beside: str | None = None) -> list[Comparison]:
        """Every model of one way beside its own of another."""
        compared = [self.compared(key, beside) for key in self.rows if key[2] == way]
        return [each for each in compared if each is not None]


def other_key(key: Key, way: str) -> Key:
    """The model of another way that stands beside one; the strategy alone has no tau."""
    return key[0], key[1], way, None if way == "alone" else key[3]


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_figures(folder: Path) -> list[ProbeFigures]:
    """Figures of all models in a folder; an error where seeds are not finished, or not comparable."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("probe_*.json")):
        file = json.loads(path.read_text())
        by_model.setdefault(file["settings"]["case"], []).append(file | {"path": path})
    if not by_model:
        raise ValueError(f"there are no figures in {folder}; python -m benchmarks evidence run makes them")
    return [_figures(name, files) for name, files in by_model.items()]


def _figures(name: str, files: list[dict[str, Any]]) -> ProbeFigures:
    rows: dict[Key, dict[int, Evaluated]] = {}
    for file in files:
        seed = file["settings"]["seed"]
        if file["settings"] != files[0]["settings"] | {"seed": seed}:
            raise ValueError(f"{file['path']} and {files[0]['path']} differ in their settings; run one of them anew")
        for row in (Evaluated(**row) for row in file["rows"]):
            rows.setdefault((row.strategy, row.level, row.way, row.tau), {})[seed] = row
    if not any(is_complete(file) for file in files):
        raise ValueError(f"no file of {name} is complete; python -m benchmarks evidence run does what is missing")
    for key, by_seed in rows.items():
        beside = rows[other_key(key, BESIDE.get(key[2], key[2]))]
        if any(abs(row.sparsity - beside[seed].sparsity) > 1e-6 for seed, row in by_seed.items()):
            raise RuntimeError(f"{name}, {key[0]} at {key[1]}: {key[2]} and what is beside it are not equally sparse")
    return ProbeFigures(files, rows)


def is_complete(file: dict[str, Any]) -> bool:
    return len(file["done"]) == file["num_steps"]


# The page


def parts(models: Sequence[ProbeFigures]) -> dict[str, str]:
    by_strategy = [
        [model.settings["case"], strategy, *counted(each for each in compared if each.strategy == strategy)]
        for model in models
        for compared in [model.against("probed")]
        for strategy in STRATEGIES
    ]
    tables = {
        "outcomes": outcome_table(models),
        "strategies": markdown_table(["model", "strategy", "better", "worse", "of"], by_strategy, words=(0, 1)),
    }
    return tables | {"models": "\n".join(map(_section, models))}


def counted(comparisons: Iterable[Comparison]) -> list[str]:
    """How many are clearly better, clearly worse, and all."""
    counts = Counter(each.outcome for each in comparisons)
    return [str(counts["better"]), str(counts["worse"]), str(counts.total())]


def outcome_table(models: Sequence[ProbeFigures]) -> str:
    """How often the probe is clearly better and worse, over all models and over those that are still usable."""
    lines = []
    for model in models:
        for (way, beside), title in TITLES.items():
            compared = model.against(way, beside)
            usable = counted(each for each in compared if each.usable)
            lines.append([model.settings["case"], title, *usable, *counted(compared)])
    headings = [f"{name}{of}" for of in (", usable", "") for name in ("better", "worse", "of")]
    return markdown_table(["model", "the probe", *headings], lines, words=(0, 1))


def _section(model: ProbeFigures) -> str:
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
    return f"""## {name}

{settings["about"]}. {_origin(model)}

### {name}: {metric} at exactly the level

{markdown_table(["", *(f"{level:.0%}" for level in levels)], exact)}

### {name}: the probe as it is defined ({settings["schedule"]}), gains in {gained}

{markdown_table(["", *(f"candidates {level:.0%}" for level in levels)], defined)}
"""


def _origin(model: ProbeFigures) -> str:
    """Data, seeds, notes, machines and versions."""

    def joined(values: Iterable[Any], by: str = ", ") -> str:
        return by.join(dict.fromkeys(map(str, values)))

    settings, files, made = model.settings, model.files, [file["environment"] for file in model.files]
    unit = f"windows of {settings['length']} tokens" if model.metric == "perplexity" else "images"
    samples = f"Calibrated on {settings['samples']} {unit}, seeds {joined(f['settings']['seed'] for f in files)}"
    words = [f"{samples}; {model.metric} on {settings['held_out']:,} held-out {unit}."]
    if unfinished := joined(file["settings"]["seed"] for file in files if not is_complete(file)):
        words.append(f"**The runs of seeds {unfinished} were interrupted.**")
    words += dict.fromkeys(file["note"] for file in files if "note" in file)
    versions = ", ".join(f"{name} {version}" for name, version in made[0]["versions"].items())
    machines, commits = joined((each["machine"] for each in made), "; "), joined(each["commit"] for each in made)
    return " ".join([*words, f"{machines}; {versions}; {joined(file['date'] for file in files)}, commit {commits}."])


def _marked(text: str, comparison: Comparison | None) -> str:
    sign = SIGNS.get(comparison.outcome, "") if comparison else ""
    return f"{sign}{text}{sign}"


def _exact(model: ProbeFigures, key: Key) -> str:
    """The figure, marked where it differs clearly from the strategy's alone, and the share beyond tau."""
    share = statistics.fmean(row.beyond or 0.0 for row in model.rows[key].values())
    beyond = f" ({share:.0%} beyond)" if share >= 0.005 else ""
    return _marked(model.mean_and_spread(key), model.compared(key)) + beyond


def _defined(model: ProbeFigures, key: Key) -> str:
    sparsity = statistics.fmean(row.sparsity for row in model.rows[key].values())
    figures = ", ".join(model.number(model.mean(other_key(key, way))) for way in ("probed", BESIDE["probed"], "by lot"))
    comparison = model.compared(key)
    gain = "" if comparison is None else f"; {comparison.gain:+.2f} ± {spread(comparison.gains):.2f}"
    return _marked(f"{sparsity:.1%}: {figures}{gain}", comparison)
