"""Small models that are trained here: experts are dropped and come back, and adapters are merged under masks."""

import pytest
import torch

from benchmarks import small_models

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
def test_every_way_to_drop_experts_is_measured_and_drawn(measure, tmp_path):
    options = "--steps 2 --models 1 --draws 2 --fractions 25 --windows 8 --eval-windows 8"
    rows, _ = measure(f"experts {options}")
    assert len(rows) == 1 + 6 and all(row["perplexity"] < 300 for row in rows)
    assert "| 25 % | random experts |" in small_models.parts(tmp_path / "results")["experts"]


@pytest.mark.slow
def test_a_merge_under_masks_is_measured_beside_other_ways(measure):
    pytest.importorskip("peft")
    measured, drawn = measure("lora --steps 20 --tuning 2 --seeds 1")
    rows = {row["way"]: row for row in measured}
    assert rows["LoRA, plain merge"]["sparsity"] < 0.01 and rows["LoRA, merge under masks"]["sparsity"] == 0.5
    assert all(f"| {way} |" in drawn for way in rows)
