"""The result of a study as text: the rows of its table, and ``docs/evidence/results.md``, all of its figures."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files.json_file import read_json
from ...files.one_line import in_one_line
from .intervals import written
from .results import summary
from .study_folder import Folder
from .study_plan import StudyPlan, num_examples, shared_fields

HEADINGS = (
    "arm",
    "sparsity",
    "zeros",
    "mean ± sd",
    "seeds",
    "against dense",
    "overlap",
    "budget",
    "time per run",
)
BEST = ("study", "sparsity", "best arm", "mean ± sd", "seeds", "dense", "against dense", "verdict")
MIB = 2**20
READING = {  # how to read a column
    "mean ± sd": "After a mean, ± is the standard deviation over seeds.",
    "against dense": "After a difference, ± is its 95 % interval over pairs of runs with the same seed. Dense are the "
    "runs that are equal in all but pruning, where the study has them.",
    "overlap": "Overlap is the Jaccard index of the pruned weights with those that magnitude prunes in the same recipe",
    "time per run": "Cold times include the start-up of the process; runs at once shared a device.",
}
INTRODUCTION = """# Results

This page is made by `prunus study page`; no figure in a table is typed, and where the folder of a study holds
`notes.md` its text is taken over. Arms of a study start from the same weights for the same seed, read the
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
COMPILE_ROWS = {
    "ms a step": lambda arm: f"{1e3 * arm['seconds']:.2f}",
    "tokens a second": lambda arm: f"{arm['tokens_a_second']:,.0f}" if arm["tokens_a_second"] else "",
    "peak memory, MiB": lambda arm: f"{sum(arm['memory']['peak'].values()) / MIB:,.0f}",
    "of it activations": lambda arm: f"{arm['memory']['peak']['activations'] / MIB:,.0f}",
    "memory between steps, MiB": lambda arm: f"{sum(arm['memory']['steady'].values()) / MIB:,.0f}",
    "start-up, s": lambda arm: f"{sum(arm['startup'].values()):.1f}",
    "GPU at work": lambda arm: "" if arm["busy"] is None else f"{arm['busy']:.1%}",
    "loss after the same steps": lambda arm: f"{arm['loss']:.5f}",
}


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A Markdown table whose first column and those of ``words`` are left-aligned and the others right-aligned."""
    lines = [headings, ["---" if i in (0, *words) else "---:" for i in range(len(headings))], *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def measured_on(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['machine']}; Python {environment['python']}, {versions}"


def title_of(values: Mapping[str, Any]) -> str:
    metric = values["metric"]
    unit = " in per cent" if metric["scale"] != 1 else ""
    done = f"{values['num_finished']} of {values['num_runs']} runs"
    return f"{metric['name']}{unit}, {metric['better']} is better; {done}"


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    shared = f", {row['at_once']} at once" if row["at_once"] > 1 else ""
    cost, decimals = "", row["decimals"]
    if row["cost"]:
        cost = written(row["cost"]["mean"], decimals, sign=True) + _plus_minus(row["cost"]["half_width"], decimals)
    cells = (
        row["arm"],
        f"{row['sparsity']:.1%}" if row["sparsity"] else "dense",
        f"{row['measured_sparsity']:.3%}",
        written(row["mean"], decimals) + _plus_minus(row["sd"], decimals),
        str(len(row["seeds"])),
        cost,
        "" if row["overlap"] is None else f"{row['overlap']:.3f}",
        f"x {row['budget_scale']:g}",
        f"{row['wall_seconds'] or row['seconds']:.1f} s{' cold' * row['cold']}{shared}",
    )
    return dict(zip(HEADINGS, cells, strict=True))


def verdict_of(row: Mapping[str, Any]) -> str:
    """What a row's comparison says; empty where it is compared with nothing."""
    if row["same_as"]:
        return f"the same computation as {row['same_as']}"
    if not row["against"]:
        return ""
    word, by, rest = row["verdict"].partition(" by ")
    mixed = mixed_with(row)  # unequal budgets and recipes are named
    if by and word in ("better", "worse"):
        return f"{word} than {row['against']} by {rest}{f'; {mixed}' if mixed else ''}"
    return f"{row['verdict']} (against {row['against']}{'; ' if mixed else ''}{mixed})"


def mixed_with(row: Mapping[str, Any]) -> str:
    """What else differs between an arm and the one it is compared with."""
    budget, other = row.get("budget_scale", 1.0), row.get("against_budget", 1.0)
    beside = row.get("beside") or []
    tokens = [f"{budget / other:g} times the tokens"] if budget != other else []
    return ", ".join([*tokens, *([f"{', '.join(beside)} differ{'s' * (len(beside) == 1)} too"] if beside else [])])


def _plus_minus(value: float | None, decimals: int) -> str:
    return "" if value is None else f" ± {written(value, decimals)}"


def verdict_lines(values: Mapping[str, Any]) -> Iterator[str]:
    for row in values["rows"]:
        if said := verdict_of(row):
            at = f" at {row['sparsity']:.1%}" if row["sparsity"] else ""
            yield f"{row['arm']}{at}: {said}"


def notes_of(values: Mapping[str, Any], columns: Sequence[str] = HEADINGS) -> Iterator[str]:
    """What failed, what does not count, and how to read ``columns``."""
    for kind, words in (("failed", "failed"), ("off_target", "not counted")):
        for entry in values[kind]:
            yield f"{words}: {entry['arm']} at {entry['sparsity']:g}, seed {entry['seed']}: {entry['message']}"
    if values["rows"]:
        sparsities = sorted({row["sparsity"] for row in values["rows"]} - {0.0})
        chance = ", ".join(f"{s / (2 - s):.3f} at {s:.0%}" for s in sparsities)
        by_chance = f" ({chance} by chance)." if chance else "."
        yield " ".join(text + by_chance * (name == "overlap") for name, text in READING.items() if name in columns)


def page(folders: Sequence[Path]) -> str:
    if not folders:
        raise ValueError("name the studies: prunus study page studies/*")
    plans = {path: Folder(path).plan() for path in folders if not (path / "compile.json").is_file()}
    studies = {path: summary(Folder(path), plan) for path, plan in plans.items()}
    rows = [row for path, values in studies.items() for row in _best_rows(path.name, values, plans[path])]
    overview = [OVERVIEW, markdown_table(BEST, rows, words=(2, len(BEST) - 1)), ""] if rows else []
    sections = [
        _section(Folder(path), plans[path], studies[path]) if path in plans else compile_section(path)
        for path in folders
    ]
    return "\n".join([INTRODUCTION, *overview, *sections])


def _best_rows(name: str, values: Mapping[str, Any], plan: StudyPlan) -> Iterator[list[str]]:
    """A row for each sparsity under the headings BEST, of arms with the study's own budget."""
    rows, sign = values["rows"], 1 if values["metric"]["better"] == "lower" else -1
    dense = {row["arm"]: row["mean"] for row in rows if not row["sparsity"]}
    unit = " %" if values["metric"]["scale"] != 1 else ""
    for sparsity in sorted({row["sparsity"] for row in rows} - {0.0}):
        pruned = [
            row
            for row in rows
            if row["sparsity"] == sparsity
            and row["arm"] != "random"
            and not row["same_as"]
            and row["budget_scale"] == plan.base.budget_scale
        ]
        best = min(pruned, key=lambda row: (-len(row["seeds"]), sign * row["mean"]), default=None)
        if best and len(pruned) > 1 and len(best["seeds"]) > 1:
            cells = cells_of(best)
            beside = f"{written(dense[best['dense']], best['decimals'])}{unit}" if best["dense"] in dense else ""
            about = (cells["mean ± sd"] + unit, cells["seeds"], beside, cells["against dense"], verdict_of(best))
            yield [f"[{name}](#{name})", cells["sparsity"], best["arm"], *about]


def _section(folder: Folder, plan: StudyPlan, values: Mapping[str, Any]) -> str:
    environments: Counter[str] = Counter()
    for run in sorted(folder.finished()[0].values(), key=lambda run: run.name):
        with in_one_line(f"{run.path / 'run.json'} does not say where it was run"):
            made = run.load("run.json")["environment"]
            environments[f"{measured_on(made)}; commit {made['commit']}"] += 1
    base = plan.base
    tokens = f", {num_examples(base) * base.context:,} tokens" if base.model.startswith("gpt2") else ""
    shared = {name: value for name, value in shared_fields(base).items() if value not in (None, [], "")}
    if all("score" in arm.changes for arm in plan.arms):
        del shared["score"]
    fields = ", ".join(f"{name} {value}" for name, value in shared.items())
    changed = [  # where the name of an arm does not say it
        f"{arm.name}: " + ", ".join(f"{name} {value}" for name, value in arm.changes.items())
        for arm in plan.arms
        if dict(arm.changes) != {"score": arm.name}
    ]
    rows = [[*cells_of(row).values(), verdict_of(row)] for row in values["rows"]]
    parts = [
        f"## {folder.path.name}",
        "  \n".join(f"{line}; {count} run{'s' * (count > 1)}" for line, count in environments.items()),
        f"{num_examples(base):,} examples{tokens} a run, of {Path(base.data).name}. Every arm has, but for what it is "
        f"said to change (hash `{plan.hash}`): {fields}.",
        _notes_in(folder.path),
        f"**{title_of(values)}**",
        markdown_table((*HEADINGS, "verdict"), rows, words=(len(HEADINGS),)),
        "\n\n".join(notes_of(values)),
        f"What arms change: {'; '.join(changed)}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _notes_in(folder: Path) -> str:
    path = folder / "notes.md"
    return path.read_text().strip() if path.is_file() else ""


def compile_section(folder: Path) -> str:
    path = folder / "compile.json"
    with in_one_line(f"{path} is not what prunus profile --compare compile writes"):
        values = read_json(path)
        eager, compiled, says = values["arms"]["eager"], values["arms"]["compile"], " ".join(values["says"])
        rows = [(name, write(eager), write(compiled)) for name, write in COMPILE_ROWS.items()]
        run, made = eager["run"], eager["environment"]
        window = f" of {run['context']} tokens" if eager["tokens_a_second"] else ""
        pruning = "dense" if run["score"] == "none" else f"{run['score']} to {run['sparsity']:.0%}"
        origin = (
            f"{measured_on(made)}; commit {made['commit']}; `prunus profile --compare compile`: {run['model']}, "
            f"batch {run['batch']}{window}, {run['precision']}, {pruning}, each arm in a process of its own."
        )
    table = markdown_table(("", "eager", "torch.compile"), rows)
    parts = [f"## {folder.name}", origin, _notes_in(folder), table, says]
    return "\n\n".join(part for part in parts if part) + "\n"
