"""The study of shrinking: small models go the same way, a killed study continues, and the page draws the records."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import page
from benchmarks import shrink_study as study
from benchmarks.__main__ import main
from benchmarks.multiplications import smallest_share
from benchmarks.shrink_figures import GOALS, best_of, increase, parts, read_figures
from benchmarks.study import level_name, share_of
from prunus.lab.run import Run
from prunus.lab.trainer import train

pytest.importorskip("accelerate")
STUDIES = page.Path(page.__file__).parents[1] / "studies"
SIZES = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--length", "8", "--seeds", "0", "--device", "cpu"]


@pytest.mark.slow
def test_every_score_removes_as_much_with_and_without_a_refit_and_what_learns_stays_small(llama, records):
    ways = [*study.SCORES, "wanda-refit", "obs", "solved"]
    main(["shrink-study", *llama, "--levels", "1/2", "--ways", *ways, "--recover", "solved", "--steps", "2"])
    dense, *rows = records()
    assert dense["way"] == "dense" and [row["way"] for row in rows] == [*ways, "solved-recover"]
    assert len({row["weights"] for row in rows}) == 1 and {row["weights_before"] for row in rows} == {1920}
    assert 0.4 * 1920 < rows[0]["weights"] <= 0.5 * 1920
    assert rows[-1]["before_value"] == rows[-2]["value"] and rows[-1]["steps"] == 2


@pytest.mark.slow
def test_a_killed_study_continues(llama, kill_recovery, records):
    command = ["shrink-study", *llama, "--levels", "25", "50", "--ways", "tuned", "--recover", "dense-targets"]
    command += ["--steps", "2"]
    kill_recovery(2)
    with pytest.raises(SystemExit):
        main(command)
    before = records()
    main(command)
    rows = records()
    assert rows[: len(before)] == before and len({(row["way"], row["level"]) for row in rows}) == len(rows) == 1 + 2 * 3


def test_texts_are_written_by_the_dense_model_and_by_those_that_learned(llama, monkeypatch, records):
    monkeypatch.setattr(study, "tokenizer_of", lambda *where: Words())
    monkeypatch.setattr(study, "NEW_TOKENS", 5)
    ways = ["--recover", "norm", "--ways", "norm"]
    main(["shrink-study", *llama, "--levels", "50", *ways, "--steps", "1", "--texts"])
    texts = {row["way"]: row.get("texts") for row in records()}
    assert len(texts["dense"]) == len(study.PROMPTS) == len(texts["norm-recover"]) and texts["norm"] is None
    assert texts["dense"][0].endswith(" tokens")


class Words:
    """A tokenizer that reads three tokens in everything."""

    def __call__(self, prompt, **options):
        return SimpleNamespace(input_ids=torch.tensor([[1, 2, 3]]))

    def decode(self, ids, **options):
        return f"{len(ids)} tokens"


@pytest.mark.slow
def test_channels_go_until_the_multiplications_are_few_enough(small_images, tmp_path, records):
    command = ["shrink-study", *small_images, *SIZES, "--of", "multiplications", "--results", str(tmp_path / "results")]
    main([*command, "--levels", "50", "--ways", "norm", "solved", study.TORCH_PRUNING])
    dense, *rows = records()
    assert len(rows) >= 2 and dense["metric"] == "accuracy"
    for row in rows:
        assert 0.4 < row["multiplications"] / dense["multiplications"] <= 0.5


@pytest.mark.slow
def test_checkpoints_of_texts_and_of_images_are_shrunk_and_learn(small_images, tmp_path, records):
    text = {"model": "gpt2-tiny", "width": 64, "layers": 2, "context": 16}
    images = {"model": "resnet20", "data": small_images[-1]}
    for name, which, of in (("text", text, "weights"), ("images", images, "multiplications")):
        folder = tmp_path / name
        train(Run(**which, steps=2, batch=4, eval_size=8, score="none", out=folder / "dense-0"))
        command = ["shrink-study", "--model", str(folder / "dense-{seed}"), *SIZES, "--of", of, "--levels", "50"]
        main([*command, "--recover", "tuned", "--ways", "wanda", "--steps", "2", "--results", str(folder / "results")])
        rows = records(folder)
        assert [row["way"] for row in rows] == ["dense", "wanda", "tuned", "tuned-recover"]
        assert {row["metric"] for row in rows} == {"accuracy" if of == "multiplications" else "perplexity"}
        assert of == "multiplications" or {row["removed"][0] for row in rows[1:]} == {"128 of 256 neurons a layer"}


@pytest.mark.parametrize("removed", [Fraction(1, 1000), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10)])
def test_the_smallest_share_is_found_that_removes_enough(removed):
    def left(share):
        return (1000 - share) // 7 * 7

    share = smallest_share(left, 1000, removed)
    assert left(share) <= (1 - removed) * 1000 and (share == 1 or left(share - 1) > (1 - removed) * 1000)
    with pytest.raises(ValueError, match="are left"):
        smallest_share(lambda share: 1000, 1000, removed)


def test_levels_are_percent_or_shares():
    assert [share_of(level) for level in ("25", "1/3", "2:4")] == [Fraction(1, 4), Fraction(1, 3), Fraction(1, 2)]
    assert [level_name(level) for level in ("25", "1/3", "2:4")] == ["25 %", "1/3", "2:4"]


# The page


@pytest.fixture
def write(write_study):
    def sizes(row):
        mixtures = {"mixtures": [[0, 0.5], [2, 0.25]]} if row["way"] == "measured" else {}
        texts = {"texts": ["one", "*two*", "three"]} if row["steps"] or row["way"] == "dense" else {}
        return {"weights": 5, "weights_before": 10, "removed": ["2 layers"]} | mixtures | texts

    return partial(write_study, study.WHAT, settings={"of": "weights"}, row=sizes)


def test_goals_are_met_or_missed_by_the_best_of_our_ways(write, tmp_path):
    write({("dense", "", 0, 0): 50.0, ("tuned-recover", "25", 9, 0): 50.25, ("measured-recover", "25", 9, 0): 51.0})
    values = {("dense", "", 0, 0): 2.75, ("solved", "1/3", 0, 0): 5.5, ("tuned", "1/3", 0, 0): 5.25}
    write(values, model="stories15M", name="b")
    images = {("dense", "", 0, 0): 0.92, ("solved-recover", "30", 9, 0): 0.91}
    write(images, model="ResNet-20", metric="accuracy", name="c")
    goals = parts(tmp_path, STUDIES)["goals"]
    assert "| **shrink, tuned**, recovered | 50.25 | +0.5% | +0.7% | met |" in goals
    assert "| 5.500 | +100.0% | 5.6 | met |" in goals and "| 4.2 | **missed by 25.0%** |" in goals
    assert "| -1.00 points | -0.5 points | **missed by 0.5 points** |" in goals
    assert goals.count("**not measured**") == len(GOALS) - 4


def test_what_others_add_to_the_loss_stands_beside_what_shrink_adds(write, tmp_path):
    values = {("dense", "", 0, seed): 2.0 for seed in range(2)}
    for way, factor in {"norm": 16, "wanda": 4, "wanda-refit": 1.5, "solved": 2, "tuned": 1.25}.items():
        values |= {(way, "1/3", 0, seed): 2.0 * factor for seed in range(2)}
    write(values, model="stories15M")
    (model,) = read_figures(tmp_path)
    assert best_of(model, study.PEERS, "1/3") == "wanda" and increase(model, "wanda", "1/3") == pytest.approx(
        1.386, 1e-3
    )
    (line,) = [line for line in parts(tmp_path, STUDIES)["peers"].splitlines() if "stories15M" in line]
    assert "| WANDA, summed | 1.386 nats | WANDA, summed, our refit | 0.405 nats | 0.693 nats (50%) |" in line
    assert line.endswith("| **shrink, tuned** |")


def test_the_page_shows_sizes_mixtures_texts_and_models_trained_small(write, tmp_path):
    values = {("dense", "", 0, 0): 50.0, ("measured", "50", 0, 0): 60.0, ("measured-recover", "50", 9, 0): 52.0}
    write(values)
    drawn = parts(tmp_path, STUDIES)
    assert "| **shrink, split measured, tuned** | 60.00 | 50.0% |" in drawn["models"]
    assert "- 50 %, seed 0: 0 layers 0.5, 2 layers 0.25; removed: 2 layers" in drawn["models"]
    assert "| dense, 4 blocks | 57.82 |" in drawn["small"]
    assert drawn["texts"].count("\\*two\\*") == 2 and "GPT-51M, 50 % removed" in drawn["texts"]
    assert drawn["time"] == drawn["speed"] == "Nothing is measured yet."


def test_a_page_without_records_has_all_of_its_goals(tmp_path):
    assert parts(tmp_path, STUDIES)["goals"].count("**not measured**") == len(GOALS)
