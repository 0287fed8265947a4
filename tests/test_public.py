"""The public names are there, come when they are used, and ``import prunus`` costs next to nothing."""

import subprocess
import sys

import pytest

import prunus

NAMES = {
    "SCORES": "score",
    "AdamWPrune": "optim",
    "BlockTuning": "oneshot",
    "Constant": "schedule",
    "Decoder": "sparse",
    "Event": "pruner",
    "Global": "select",
    "NofM": "select",
    "OneShot": "schedule",
    "PerLayer": "select",
    "PerRow": "select",
    "Pruner": "pruner",
    "QuantizeResult": "oneshot",
    "Ramp": "schedule",
    "Rate": "rate",
    "Recovery": "recovery",
    "Regrow": "regrow",
    "Repair": "oneshot",
    "Result": "oneshot",
    "ShrinkResult": "oneshot",
    "Spam": "optim",
    "load_model": "export",
    "load_sparse": "export",
    "parameter_groups": "rate",
    "prune": "oneshot",
    "quantize": "oneshot",
    "recover": "recovery",
    "save_model": "export",
    "save_sparse": "export",
    "search": "oneshot",
    "shrink": "oneshot",
    "sparsify_": "sparse",
}
HEAVY = ["triton", "transformers", "lightning", "pytorch_lightning", "matplotlib", "pandas", "sklearn", "PIL"]


def modules_after(program):
    """Names of the modules that a fresh interpreter has loaded after ``program``."""
    run = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(("name", "home"), NAMES.items())
def test_a_public_name_is_that_of_its_module(name, home):
    module = __import__(f"prunus.{home}", fromlist=[name])
    assert getattr(prunus, name) is getattr(module, name)


def test_the_public_names_are_listed():
    assert set(prunus.__all__) == set(NAMES)
    assert set(NAMES) <= set(dir(prunus))
    assert prunus.__version__.count(".") == 2


def test_star_and_named_imports_work():
    scope = {}
    exec("from prunus import *", scope)
    assert set(NAMES) <= set(scope)


def test_an_unknown_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match=r"'prunus'.*'Prunner'"):
        _ = prunus.Prunner
    with pytest.raises(ImportError, match="Prunner"):
        exec("from prunus import Prunner")
    assert not hasattr(prunus, "__wrapped__")


@pytest.mark.parametrize("program", ["import prunus", "from prunus import Constant, OneShot, Ramp"])
def test_schedules_and_the_package_itself_load_no_torch(program):
    loaded = modules_after(program)
    assert not loaded & {"torch", "numpy", "prunus.pruner", "prunus.lab", "prunus.cli", *HEAVY}


def test_the_pruner_loads_torch_and_nothing_heavier():
    loaded = modules_after("from prunus import *")
    assert "torch" in loaded and not loaded & {"prunus.lab", "prunus.cli", *HEAVY}
