"""A device that is not there is refused in one line, whatever torch makes of its name."""

import pytest
import torch

from prunus import load_sparse, save_sparse
from prunus.ops.machine import device_of


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu")], ids=str)
def test_a_device_that_is_there_is_given(name):
    assert device_of(name).type == "cpu"


@pytest.mark.parametrize("name", ["", "nonsense", "cuda:99", "mps:7", "meta", torch.device("meta")], ids=str)
def test_a_device_that_holds_no_values_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="there is no device"):
        device_of(name)
    save_sparse({"w": torch.zeros(8)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="there is no device"):
        load_sparse(tmp_path / "w.safetensors", device=name)
