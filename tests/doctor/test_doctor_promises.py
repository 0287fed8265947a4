"""What the doctor advises where a promise is not kept."""

import pytest
import torch
from safetensors.torch import save_file

from prunus.doctor import examine


@pytest.mark.parametrize("pattern", [None, "global", "layer"])
def test_weights_that_were_left_dense_are_named_with_the_option_that_leaves_them_out(pattern, tmp_path):
    tensors = {f"{i}.weight": torch.ones(4, 4) for i in range(3)} | {"attention.in_proj_weight": torch.ones(12, 4)}
    for i in range(3):
        tensors[f"{i}.weight"][:, :2] = 0
    save_file(tensors, tmp_path / "a.safetensors")
    (finding,) = examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern).findings
    assert finding.kind == "too-dense"
    assert "attention.in_proj_weight" in str(finding) and "--exclude" in finding.todo and "0.weight" not in finding.todo
    assert examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern, exclude=("*in_proj*",)).is_healthy
    for i in range(3):
        tensors[f"{i}.weight"].fill_(1)
    save_file(tensors, tmp_path / "b.safetensors")
    assert "--exclude" not in str(examine(tmp_path / "b.safetensors", sparsity=0.5, pattern=pattern).findings)
