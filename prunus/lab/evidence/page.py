"""``docs/probe.md`` from the files of the study: no figure in it is typed, and its verdict follows from them."""

from collections.abc import Sequence
from pathlib import Path

from ..bench.markdown import table
from .figures import USABLE, Comparison, Figures, read_figures, spread
from .study import RANDOM, STRATEGIES, UNPROBED
from .verdict import verdict

INTRODUCTION = """# Does the gradient probe help?

This page is made by `prunus evidence page` from the JSON files in `benchmarks/evidence/`, its words too. `prunus \
evidence run` makes the files (`prunus evidence --help` says from what data); a run that was broken off goes on where \
it stopped, and models and seeds may be run on different machines.

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
from nothing. A model is called usable while its perplexity is below {perplexity:g} times the dense model's, or its \
accuracy above {accuracy:g} of it.
"""


def page(folder: Path) -> str:
    """The page for all files in ``folder``."""
    cases = read_figures(folder)
    _check_equal(cases)
    return INTRODUCTION + verdict(cases) + METHOD.format(**USABLE) + "\n".join(map(_section, cases))


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
    said = (
        f"Calibrated on {settings['samples']} {unit}, seeds {seeds}; {case.metric} on {settings['held_out']:,} "
        f"held-out {unit}."
    )
    if case.unfinished:
        broken = ", ".join(map(str, case.unfinished))
        said += f" **The runs of seeds {broken} were broken off**: n is the number of seeds where not all are there."
    return " ".join([said, *case.notes])


def _origin(case: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in case.environments[0]["versions"].items())
    machines = "; ".join(dict.fromkeys(environment["machine"] for environment in case.environments))
    commits = ", ".join(dict.fromkeys(str(environment["commit"]) for environment in case.environments))
    return f"{machines}; {versions}; {', '.join(dict.fromkeys(case.dates))}, commit {commits}."


def _levels(case: Figures) -> str:
    levels = case.settings["levels"]
    lines = [["dense", *[case.number(case.dense)] * len(levels)]]
    for name in (RANDOM, *STRATEGIES, *UNPROBED):
        lines.append([name, *(case.said((name, level, "alone", None)) for level in levels)])
    for name in STRATEGIES:
        for tau in case.settings["taus"]:
            lines.append([f"{name}, probe tau {tau:g}", *(_exact(case, name, level, tau) for level in levels)])
        lines.append([f"{name}, probe by ratios", *(_marked(case, name, level, "target") for level in levels)])
    return table(["", *(f"{level:.0%}" for level in levels)], lines)


def _exact(case: Figures, name: str, level: float, tau: float) -> str:
    beyond = [row.beyond or 0.0 for row in case.of(name, level, "exact", tau)]
    share = sum(beyond) / len(beyond)
    return _marked(case, name, level, "exact", tau) + (f" ({share:.0%} beyond)" if share >= 0.005 else "")


def _marked(case: Figures, name: str, level: float, way: str, tau: float | None = None) -> str:
    """The figure, with a mark where it differs clearly from the strategy's alone."""
    comparison = case.compared((name, level, way, tau), (name, level, "alone", None))
    return mark(case.said((name, level, way, tau)), comparison)


def mark(text: str, comparison: Comparison | None) -> str:
    sign = {"better": "**", "worse": "*"}.get(comparison.outcome, "") if comparison else ""
    return f"{sign}{text}{sign}"


def _defined(case: Figures) -> str:
    levels = case.settings["levels"]
    lines = []
    for name in STRATEGIES:
        for tau in case.settings["taus"]:
            lines.append([f"{name}, tau {tau:g}", *(_cell(case, name, level, tau) for level in levels)])
    return table(["", *(f"candidates {level:.0%}" for level in levels)], lines)


def _cell(case: Figures, name: str, level: float, tau: float) -> str:
    ways = ("probed", "alone, as sparse", "by lot")
    sparsity = [row.sparsity for row in case.of(name, level, "probed", tau)]
    comparison = case.compared((name, level, "probed", tau), (name, level, "alone, as sparse", tau))
    figures = ", ".join(case.number(case.mean(name, level, way, tau)) for way in ways)
    gain = "" if comparison is None else f"; {comparison.gain:+.2f} ± {spread(comparison.gains):.2f}"
    return mark(f"{_mean(sparsity):.1%}: {figures}{gain}", comparison)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
