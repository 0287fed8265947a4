"""The benchmark of the small form runs, checks first, and ends up on the page."""

import json

import pytest
import torch

from benchmarks import export
from benchmarks.__main__ import main
from benchmarks.export import Packing, ways
from benchmarks.page import tables


@pytest.mark.slow
def test_the_benchmark_measures_every_way_and_is_drawn(tmp_path, capsys):
    main(["export", "--megabytes", "1", "--repeat", "2", "--results", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 4 * 5
    for row in rows:
        assert row["pack_gb_s"] > 0 and row["unpack_gb_s"] > 0
        if row["size_goal"] is not None:
            assert row["size"] <= row["size_goal"]
    assert "| prunus: bits and values |" in tables(tmp_path)["export"]


def test_a_way_gives_back_what_it_packed(tmp_path):
    tensor = export.pruned_weight("bfloat16", 0.5, 4096, torch.device("cpu"))
    assert (tensor == 0).sum() == 2048
    for way in ways(tmp_path / "a.safetensors", torch.device("cpu")).values():
        assert torch.equal(way.unpack(way.pack(tensor), tensor), tensor)


def test_a_way_that_loses_a_bit_is_not_timed():
    tensor = torch.ones(4, 4)
    broken = Packing(lambda tensor: tensor, lambda packed, like: packed * 2, lambda packed: packed.nbytes)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        export.measure_way(broken, tensor, 2)
