"""Imports point down and never in a circle: at the top of a file, inside functions, and for typing alone."""

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import prunus

PACKAGE = Path(prunus.__file__).parent
CORE = {
    "ops": set(),
    "schedule": set(),
    "plot": set(),
    "score": {"ops"},
    "ranks": {"ops"},
    "eligible": set(),
    "grids": {"ops"},
    "sparsity_report": {"eligible", "plot", "ranks"},
    "threshold": {"ops"},
    "rows": {"ops", "threshold"},
    "allocate": set(),
    "select": {"ops", "allocate", "ranks", "threshold", "rows"},
    "statistics": {"ops", "eligible", "score", "ranks"},
    "input_statistics": {"eligible", "ranks"},
    "masks": {"ops", "ranks"},
    "owners": {"masks"},
    "optim": {"ops", "ranks", "masks"},
    "rate": {"ops", "eligible", "ranks", "optim"},
    "masking": {"ops", "ranks", "masks", "optim", "statistics"},
    "regrow": {"ops", "eligible", "ranks", "schedule", "score", "select", "statistics", "threshold"},
    "validation": {"eligible", "ranks", "rate", "regrow", "schedule", "select", "statistics"},
    "reloaded": {"ops", "masking", "validation"},
    "files": {"ops", "masks", "grids"},
}
BELOW = set(CORE)
CORE |= {
    "pruner": BELOW - {"files"},
    "oneshot": (BELOW | {"export"}) - {"rate", "regrow", "validation", "masking", "reloaded"},
    "sparse": {"ops", "eligible", "grids", "files", "export"},
    "export": {"ops", "eligible", "grids", "files", "plot"},
    "integrations": {"pruner", "masking", "rate", "regrow", "schedule", "select", "validation"},
}
CORE["recovery"] = {*BELOW, "oneshot", "pruner", "export"}
MAY_IMPORT = CORE | {
    "doctor": {"ops", "masks", "eligible", "grids", "files"},
    "trained": {"ops", "eligible", "grids", "files", "oneshot", "export"},
    "lab": {*CORE, "trained"},
    "cli": {*CORE, "trained", "lab", "doctor"},
    "__main__": {"cli"},
}
# what else than torch and numpy the core may load, and where
HEAVY = {
    "triton": ("ops/_triton", "sparse/_triton"),
    "accelerate": ("recovery/recovery_trainer", "export/empty_model"),
    "safetensors": ("recovery/recovery_trainer",),
    "transformers": (
        "export/huggingface",
        "export/stored_form",
        "recovery/",
        "sparse/decoder",
        "sparse/attention",
        "sparse/advise",
    ),
    "gguf": ("export/gguf_parsing",),
    "huggingface_hub": ("export/hub",),
    "matplotlib": ("plot",),
}
# the same idea in two packages: a definition and its kernels, a command and what it does, both ends of Hugging Face
SHARED_NAMES = {
    "recover.py",
    "result.py",
    "candidates.py",
    "compact.py",
    "divergence.py",
    "rows.py",
    "prune.py",
    "shrink.py",
    "huggingface.py",
}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path != Path("__init__.py")]
NAMES = {".".join(("prunus", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}


@cache
def imports_of(path):
    """Dotted names that a file imports, ``prunus.x`` for its own package's, however they are written."""
    here, found = ("prunus", *path.with_suffix("").parts), []
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            start = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += [f"{start}.{alias.name}" for alias in node.names]
    return found


def files_of(path):
    """Files of this package that a file imports."""
    for name in imports_of(path):
        found = NAMES.get(name) or NAMES.get(name.rpartition(".")[0])
        if name.startswith("prunus.") and found not in (None, path, Path("__init__.py")):
            yield found


def layers_of(path):
    """Layers of this package that a file imports."""
    parts = [name.split(".") for name in imports_of(path)]
    inside = {name[1] for name in parts if name[0] == "prunus" and len(name) > 1} - {"__version__"}
    return {prunus._HOME.get(name, name) for name in inside}


def layer_of(path):
    return path.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path):
    layer = layer_of(path)
    assert layer in MAY_IMPORT, "say in MAY_IMPORT what this module may import"
    assert layers_of(path) <= {layer, *MAY_IMPORT[layer]}


def test_no_files_import_each_other_in_a_circle():
    left = {path: set(files_of(path)) for path in MODULES}
    while free := [path for path, below in left.items() if not below & set(left)]:
        left = {path: below for path, below in left.items() if path not in free}
    assert not left


def test_every_layer_of_the_table_exists():
    assert set(MAY_IMPORT) == {layer_of(path) for path in MODULES}


def test_no_two_files_have_one_name_unless_they_are_one_idea():
    counts = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert {name for name, count in counts.items() if count > 1} <= SHARED_NAMES


@pytest.mark.parametrize("path", [path for path in MODULES if layer_of(path) in CORE], ids=str)
def test_the_core_loads_torch_and_numpy_and_nothing_heavier(path):
    packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"prunus"}
    allowed = {"torch", "numpy"} | {name for name, places in HEAVY.items() if path.as_posix().startswith(places)}
    if layer_of(path) in ("allocate", "schedule"):
        allowed = set()
    if layer_of(path) != "integrations":
        assert packages <= allowed


def test_scores_load_of_the_operations_hashes_and_formulas_alone():
    used = {name for name in imports_of(Path("score.py")) if name.startswith("prunus.")}
    assert all(name.startswith("prunus.ops.formula.") for name in used)
