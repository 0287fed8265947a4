"""Ranks that are killed end the others, and the same call ends with the bits of one that was not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def run(kind, state, out, killed="none", num_groups=0, num=2):
    """What ranks under torchrun left, the exit status, and the seconds it took."""
    out.mkdir(exist_ok=True)
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}"]
    call += [str(HERE / "shared_work_killed.py"), kind, str(state), str(out), killed, str(num_groups)]
    began = time.monotonic()
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=env)
    ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank_*.json"))]
    return ranks, done.returncode, time.monotonic() - began


KINDS = pytest.mark.parametrize("kind", ["model", "folder"])


@KINDS
def test_one_killed_rank_ends_the_others_and_then_all_killed_the_call_goes_on_to_the_same_bits(kind, tmp_path):
    state, whole_state = tmp_path / ".out.unfinished", tmp_path / ".whole_out.unfinished"
    whole, status, usual = run(kind, whole_state, tmp_path / "whole")
    assert status == 0 and len(whole) == 2 and whole[0] == whole[1] and whole[0]["sparsity"] == 0.5
    ranks, status, seconds = run(kind, state, tmp_path / "one", "one", 2)
    assert status != 0 and not ranks and seconds < usual + 60
    num_done = len(list(state.glob("group_*.pt")))
    assert num_done >= 2
    ranks, status, _ = run(kind, state, tmp_path / "all", "all", num_done + 2)
    assert status != 0 and not ranks and len(list(state.glob("group_*.pt"))) >= num_done + 2
    again, status, _ = run(kind, state, tmp_path / "again")
    assert status == 0 and again == whole


@KINDS
def test_another_number_of_ranks_goes_on_with_what_is_there(kind, tmp_path):
    state = tmp_path / ".out.unfinished"
    _, status, _ = run(kind, state, tmp_path / "one", "all", 2)
    assert status != 0
    ranks, status, _ = run(kind, state, tmp_path / "three", num=3)
    assert status == 0 and len(ranks) == 3 and ranks[0] == ranks[1] == ranks[2] and ranks[0]["sparsity"] == 0.5
