"""``docs/reference.md``: the public names and their docstrings, and the table of scores."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import prunus
from prunus.lab.study.tables import markdown_table
from prunus.score import REGROWTH, SCORES

PACKAGE = Path(prunus.__file__).parent
CHAPTERS = {  # heading: where each name is imported from; a name of the package itself has no module
    "While training": "Pruner Event AdamWPrune Spam Rate parameter_groups Regrow",
    "Schedules": "Ramp OneShot Constant",
    "Selectors": "Global PerLayer PerRow NofM",
    "After training": "prune Repair BlockTuning Result quantize QuantizeResult shrink ShrinkResult",
    "Recovery": "recover Recovery",
    "Search and probe": "search oneshot:Limit oneshot:Levels oneshot:Bisection oneshot:TauTuning oneshot:Probe",
    "Files": "save_sparse load_sparse save_model load_model",
    "Running sparse": "sparsify_ sparse:unsparsify_ Decoder sparse:load_packed sparse:semi_structured_",
    "Checks": "doctor:examine",
    "Trainers": "integrations.huggingface:PruneCallback integrations.lightning:PruneCallback integrations.peft:merge",
}
REFERENCE = """# Reference

This page is made by `python -m benchmarks reference` from the docstrings. Names without a module are imported from
`prunus`: `from prunus import Pruner`. [The scores](#scores) have a table at the end.
"""
WHEN = {
    "magnitude": "the baseline; needs no data and no optimizer state",
    "bitter0": "to repeat older runs; behind bitter7 in our studies",
    "bitter1": "to repeat older runs",
    "bitter2": "to repeat older runs",
    "bitter3": "to repeat older runs; between magnitude and bitter7 at 80 %",
    "bitter4": 'to repeat older runs, with `PerLayer("depth")`',
    "bitter5": "to repeat older runs; far worse than magnitude in our studies",
    "bitter6": "to repeat older runs; behind bitter3 in our studies of GPTs",
    "bitter7": "**the default**: at 50 % as good as magnitude or better, at high sparsity better",
    "bitter8": "to repeat older runs",
    "bitter9": "to repeat older runs; far worse than magnitude in our studies",
    "fisher": "the loss that removal costs, by a diagonal Hessian; behind bitter7 at 80 % and more",
    "movement": "fine-tuning, for which it was made; behind magnitude on GPTs trained from scratch",
    "random": "the control that every comparison needs",
    "wanda": "masks after training, or where the inputs matter; with `PerRow()`",
}
SCORES_CHAPTER = """## Scores

These are the rows of the table `SCORES`. A score has the shape of its weight, and a larger one is kept longer. In the
formulas w is the weight, m and v are Adam's moments (`exp_avg`, `exp_avg_sq`), t is the step and x are the inputs.

{scores}

"Same as" names the score that is the same computation (for fisher and bitter8 where all weights took as many steps): a
study runs such arms once. eps is not added unless you give it (`score_options={{"eps": 1e-8}}`, `--eps 1e-8`): moments
may be far smaller than any constant. What the scores are worth: [results](evidence/results.md). Your own:
[add a score](extending.md).

Pruned weights come back, where `Regrow` lets them, by one of these:

{regrowth}
"""


def scores_chapter() -> str:
    lines = []
    for name, row in SCORES.items():
        other = "" if row.of.__name__ == name else row.of.__name__
        if row.canonical({})[0] != row.of.__name__:
            other = row.canonical({})[0]
        same = [f"`{other}`"] if other else []
        if "q" in (row.of.__kwdefaults__ or {}):
            same += [f"`{of}` with q={q:g}" for q in (0, 0.25) if (of := row.equals({"q": q}))]
        lines.append([f"`{name}`", _formula(row.of), _reads(row.reads), ", ".join(same), WHEN[name]])
    heads = ["score", "formula", "reads", "same as", "when to use it"]
    regrowth = [[f"`{name}`", _formula(row.of), _reads(row.reads)] for name, row in REGROWTH.items()]
    return SCORES_CHAPTER.format(
        scores=markdown_table(heads, lines, words=range(5)),
        regrowth=markdown_table(["by", "formula", "reads"], regrowth, words=range(3)),
    )


def _formula(of: object) -> str:
    """The formulas that open a docstring, or its first line where there is none."""
    first = (inspect.getdoc(of) or "").split("\n")[0]
    formulas = re.match(r"``.*?``(,? ``.*?``)*", first)
    if not formulas:
        return first.split(":")[0]
    shown = formulas.group().replace("|", "&#124;")  # which a table cannot hold, nor every reader as \|
    return re.sub(r"``(.*?)``", r"<code>\1</code>", shown)


def _reads(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def reference_page() -> str:
    parts = [REFERENCE]
    for heading, names in CHAPTERS.items():
        parts.append(f"## {heading}\n")
        parts += ["\n".join(_entry(name)) for name in names.split()]
    return "\n".join([*parts, scores_chapter()])


def _entry(place: str) -> Iterator[str]:
    """Signature, docstring and public members of one name."""
    module, _, name = place.rpartition(":")
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    if not module or not path.is_file():
        named = getattr(import_module(f"prunus.{module}".rstrip(".")), name)
        path = Path(inspect.getsourcefile(inspect.unwrap(named)) or "")
    source = path.read_text()
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    yield f"### {f'prunus.{module}.{name}' if module else name}\n"
    shown = _signature(node, source)
    if module and shown == f"{name}()":  # the constructor of a class that it derives from
        init = textwrap.dedent(inspect.getsource(getattr(import_module(f"prunus.{module}"), name).__init__))
        head = next(each for each in ast.parse(init).body if isinstance(each, ast.FunctionDef))
        shown = re.sub(r"self,\s*", "", _signature(head, init), count=1).replace("def __init__", name, 1)
        shown = shown.removesuffix(" -> None")
    yield f"```python\n{shown}\n```\n"
    yield (ast.get_docstring(node) or "").replace("``", "`") + "\n"
    if isinstance(node, ast.FunctionDef):
        return
    for member in node.body:
        words = ast.get_docstring(member) if isinstance(member, ast.FunctionDef) else None
        if isinstance(member, ast.FunctionDef) and words and not member.name.startswith("_"):
            decorated = {ast.unparse(each) for each in member.decorator_list}
            if any(each.endswith(".setter") for each in decorated):
                continue
            arguments = re.sub(r"^self(, )?", "", ast.unparse(member.args))
            about = " ".join(words.split("\n\n")[0].split()).replace("``", "`")
            yield f"- **`{member.name if 'property' in decorated else f'{member.name}({arguments})'}`**: {about}"
    yield ""


def _signature(node: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    """The head of a function, or the fields of a dataclass with their comments, or the constructor of a class."""
    lines = source.split("\n")
    if isinstance(node, ast.FunctionDef):
        return "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]).removesuffix(":")
    constructor = next((m for m in node.body if getattr(m, "name", "") == "__init__"), None)
    if isinstance(constructor, ast.FunctionDef):
        head = _signature(constructor, source).replace("    def __init__", node.name, 1)
        return re.sub(r"self,\s*", "", head, count=1).replace("\n    ", "\n").removesuffix(" -> None")
    fields = [m for m in node.body if isinstance(m, ast.AnnAssign) and not ast.unparse(m.target).startswith("_")]
    if not fields:
        return f"{node.name}()"
    shown = "\n".join("\n".join(lines[m.lineno - 1 : m.end_lineno]) for m in fields)
    return f"class {node.name}:\n{shown}"


@dataclass(frozen=True)
class Reference:
    """Write docs/reference.md from the docstrings and the table of scores."""

    docs: Path = Path("docs")  # folder to write

    def run(self) -> None:
        (self.docs / "reference.md").write_text(reference_page())
        print(f"{self.docs / 'reference.md'} written")
