"""What is wrong with a callback is said when it is made, or where a package is missing when it is imported."""

import importlib
import sys
from functools import partial
from inspect import signature

import pytest
import torch

from prunus import Constant, Pruner, Ramp
from prunus.integrations.pruner_options import PruneCallbackBase

NEEDED = {"huggingface": ["transformers"], "lightning": ["lightning.pytorch", "pytorch_lightning"], "peft": ["peft"]}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_package_is_one_line_that_says_what_to_install(name, monkeypatch):
    for package in NEEDED[name]:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"prunus.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^[^\n]*needs {NEEDED[name][0].split('.')[0]}[^\n]*pip install prunus\["):
        importlib.import_module(f"prunus.integrations.{name}")


@pytest.mark.parametrize("name", ["huggingface", "lightning"])
def test_a_callback_has_the_options_of_a_pruner_with_their_defaults(name):
    callback = pytest.importorskip(f"prunus.integrations.{name}", exc_type=ImportError).PruneCallback
    model, optimizer, *options = signature(Pruner).parameters.values()
    assert (model.name, optimizer.name) == ("model", "optimizer")
    assert list(signature(callback).parameters.values()) == options


def test_a_wrong_call_is_refused_when_the_callback_is_made():
    with pytest.raises(TypeError, match="no option 'shedule'; did you mean schedule"):
        PruneCallbackBase(shedule=Ramp(0.5, 1, 2))
    with pytest.raises(TypeError, match=r"options by name: \w+\(schedule=Ramp"):
        PruneCallbackBase(Ramp(0.5, 1, 2))
    with pytest.raises(ValueError, match="masks= to keep"):
        PruneCallbackBase(score="bitter7")


@pytest.mark.parametrize("strategy", ["DistributedType.FSDP", "DistributedType.DEEPSPEED", "FSDPStrategy"])
def test_sharded_weights_are_refused(strategy):
    model = torch.nn.Linear(4, 4)
    begin = partial(PruneCallbackBase(schedule=Constant(0.5)).begin, num_steps=4, step=0, state=None)
    with pytest.raises(ValueError, match=strategy):
        begin(model, torch.optim.SGD(model.parameters()), strategy=strategy)
    for fine in ("DistributedType.MULTI_GPU", "DDPStrategy"):
        begin(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=fine).remove()
