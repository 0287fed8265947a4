"""Imports point down: no module reaches for one above it, at the top of a file or inside a function."""

import ast
import sys
from pathlib import Path

import pytest

import prunus

PACKAGE = Path(prunus.__file__).parent
CORE = {
    "ops": set(),
    "files": set(),
    "schedule": set(),
    "allocate": set(),
    "eager": set(),
    "eligible": set(),
    "shard": {"ops"},
    "across": {"ops"},
    "across_rows": {"ops", "across"},
    "score": {"ops"},
    "mask": {"ops", "shard"},
    "cut": {"ops", "across"},
    "gradients": {"ops", "shard"},
    "select": {"ops", "allocate", "across", "across_rows", "cut", "mask", "schedule", "shard"},
    "inputs": {"eager", "eligible", "shard"},
    "stats": {"ops", "eligible", "score", "shard"},
    "summary": {"eligible", "shard"},
    "optim": {"ops", "mask", "shard"},
    "regrow": {"ops", "allocate", "cut", "eligible", "optim", "schedule", "score", "select", "shard", "stats"},
    "asked": {"allocate", "regrow", "schedule", "select", "stats"},
    "held": {"ops", "mask", "optim", "saved", "shard"},
    "saved": {"ops", "gradients", "mask", "shard"},
    "export": {"ops", "mask", "eligible", "files"},
}
ALL_BUT_TRAINING = set(CORE) - {"export"}
CORE["training"] = CORE["oneshot"] = ALL_BUT_TRAINING
CORE["integrations"] = {"training", "asked", "gradients"}
MAY_IMPORT = CORE | {
    "lab": set(CORE),
    "doctor": {"ops", "mask", "eligible", "schedule", "export"},
    "cli": {*CORE, "lab", "doctor"},
    "__main__": {"cli"},
}
# what else than torch and numpy the core may load, and where
HEAVY = {"triton": "ops/_triton", "transformers": "export/huggingface"}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path != Path("__init__.py")]


def imports_of(path):
    """Dotted names that a file imports, ``prunus.x`` for its own package's, however they are written."""
    here = ("prunus", *path.with_suffix("").parts)
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            start = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{start}.{alias.name}" for alias in node.names)


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


@pytest.mark.parametrize("path", [path for path in MODULES if layer_of(path) in CORE], ids=str)
def test_the_core_loads_torch_and_numpy_and_nothing_heavier(path):
    packages = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"prunus"}
    allowed = {"torch", "numpy"} | {name for name, place in HEAVY.items() if path.as_posix().startswith(place)}
    if layer_of(path) in ("schedule", "allocate"):
        allowed = set()
    if layer_of(path) != "integrations":
        assert packages <= allowed


def test_scores_use_of_the_operations_the_hash_alone():
    used = {name for name in imports_of(Path("score.py")) if name.startswith("prunus.")}
    assert all(name.startswith("prunus.ops.hash") for name in used)


def test_the_table_itself_has_no_circles():
    above = {layer: set(below) for layer, below in MAY_IMPORT.items()}
    while free := [layer for layer, below in above.items() if not below & set(above)]:
        above = {layer: below for layer, below in above.items() if layer not in free}
    assert not above
