"""What is wrong with a callback is said when it is made, or where a package is missing when it is imported."""

import importlib
import sys

import pytest

from prunus import Ramp
from prunus.integrations.pruner_options import PrunerOptions, refuse_sharding

NEEDED = {"huggingface": ["transformers"], "lightning": ["lightning.pytorch", "pytorch_lightning"], "peft": ["peft"]}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package_is_one_line_that_says_what_to_install(name, monkeypatch):
    for package in NEEDED[name]:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"prunus.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^[^\n]*needs {NEEDED[name][0].split('.')[0]}[^\n]*pip install prunus\["):
        importlib.import_module(f"prunus.integrations.{name}")


def test_a_misspelt_option_is_refused_when_the_callback_is_made():
    with pytest.raises(TypeError, match="shedule"):
        PrunerOptions({"shedule": Ramp(0.5, 1, 2)})
    with pytest.raises(ValueError, match="how sparse"):
        PrunerOptions({"score": "bitter7"})


@pytest.mark.parametrize("way", ["DistributedType.FSDP", "DistributedType.DEEPSPEED", "FSDPStrategy"])
def test_sharded_weights_are_refused(way):
    with pytest.raises(ValueError, match=way):
        refuse_sharding(way)
    refuse_sharding("DistributedType.MULTI_GPU")
    refuse_sharding("DDPStrategy")
