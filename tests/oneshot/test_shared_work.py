"""Ranks that prune together end with the same bits, exact counts and the errors of one process, or stop together."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
QUICK = ("solver", "2:4 by wanda", "experts", "convolutions", "pruned and in 4 bits", "fewer neurons")
REFUSALS = {
    "sparsity": "rank 1 and rank 0 have different sparsity",
    "selector": "rank 1 and rank 0 have different select",
    "samples": "rank 1 and rank 0 have different samples",
    "weights": "rank 1 and rank 0 have different weights",
    "state": "rank 1 and rank 0 have different state",
    "few samples": "each of 2 ranks needs at least one sample, but there are 1; use fewer ranks",
    "a sample that is not finite": "the inputs of 0.weight are not finite; check sample 3 (rank 1)",
    "batches that fail on a rank": "the disk is gone (rank 1)",
    "tuning": "a probe and tuning run only in one process",
    "a folder that a rank lacks": "nowhere is not a Hugging Face model folder: it has no config.json (rank 1)",
    "a folder with other weights": "rank 1 and rank 0 have different weights",
    "a folder and a model": "rank 1 and rank 0 have different out",
    "a folder in few bits without a repair": "ranks can quantise a model on disk only with a repair",
    "no group": "group must be a process group that has this rank, or True for all ranks, got 'gloo'",
}


@cache
def outcome(out, num, cases):
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    call = [sys.executable, str(HERE / "shared_work_checks.py"), str(out), str(num), cases]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{name}.json").read_text()) for name in ("alone", *range(num))]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("ranks"), 2, "quick")


def assert_alike(name, alone, ranks):
    """The same on all ranks; counts as in one process, and errors but for the order of sums."""
    first, expected = ranks[0][name], alone["solver" if name == "small" else name]
    assert all(rank[name] == first for rank in ranks)
    assert first["zeros"] == expected["zeros"] and first["shapes"] == expected["shapes"]
    assert first["errors"].keys() == expected["errors"].keys()
    for layer, errors in expected["errors"].items():
        assert first["errors"][layer] == [error and pytest.approx(error, rel=1e-3) for error in errors], layer


@pytest.mark.parametrize("name", (*QUICK, "small"))
def test_two_ranks_end_with_the_same_bits_exact_counts_and_the_errors_of_one_process(quick, name):
    assert_alike(name, quick[0], quick[1:])


def test_one_rank_that_prunes_without_a_group_works_alone_with_the_bits_of_one_process(quick):
    alone, _, other = quick
    assert other["alone"]["bits"] == alone["solver"]["bits"]


def test_the_largest_scores_of_all_ranks_are_those_of_one_process_with_ties_and_masks(quick):
    assert [rank["largest"] for rank in quick[1:]] == [[], []]


@pytest.mark.parametrize("name", REFUSALS)
def test_ranks_that_differ_or_fail_stop_together_with_one_line(quick, name):
    lines = [rank["refusals"][name] for rank in quick[1:]]
    assert lines[0] == lines[1] and REFUSALS[name] in lines[0]


def test_calls_that_were_refused_change_no_weight_and_write_no_file(quick):
    assert all(rank["refusals"]["unchanged"] and not rank["refusals"]["files"] for rank in quick[1:])


def test_three_ranks_do_all_else_alike_too(tmp_path):
    alone, *ranks = outcome(tmp_path, 3, "slow")
    for name in alone:
        if name in ranks[0]:
            assert_alike(name, alone, ranks)
    assert all(rank["largest"] == [] for rank in ranks)
