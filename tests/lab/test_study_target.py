"""A run of a study counts at the sparsity asked for, to the weight."""

import json
import shutil

import pytest
from small_gpt import fewer_weights
from study_command import rows, study

from prunus.files.json_file import read_json
from prunus.lab.recipe import SELECTORS
from prunus.lab.run import Run
from prunus.lab.study.results import summary
from prunus.lab.study.study_folder import Folder
from prunus.lab.trainer import train

pytestmark = pytest.mark.usefixtures("few_weights")


@pytest.fixture(scope="module")
def grown(done, base, tmp_path_factory):
    """The study with an arm that is cut row by row."""
    out = shutil.copytree(done, tmp_path_factory.mktemp("grown") / "study")
    with fewer_weights():
        arm = ("--arm", "row: score=magnitude allocate=row", "--sparsity", "0.8", "--seeds", "1")
        assert study(base, out, *arm) == 0
    return out


@pytest.fixture
def by_rows(grown, tmp_path):
    """The same, for one test to change."""
    return shutil.copytree(grown, tmp_path / "study")


def test_quality_off_the_target_does_not_count(copy):
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text(json.dumps(read_json(path) | {"sparsity": 0.14}))
    found = summary(Folder(copy), Folder(copy).plan())
    assert next(row for row in found["rows"] if row["arm"] == "bitter7")["seeds"] == [1]
    assert "14.0000% of the prunable weights are zero" in found["off_target"][0]["message"]


@pytest.mark.parametrize("arm", ["magnitude", "row"])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_one_weight_off_the_number_asked_for_does_not_count(arm, off, by_rows):
    path = by_rows / "runs" / f"{arm}-0.8-s0" / "result.json"
    result = read_json(path)
    path.write_text(json.dumps(result | {"num_asked": result["num_asked"] + off}))
    told = summary(Folder(by_rows), Folder(by_rows).plan())["off_target"]
    zeros = round(result["sparsity"] * result["num_prunable"])
    assert all(entry["message"].endswith(f"{zeros:,}; asked for were {zeros + off:,}") for entry in told)
    assert bool(told) == bool(off)


@pytest.mark.parametrize(("off", "counts"), [(-1, False), (0, True), (10, True), (11, False)])
def test_of_many_weights_a_few_that_stay_may_be_zero(off, counts, copy):
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    many = {"num_prunable": 10**7, "num_asked": 5 * 10**6, "sparsity": (5 * 10**6 + off) / 10**7}
    path.write_text(json.dumps(read_json(path) | many))
    assert (summary(Folder(copy), Folder(copy).plan())["off_target"] == []) == counts


@pytest.mark.parametrize("sparsity", [0.5, 0.77])
@pytest.mark.parametrize("allocate", SELECTORS)
@pytest.mark.parametrize("model", ["gpt2-tiny", "lenet5"])
def test_the_number_asked_for_is_what_a_training_removes(model, allocate, sparsity, base, tmp_path):
    if allocate == "2:4" and (model == "lenet5" or sparsity != 0.5):
        pytest.skip("one sparsity, of rows that 4 divides")
    data = str(base.parent / "text.txt") if model == "gpt2-tiny" else "digits"
    small = {"context": 8, "batch": 2, "steps": 2, "eval_size": 2, "device": "cpu", "out": tmp_path / "run"}
    how = {"score": "magnitude", "schedule": "one_shot", "begin": 1, "allocate": allocate, "sparsity": sparsity}
    result = train(Run(model=model, data=data, **how, **small))
    assert round(result.sparsity * result.num_prunable) == result.num_asked > 0


def test_rows_round_more_than_layers_and_count(by_rows):
    assert 0.001 < abs(rows(by_rows)["row"]["measured_sparsity"] - 0.8) < 0.02
