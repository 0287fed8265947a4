"""Advice follows from the figures, and the sampler costs no run."""

import subprocess
import time

import pytest
import torch

from prunus.cli.prune_tables import Profile, advice, split, table_rows
from prunus.lab.tracking import sampled, utilisation_reader

BASE = {"seconds": {"records": 1.0, "other": 9.0}, "rows": 8, "halved": 0, "used_bytes": 10, "left_bytes": 5}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Nothing stands out"),
        ({"halved": 1, "rows": 4}, "ran out once; --batch 4"),
        ({"halved": 3, "rows": 1}, "--offload"),
        ({"halved": 3, "rows": 1, "schedule": "block"}, "--checkpointing"),
        ({"checkpointing": True}, "not needed"),
        ({"left_bytes": 100}, "--batch 16"),
        ({"utilisation": 0.04}, "waits for the host"),
        ({"seconds": {"evaluation": 6.0, "other": 4.0}}, "--eval-windows"),
        ({"seconds": {"inspection": 6.0, "other": 4.0}}, "done once"),
        ({"seconds": {"records": 6.0, "other": 4.0}, "schedule": "sequential"}, "--probe block"),
        ({"seconds": {"scores": 6.0, "other": 4.0}}, "--samples"),
        ({"device": "cpu"}, "--device cuda"),
    ],
    ids=str,
)
def test_advice_follows_from_the_figures(changes, said):
    profile = Profile(**BASE | {"device": "cuda"} | changes)
    lines = advice(profile)
    assert any(said in line for line in lines)
    assert ("Nothing stands out" in lines[0]) == (not changes)
    if changes:
        assert not any(said in line for line in advice(Profile(**BASE | {"device": "cuda"})))


def test_parts_add_up_to_the_whole():
    assert split({"records": 2.0, "scores": 1.0}, 5.0) == {"scores": 1.0, "records": 2.0, "other": 2.0}
    assert split({"records": 2.0}, 1.0)["other"] == 0.0
    nothing = Profile({}, 0, 0, 1, 1, "cpu")
    assert nothing.total == 0 and nothing.share("records") == 0 and len(table_rows(nothing)) == 2


def test_numbers_are_read_while_something_runs_which_outlives_a_failure():
    values = iter([0.2, 0.4, 0.6] + [0.4] * 1000)
    with sampled(lambda: next(values), 0.001) as read:
        while len(read) < 3:
            time.sleep(0.001)
    assert read[:3] == [0.2, 0.4, 0.6]

    def fails():
        raise subprocess.TimeoutExpired("nvidia-smi", 5)

    with sampled(fails, 0.001) as read:
        time.sleep(0.01)
    assert not read
    with sampled(None) as read:
        pass
    assert not read


def test_a_cpu_has_no_utilisation_of_a_gpu():
    assert utilisation_reader(torch.device("cpu")) is None
