"""The benchmark of many ranks measures each number of them, and one rank beside none."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.distributed import parts


@pytest.mark.slow
def test_the_command_measures_every_number_of_ranks_and_one_rank_beside_none(tmp_path):
    main(["distributed", *"--layers 2 --dim 16 --repeat 1".split(), "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("ranks", row.get("way")) for row in rows[:4]] == [1, 2, 4, "plain"]
    drawn = parts(tmp_path)
    assert rows[-1]["num_sums"] > 0 and "| 4 ranks, gloo |" in drawn["ranks"]
    assert drawn["projection"].count("\n") == 1  # a CPU says nothing about GPUs
