"""Tests that compare two implementations of a formula hold with the arithmetic of other machines too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machines import other_roots

TESTS = Path(__file__).parent


@pytest.mark.parametrize("of", [torch.sqrt, torch.rsqrt, torch.exp, lambda x: x**0.3, lambda x: x.clone().sqrt_()])
def test_a_function_of_another_machine_differs_by_units_in_the_last_place_and_by_value_alone(of):
    x = torch.cat([torch.rand(9999) * 4, torch.tensor([0.0, 1.0, torch.inf])])
    here = of(x)
    with other_roots():
        there = of(x)
        assert torch.equal(of(x[3:101]), there[3:101])
    units = (here.view(torch.int32) - there.view(torch.int32)).abs()
    is_exact = (here == 0) | (here == 1) | here.isinf()
    assert (units > 0).float().mean() > 0.2 and units.max() <= 4 and not units[is_exact].any()
    assert torch.equal(of(x), here)


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "capability"), [("other-roots", "default"), ("no-onednn", None)], ids=str)
def test_implementations_agree_on_another_machine(machine, capability):
    """In a process of its own, because torch reads its instruction set when it is loaded."""
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.rounding" in path.read_text()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "rounding and not slow", "--machine", machine]
    run = [sys.executable, "-m", "pytest", *options, *files]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment, cwd=TESTS.parent)
    assert ended.returncode == 0, ended.stdout[-3000:]
