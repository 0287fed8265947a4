"""What the figures of the study say, in words that follow from them."""

from collections import Counter
from collections.abc import Sequence

from .figures import Comparison, Figures, Key
from .study import STRATEGIES, UNPROBED

PAIRS = {  # title: way, what stands beside it
    "at exactly the level, its veto with replacements": ("exact", "alone"),
    "at exactly the level, by the smallest ratios": ("target", "alone"),
    "as it is defined, beside the strategy alone as sparse": ("probed", "alone, as sparse"),
}


def verdict(cases: Sequence[Figures]) -> str:
    """The answer in a sentence, and a line for every model."""
    found = [each for case in cases for way, beside in PAIRS.values() for each in case.against(way, beside)]
    lines = [_answer(found) + _exceptions(cases)]
    for case in cases:
        lines.append(f"- **{case.name}.** {_line(case)}")
    return "\n".join(lines) + "\n"


def _answer(found: Sequence[Comparison]) -> str:
    every, usable = _counts(found), _counts([each for each in found if each.usable])
    counts = usable if sum(usable.values()) else every
    share = {name: counts[name] / max(1, sum(counts.values())) for name in ("better", "worse")}
    if not (counts["better"] or counts["worse"]):
        said = "No clear effect of the probe is seen"
    elif share["better"] > 2 * share["worse"] and share["better"] > 0.5:
        said = "The probe helps in most cases"
    elif share["worse"] > 2 * share["better"] and share["worse"] > 0.5:
        said = "The probe does not help: at equal sparsity it makes most models worse"
    elif share["better"] > share["worse"]:
        said = "The probe helps more often than it hurts, but not in most cases"
    else:
        said = "The probe does not help: it hurts at least as often as it helps"
    return f"{said}. Of all comparisons with the strategy alone at equal sparsity {_said(every)}; of those in which \
one of both models is still usable, {_said(usable)}."


def _exceptions(cases: Sequence[Figures]) -> str:
    """Where the probe as it is defined is clearly better at most levels and taus, and nowhere clearly worse."""
    parts = []
    for case in cases:
        for strategy, counts in _by_strategy(case).items():
            total = sum(counts.values())
            if not counts["worse"] and 2 * counts["better"] > total:
                said = f"{counts['better']} of {total} better, ruined models counted in"
                parts.append(f"{case.name}, {strategy}, {case.settings['schedule']} ({said})")
    return f" As it is defined it helps at most levels, and hurts at none, in: {'; '.join(parts)}.\n" if parts else "\n"


def _line(case: Figures) -> str:
    parts = []
    for title, (way, beside) in PAIRS.items():
        every = case.against(way, beside)
        found = [each for each in every if each.usable]
        parts.append(f"{title.capitalize()}: {_said(_counts(found))}{_extremes(case, found)}; {_all(every)}.")
    parts.append(_where(case))
    lot = [each for each in case.against("probed", "by lot") if each.usable]
    parts.append(f"Beside a veto by lot of as many weights: {_said(_counts(lot))}.")
    return " ".join([*parts, _helps(case)])


def _all(every: Sequence[Comparison]) -> str:
    """The same with the models that are ruined on both sides."""
    counts = _counts(every)
    return f"ruined models counted in, {counts['better']} better and {counts['worse']} worse of {len(every)}"


def _where(case: Figures) -> str:
    """Which strategies the probe as it is defined helps, at any level."""
    parts = []
    for strategy, counts in _by_strategy(case).items():
        parts.append(f"{strategy} {counts['better']} better and {counts['worse']} worse of {sum(counts.values())}")
    return f"By strategy, as it is defined and at all levels: {'; '.join(parts)}."


def _by_strategy(case: Figures) -> dict[str, Counter[str]]:
    """Outcomes of the probe as it is defined."""
    found = case.against("probed", "alone, as sparse")
    return {name: _counts([each for each in found if each.strategy == name]) for name in STRATEGIES}


def _extremes(case: Figures, found: Sequence[Comparison]) -> str:
    """The largest clear gain and loss."""
    unit = "%" if case.metric == "perplexity" else "points"
    said = []
    for outcome, pick in (("better", max), ("worse", min)):
        clear = [each for each in found if each.outcome == outcome]
        if clear:
            most = pick(clear, key=lambda each: each.gain)
            where = f"{most.strategy} at {most.level:.0%}" + ("" if most.tau is None else f", tau {most.tau:g}")
            said.append(f"at most {abs(most.gain):.2g} {unit} {outcome} ({where})")
    return f"; {' and '.join(said)}" if said else ""


def _helps(case: Figures) -> str:
    """The best strategy at each level, and what its choice is worth beside the probe."""
    parts = []
    for level in case.settings["levels"]:
        names: list[Key] = [(name, level, "alone", None) for name in (*STRATEGIES, *UNPROBED)]
        best, worst = case.best(names), case.worst(names)
        if case.is_usable(case.mean(*best)):
            parts.append(f"{level:.0%}: {best[0]} ({case.said(best)}; {worst[0]} {case.said(worst)})")
    if not parts:
        return "No strategy leaves a usable model at any level."
    return f"What helps is the choice of the strategy, of which the best and the worst are, at {'; '.join(parts)}."


def _counts(found: Sequence[Comparison]) -> Counter[str]:
    return Counter(each.outcome for each in found)


def _said(counts: Counter[str]) -> str:
    total = sum(counts.values())
    if not total:
        return "there is none"
    return f"{counts['better']} of {total} are clearly better, {counts['worse']} clearly worse"
