"""Small models that are trained here: experts are dropped and come back, and adapters are merged under masks."""

import json

import pytest
import torch

from benchmarks import small_models
from benchmarks.__main__ import main
from benchmarks.benchmark import all_records
from benchmarks.page import tables
from benchmarks.small_models import Experts

pytest.importorskip("transformers")


@pytest.mark.slow
def test_every_way_is_as_small_and_the_model_is_dense_again_after_each(tmp_path):
    data = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0))
    model = small_models.mixtral(data, 1, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = {}
    for percent, way in small_models.states(model, [small_models.windows(data, (8,), 0)], (25, 50), 2):
        sizes.setdefault(percent, {})[way] = sum(int(p.count_nonzero()) for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(sizes) == {0, 25, 50} and all(len(sizes[percent]) == 6 for percent in (25, 50))
    for percent in (25, 50):
        assert max(sizes[percent].values()) <= 1.005 * min(sizes[percent].values())  # rows are rounded one by one
        removed = sizes[0]["dense"] - sizes[percent]["experts by REAP"]
        assert removed == 2 * (8 * percent // 100) * (3 * 64 * 64 + 64)


@pytest.mark.slow
def test_every_way_to_drop_experts_is_measured_and_drawn(tmp_path):
    Experts(steps=2, models=1, draws=2, fractions=(25,), windows=8, eval_windows=8, results=tmp_path).run()
    (record,) = all_records(tmp_path)
    assert len(record["rows"]) == 1 + 6 and all(row["perplexity"] < 300 for row in record["rows"])
    assert "| 25 % | random experts |" in small_models.parts(tmp_path)["experts"]


@pytest.mark.slow
def test_a_merge_under_masks_is_measured_beside_other_ways(tmp_path):
    pytest.importorskip("peft")
    main(["lora", *"--steps 20 --tuning 2 --seeds 1".split(), "--results", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["LoRA, plain merge"]["sparsity"] < 0.01 and rows["LoRA, merge under masks"]["sparsity"] == 0.5
    assert all(f"| {way} |" in "".join(tables(tmp_path).values()) for way in rows)
