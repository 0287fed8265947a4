"""``docs/results.md`` from folders of studies and of profiles: no figure in a table is typed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.json_file import read_json
from ..markdown import table, where
from ..profile.page import compile_section
from .folder import Folder
from .keys import num_examples, shared_fields
from .plan import Plan
from .results import summary
from .statistics import written
from .table import HEADINGS, cells_of, notes_of, title_of

INTRODUCTION = """# Results

This page is made by `prunus study page` from the folders in `studies/`; no figure in a table is typed, and where a
folder holds `notes.md` its text is taken over. Arms of a study start from the same weights for the same seed, read the
same batches in the same order and are evaluated on the same held-out data; they differ in the fields named and in
nothing else. Quality is read at the target sparsity alone, which is counted from the zeros. Intervals are Student's t
over paired seeds, each for its own comparison: of twenty comparisons of equal arms one is expected to look like a
difference.
"""
OVERVIEW = """## What came out best

Of every study the arm with the best mean at each sparsity, random and other budgets aside, among those with the most
seeds; beside it dense in the same recipe, and what it was held against. That it is the first of several is a part of
why it looks good: its interval is for one comparison. Where arms have one seed, none of them is called the best.
"""


def page(folders: Sequence[Path]) -> str:
    """The page for these studies, in this order."""
    if not folders:
        raise ValueError("name the studies: prunus study page studies/*")
    studies = {path: _summary(Folder(path)) for path in folders if not (path / "compile.json").is_file()}
    budgets = {path: Folder(path).plan().base.budget_scale for path in studies}
    rows = [row for path, values in studies.items() for row in _best_rows(path.name, values, budgets[path])]
    overview = [OVERVIEW, table(BEST, rows, words=(2, len(BEST) - 1)), ""] if rows else []
    sections = [_section(Folder(path), studies[path]) if path in studies else compile_section(path) for path in folders]
    return "\n".join([INTRODUCTION, *overview, *sections])


def _summary(folder: Folder) -> dict[str, Any]:
    return summary(folder, folder.plan())


BEST = ("study", "asked", "best arm", "mean ± sd", "seeds", "dense", "to dense", "verdict")


def _best_rows(name: str, values: Mapping[str, Any], budget: float) -> Iterator[list[str]]:
    """Under BEST, a row for each sparsity, of arms with this budget."""
    rows, sign = values["rows"], 1 if values["metric"]["better"] == "lower" else -1
    dense = {row["arm"]: row["mean"] for row in rows if not row["sparsity"]}
    unit = " %" if values["metric"]["scale"] != 1 else ""
    for sparsity in sorted({row["sparsity"] for row in rows} - {0.0}):
        pruned = [row for row in rows if row["sparsity"] == sparsity and _may_be_best(row, budget)]
        best = min(pruned, key=lambda row: (-len(row["seeds"]), sign * row["mean"]), default=None)
        if best and len(pruned) > 1 and len(best["seeds"]) > 1:
            cells = dict(zip(HEADINGS, cells_of(best), strict=True))
            beside = f"{written(dense[best['dense']], best['decimals'])}{unit}" if best["dense"] in dense else ""
            mean = cells["mean ± sd"] + unit
            told = (mean, cells["seeds"], beside, cells["to dense"], cells["verdict"])
            yield [f"[{name}](#{name})", cells["asked"], best["arm"], *told]


def _may_be_best(row: Mapping[str, Any], budget: float) -> bool:
    return row["arm"] != "random" and not row["same_as"] and row["budget_scale"] == budget


def _section(folder: Folder, values: Mapping[str, Any]) -> str:
    plan = folder.plan()
    notes = folder.path / "notes.md"
    rows = [cells_of(row) for row in values["rows"]]
    parts = [
        f"## {folder.path.name}",
        _environments(folder),
        _configuration(plan),
        *([notes.read_text().strip()] if notes.is_file() else []),
        f"**{title_of(values)}**",
        table(HEADINGS, rows, words=(len(HEADINGS) - 1,)),
        "\n\n".join(notes_of(values)),
        _arms(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _environments(folder: Folder) -> str:
    """Machines, versions and commits of the finished runs, each once."""
    every = [read_json(run / "run.json")["environment"] for run in sorted(folder.finished().values())]
    lines = Counter(f"{where(one)}; commit {one['commit']}" for one in every)
    return "  \n".join(f"{line}; {count} run{'s' * (count > 1)}" for line, count in lines.items())


def _configuration(plan: Plan) -> str:
    base = plan.base
    tokens = f", {num_examples(base) * base.context:,} tokens" if base.model.startswith("gpt2") else ""
    shared = {name: value for name, value in shared_fields(base).items() if value not in (None, [])}
    if all("score" in arm.changes for arm in plan.arms):
        del shared["score"]
    fields = ", ".join(f"{name} {value}" for name, value in shared.items())
    return (
        f"{num_examples(base):,} examples{tokens} a run, of {Path(base.data).name}. Every arm has, but for what it is "
        f"said to change (hash `{plan.hash}`): {fields}."
    )


def _arms(plan: Plan) -> str:
    """What each arm changes, where its name does not say it."""
    changed = [
        f"{arm.name}: " + ", ".join(f"{name} {value}" for name, value in arm.changes.items())
        for arm in plan.arms
        if dict(arm.changes) != {"score": arm.name}
    ]
    return f"What arms change: {'; '.join(changed)}."
