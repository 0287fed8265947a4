"""The comparison of ways to drop experts leaves the model as it was, and REAP chooses better than chance."""

import statistics

import pytest
import torch

from benchmarks import experts
from benchmarks.benchmark import all_records
from benchmarks.experts import Experts

pytest.importorskip("transformers")


@pytest.mark.slow
def test_every_way_is_as_small_and_the_model_is_dense_again_after_each(tmp_path):
    data = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(0))
    model = experts.trained(data, 1, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = {}
    for percent, way in experts.states(model, [experts.windows(data, 8, 0)], (25, 50), 2):
        sizes.setdefault(percent, {})[way] = sum(int(p.count_nonzero()) for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(sizes) == {0, 25, 50} and all(len(sizes[percent]) == 6 for percent in (25, 50))
    for percent in (25, 50):
        assert max(sizes[percent].values()) <= 1.005 * min(sizes[percent].values())  # rows are rounded one by one
        removed = sizes[0]["dense"] - sizes[percent]["experts by REAP"]
        assert removed == 2 * (8 * percent // 100) * (3 * 64 * 64 + 64)


@pytest.mark.slow
def test_reap_chooses_better_experts_than_chance(tmp_path):
    Experts(steps=250, models=1, draws=4, fractions=(25,), windows=64, eval_windows=128, results=tmp_path).run()
    (record,) = all_records(tmp_path)
    found = {row["way"]: row["perplexity"] for row in record["rows"]}
    random = [value for way, value in found.items() if way.startswith("random")]
    assert found["dense"] < 12  # it learned something
    assert found["dense"] * 0.98 < found["experts by REAP"] < statistics.fmean(random)
    text = experts.page(tmp_path)
    assert text is not None and "REAP is better than" in text and "25 %" in text
