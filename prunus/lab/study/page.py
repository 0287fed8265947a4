"""``docs/results.md`` from folders of studies and of profiles: no figure in a table is typed."""

from collections.abc import Sequence
from pathlib import Path

from ..bench.markdown import table, where
from ..profile.page import compile_section
from .folder import Folder, read_json
from .keys import num_examples, shared_fields
from .plan import Plan
from .results import summary
from .table import HEADINGS, cells_of, notes_of, title_of

INTRODUCTION = """# Results

This page is made by `prunus study page` from the folders in `studies/`; no figure in a table is typed, and where a
folder holds `notes.md` its text is taken over. Arms of a study start from the same weights for the same seed, read the
same batches in the same order and are evaluated on the same held-out data; they differ in the fields named and in
nothing else. Quality is read at the target sparsity alone, which is counted from the zeros. Intervals are Student's t
over paired seeds, each for its own comparison: of twenty comparisons of equal arms one is expected to look like a
difference.
"""


def page(folders: Sequence[Path]) -> str:
    """The page for these studies, in this order."""
    if not folders:
        raise ValueError("name the studies: prunus study page studies/*")
    return "\n".join([INTRODUCTION, *map(_section_of, folders)])


def _section_of(path: Path) -> str:
    return compile_section(path) if (path / "compile.json").is_file() else _section(Folder(path))


def _section(folder: Folder) -> str:
    plan = folder.plan()
    values = summary(folder, plan)
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
    lines = [f"{where(one)}; commit {one['commit']}" for one in every]
    return "  \n".join(f"{line}; {lines.count(line)} runs" for line in dict.fromkeys(lines))


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
