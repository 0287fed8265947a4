"""Studies: small models go the same way as large ones, a killed study continues, and what is counted is exact."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import bits_study, repair_study, shrink_study
from benchmarks.__main__ import main
from benchmarks.shrink_study import smallest_share
from benchmarks.study import level_name, run_batches, share_of
from prunus.lab.data.batches import token_data
from prunus.lab.run import Run
from prunus.lab.trainer import train
from prunus.ops.grid import Grid

pytest.importorskip("accelerate")
FORMS = ("8", "4", "4-gptq", "2-nearest")
SIZES = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--length", "8", "--seeds", "0", "--device", "cpu"]


@pytest.fixture
def gpts(tmp_path):
    """Runs of a tiny GPT, as options: dense, pruned while training, and smaller from the start."""
    sizes = {"model": "gpt2-tiny", "layers": 1, "context": 16, "steps": 2, "batch": 4, "eval_size": 8}
    for name, width, score in (("dense-0", 64, "none"), ("pruned-80-0", 64, "bitter7"), ("small-50-0", 32, "none")):
        train(Run(**sizes, width=width, score=score, sparsity=0.8, out=tmp_path / name))
    models = ["--model", str(tmp_path / "dense-{seed}"), "--pruned", str(tmp_path / "pruned-{level}-{seed}")]
    return [*models, *SIZES, "--results", str(tmp_path / "results")]


@pytest.mark.slow
def test_a_killed_study_continues_and_learns_once_for_all_forms(llama, kill_recovery, records, capsys):
    levels = ["--levels", "50", "--removed", "50"]
    command = ["bits-study", *llama, *levels, "--steps", "2", "--bits", "4", "4-nearest"]
    kill_recovery(2)
    with pytest.raises(SystemExit):
        main(command)
    before = records()
    assert [row["way"] for row in before][-4:] == ["recover 4-nearest", "shrink", "shrink 4", "shrink 4-nearest"]
    main(command)
    rows = records()
    assert rows[: len(before)] == before and len({row["way"] for row in rows}) == len(rows) == 5 * 3
    assert {row["steps"] for row in rows if "recover" in row["way"]} == {2}
    with pytest.raises(SystemExit):
        main([*command, "--eval-windows", "2"])
    assert "give another --results" in capsys.readouterr().err


# Repair


@pytest.fixture
def repair(small_llama, tmp_path):
    files = ["--tokens", str(small_llama / "calib.u16"), "--eval-tokens", str(small_llama / "valid.u16")]
    sizes = ["--windows", "4", "--length", "8", "--eval-windows", "3", "--results", str(tmp_path / "results")]
    return ["repair-quality", "--model", str(small_llama), *files, *sizes]


@pytest.mark.slow
def test_every_way_prunes_exactly_at_every_level_and_seed(repair, records):
    ways = ["magnitude", "wanda-repaired", "by-row", "repair"]
    main([*repair, "--seeds", "0", "1", "--levels", "50", "2:4", "--ways", *ways])
    rows = records()
    assert len({(row["way"], row["level"], row["seed"]) for row in rows}) == len(rows) == 2 * (1 + 7)
    assert len({row["value"] for row in rows if row["way"] == "dense"}) == 1
    assert all(row["zeros"] == row["num_weights"] // 2 for row in rows if row["way"] != "dense")


def test_ways_of_llm_compressor_are_left_out_without_it(repair, monkeypatch, capsys):
    monkeypatch.setattr(repair_study, "find_spec", lambda name: None)
    main([*repair, "--levels", "50", "--ways", "llmc-sparsegpt"])
    assert "left out" in capsys.readouterr().out


# Recovery


@pytest.mark.slow
def test_zeros_are_where_they_were(gpts, records):
    ways = ["control", "recover", "hard", "magnitude-recover", "trained-recover"]
    main(["recover-study", *gpts, "--levels", "80", "--steps", "3", "2", "--ways", *ways])
    rows = records()
    assert len({(row["way"], row["level"], row["steps"]) for row in rows}) == len(rows) == 4 + 10
    for row in (row for row in rows if row["steps"]):
        assert row["zeros"] == row["zeros_before"] and len(row["curve"]) >= 3 and row["lr_reason"]
    assert all(abs(row["zeros"] - 0.8 * row["num_weights"]) < 1 for row in rows if row["level"])


def test_a_model_of_transformers_learns_from_token_files(llama, records):
    main(["recover-study", *llama, "--levels", "50", "--steps", "2", "--ways", "recover"])
    assert [row["way"] for row in records()] == ["dense", "repair", "recover"]


def test_images_learn_from_crops_and_flips(small_images, tmp_path, records):
    command = ["recover-study", *small_images, *SIZES, "--results", str(tmp_path / "results")]
    main([*command, "--levels", "80", "--steps", "2", "--ways", "magnitude-recover"])
    dense, start, row = records()
    assert dense["metric"] == "accuracy" and row["zeros"] == start["zeros"]


def test_held_out_windows_follow_the_evaluated_ones_and_batches_depend_on_the_seed():
    tokens = np.arange(2000, dtype=np.uint16)
    data = token_data(tokens, tokens, 8, None)
    make, held_out = run_batches(data, 100, 4, seed=1)
    assert torch.equal(torch.cat([x for x, _ in held_out])[:, 0], 8 * torch.arange(100, 108))
    other, _ = run_batches(data, 100, 4, seed=2)
    assert torch.equal(make(3)[0], make(3)[0]) and not torch.equal(make(3)[0], other(3)[0])


# Few bits


@pytest.mark.slow
def test_every_way_is_quantised_to_every_form_and_bits_are_those_of_masks_codes_and_scales(gpts, tmp_path, records):
    ways, small = ["dense", "repair", "trained", "small"], str(tmp_path / "small-{level}-{seed}")
    command = ["bits-study", *gpts, "--small", small, "--ways", *ways, "--levels", "80", "--removed", "50"]
    main([*command, "--bits", "4-together", *FORMS, "4-torchao"])
    rows = {row["way"]: row for row in records()}
    assert {*rows} >= {way + form for way in ways for form in ("", *(f" {form}" for form in FORMS))}
    num, scales = rows["dense"]["num_weights"], 64 * (3 + 1 + 4) + 64 * 2  # groups of 128: one a row, of the last two
    assert num == 12 * 64 * 64 and {row["num_weights"] for row in rows.values()} == {num}
    assert rows["dense"]["bits_a_weight"] == 16
    assert rows["dense 4"]["bits_a_weight"] == pytest.approx(4 + 16 * scales / num)
    for way in ("repair", "trained"):
        assert rows[way]["kept"] == pytest.approx(0.2 * num, abs=1)
        assert rows[way]["bits_a_weight"] == pytest.approx(1 + 16 * rows[way]["kept"] / num)
        assert rows[f"{way} 4"]["bits_a_weight"] == pytest.approx(1 + (4 * rows[way]["kept"] + 16 * scales) / num)
    assert rows["small"]["bits_a_weight"] == 16 / 4 and rows["small 4"]["mask_bits"] == 0
    assert rows["repair 4"]["value"] != rows["repair 4-gptq"]["value"]
    together = [way for way in rows if "together" in way]
    assert together == ["repair 4-together"] and rows[together[0]]["mask_bits"] == num
    assert rows[together[0]]["bits_a_weight"] == pytest.approx(rows["repair 4"]["bits_a_weight"])
    assert rows["small"]["num_bytes"] == 2 * 12 * 32 * 32


@pytest.mark.slow
def test_scales_learn_after_quantising(llama, records):
    main(["bits-study", *llama, "--levels", "50", "--ways", "repair", "--steps", "2", "--bits", "4", "4-scales"])
    *_, fixed, learned = records()
    assert learned["way"] == "repair 4-scales" and learned["scale_steps"] == 2 and learned["steps"] == 0
    assert learned["bits_a_weight"] == fixed["bits_a_weight"]


def test_weights_without_a_grid_count_16_bits_and_short_last_groups_have_a_scale_of_their_own():
    model = nn.Sequential(nn.Linear(130, 3, bias=False))
    assert bits_study.stored_bits(model, has_mask=False)["code_bits"] == 16 * 390
    assert bits_study.stored_bits(model, has_mask=False, others=Grid(4))["scale_bits"] == 16 * 3 * 2
    with torch.no_grad():
        model[0].weight[0, :100] = 0
    bits = bits_study.stored_bits(model, has_mask=True)
    assert bits["kept"] == 290 and bits["mask_bits"] == 390 and bits["code_bits"] == 16 * 290


def test_after_16_bits_weights_are_as_before():
    model = nn.Sequential(nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    with bits_study.in_bfloat16(model):
        assert torch.equal(model[0].weight, before.bfloat16().float()) and not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)


# Smaller models


@pytest.mark.slow
def test_every_score_removes_as_much_with_and_without_a_refit_and_what_learns_stays_small(llama, records):
    ways = [*shrink_study.SCORES, "wanda-refit", "obs", "solved"]
    main(["shrink-study", *llama, "--levels", "1/2", "--ways", *ways, "--recover", "solved", "--steps", "2"])
    dense, *rows = records()
    assert dense["way"] == "dense" and [row["way"] for row in rows] == [*ways, "solved-recover"]
    assert len({row["weights"] for row in rows}) == 1 and {row["weights_before"] for row in rows} == {1920}
    assert 0.4 * 1920 < rows[0]["weights"] <= 0.5 * 1920
    assert rows[-1]["before_value"] == rows[-2]["value"] and rows[-1]["steps"] == 2


def test_texts_are_written_by_the_dense_model_and_by_those_that_learned(llama, monkeypatch, records):
    monkeypatch.setattr(shrink_study, "tokenizer_of", lambda *where: Words())
    monkeypatch.setattr(shrink_study, "NEW_TOKENS", 5)
    ways = ["--recover", "norm", "--ways", "norm"]
    main(["shrink-study", *llama, "--levels", "50", *ways, "--steps", "1", "--texts"])
    texts = {row["way"]: row.get("texts") for row in records()}
    assert len(texts["dense"]) == len(shrink_study.PROMPTS) == len(texts["norm-recover"]) and texts["norm"] is None
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
    main([*command, "--levels", "50", "--ways", "norm", "solved", shrink_study.TORCH_PRUNING])
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
