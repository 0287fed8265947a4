"""The study of few bits: small models go the same way, bits are counted exactly, and the page draws the records."""

import pytest
import torch
from torch import nn

from benchmarks import bits_figures as figures
from benchmarks import bits_forms, bits_picture, page
from benchmarks import bits_study as study
from benchmarks.__main__ import main
from prunus.lab.run import Run
from prunus.lab.trainer import train
from prunus.ops.grid import Grid

pytest.importorskip("accelerate")
STUDIES = page.Path(page.__file__).parents[1] / "studies"
FORMS = ("8", "4", "4-gptq", "2-nearest")
SIZES = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--length", "8", "--seeds", "0", "--device", "cpu"]


@pytest.fixture
def runs(tmp_path):
    """Runs of a tiny GPT, as options: dense, pruned while training, and smaller from the start."""
    sizes = {"model": "gpt2-tiny", "layers": 1, "context": 16, "steps": 2, "batch": 4, "eval_size": 8}
    for name, width, score in (("dense-0", 64, "none"), ("pruned-80-0", 64, "bitter7"), ("small-50-0", 32, "none")):
        train(Run(**sizes, width=width, score=score, sparsity=0.8, out=tmp_path / name))
    paths = {"model": "dense-{seed}", "pruned": "pruned-{level}-{seed}", "small": "small-{level}-{seed}"}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(tmp_path / path))]
    return ["bits-study", *options, *SIZES, "--results", str(tmp_path / "results")]


@pytest.mark.slow
def test_every_way_is_quantised_to_every_form_and_bits_are_those_of_masks_codes_and_scales(runs, records):
    ways = ["dense", "repair", "trained", "small"]
    main([*runs, "--ways", *ways, "--levels", "80", "--removed", "50", "--bits", "4-together", *FORMS, "4-torchao"])
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
def test_a_killed_study_continues_and_learns_once_for_all_forms(llama, kill_recovery, records):
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


@pytest.mark.slow
def test_scales_learn_after_quantising(llama, records):
    main(["bits-study", *llama, "--levels", "50", "--ways", "repair", "--steps", "2", "--bits", "4", "4-scales"])
    *_, fixed, learned = records()
    assert learned["way"] == "repair 4-scales" and learned["scale_steps"] == 2 and learned["steps"] == 0
    assert learned["bits_a_weight"] == fixed["bits_a_weight"]


def test_weights_without_a_grid_count_16_bits_and_short_last_groups_have_a_scale_of_their_own():
    model = nn.Sequential(nn.Linear(130, 3, bias=False))
    assert bits_forms.stored_bits(model, has_mask=False)["code_bits"] == 16 * 390
    assert bits_forms.stored_bits(model, has_mask=False, others=Grid(4))["scale_bits"] == 16 * 3 * 2
    with torch.no_grad():
        model[0].weight[0, :100] = 0
    bits = bits_forms.stored_bits(model, has_mask=True)
    assert bits["kept"] == 290 and bits["mask_bits"] == 390 and bits["code_bits"] == 16 * 290


def test_after_16_bits_weights_are_as_before():
    model = nn.Sequential(nn.Linear(8, 8))
    before = model[0].weight.detach().clone()
    with bits_forms.in_bfloat16(model):
        assert torch.equal(model[0].weight, before.bfloat16().float()) and not torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight, before)


# The page


@pytest.fixture
def write(write_study):
    """Writes a record: figures (way, level, seed) -> bits a weight, value."""

    def record(values, **options):
        bits = {key: each[0] for key, each in values.items()}

        def sizes(row):
            size = bits[row["way"], row["level"], row["seed"]]
            return {"bits_a_weight": size, "num_bytes": 1e6 * size / 8, "num_weights": 10**6, "elapsed": 1.0}

        rows = {(way, level, 0, seed): value for (way, level, seed), (_, value) in values.items()}
        write_study(study.WHAT, rows, row=sizes, **options)

    return record


def arm(bits, loss, way="dense", form="4"):
    return figures.Arm(way, "" if way == "dense" else "50", form, bits, loss)


def test_an_arm_counts_if_it_is_clearly_better_than_all_smaller_ones_and_usable():
    arms = [arm(16, 0, form=""), arm(8, 0.0005), arm(4, 0.002), arm(3, 0.03), arm(3.5, 0.04), arm(1, 0.7)]
    assert [each.bits for each in figures.frontier(arms)] == [8, 4, 3]
    assert figures.frontier([]) == []


def test_ranges_follow_from_the_arms_and_narrow_ones_are_joined():
    arms = [arm(4, 0.0), arm(3.2, 0.01, "repair"), arm(3.1, 0.02, "shrink"), arm(2, 0.03, "recover"), arm(1, 0.1)]
    assert [what for what, _ in figures.bands(arms)] == [
        "above 4.00 bits a weight **quantise the dense model**",
        "from 2.00 to 4.00 **prune and quantise**",
        "from 1.00 to 2.00 **quantise the dense model**",
    ]
    assert [each.bits for each in figures.bands(arms)[1][1]] == [3.2, 2]


def test_the_answer_depends_on_what_a_user_has(write, tmp_path):
    values = {("dense", "", 0): (16, 50.0), ("dense 4", "", 0): (4, 50.04), ("dense 2", "", 0): (2.2, 60.0)}
    values |= {("repair 4", "50", 0): (3, 70.0), ("recover 4", "50", 0): (3, 50.5), ("repair 4", "90", 0): (1.5, 99.0)}
    write(values, model="SmolLM2-135M")
    drawn = figures.parts(tmp_path, STUDIES)
    assert drawn["answer"] == (
        "- SmolLM2-135M: above 4.00 bits a weight **quantise the dense model** (+0.1%); from 3.00 to 4.00 **prune and "
        "quantise** (+1.0%); from 2.20 to 3.00 **quantise the dense model** (+20.0%); below 2.20 all that was measured "
        "loses more than 50%."
    )
    alone, learning = drawn["bands"].split("With text to learn from:")
    assert "prune" not in alone and "50 % pruned, repaired and recovered in 4 bits: 3.00 bits, +1.0%" in learning
    assert "No quantiser of others was installed there." in drawn["models"]


def test_goals_compare_four_bits_with_sixteen_of_the_best_way_seed_by_seed(write, tmp_path):
    values = {("dense", "", seed): (16, 50.0) for seed in range(2)}
    for seed in range(2):
        values |= {("repair", "80", seed): (4.2, 60.0), ("repair 4", "80", seed): (1.9, 66.0)}
        values |= {("recover", "80", seed): (4.2, 50.0 + 5 * seed), ("recover 4", "80", seed): (1.9, 50.25 + 5 * seed)}
        values |= {("recover 4-nearest", "80", seed): (1.9, 51.0 + 5 * seed)}
    write(values)
    goals = figures.parts(tmp_path, STUDIES)["goals"]
    assert "| pruned, repaired and recovered | 52.50 | 52.75, +0.48% |  |  | 53.50, +1.91% |" in goals
    assert "| +0.3% | **missed by 0.18 points** |" in goals
    assert goals.count("**not measured**") == 3 * 2 - 1


def test_smaller_models_come_from_another_study_where_this_one_has_none(write, tmp_path):
    write({("dense", "", 0): (16, 50.0)})
    (model,) = figures.read_figures(tmp_path, STUDIES)
    small = [each for each in model.arms if each.way == "small"]
    assert len(small) == 4 and small[0].bits == pytest.approx(16 * 448**2 / 512**2) and 0.02 < small[0].loss < 0.04
    write({("small", "50", 0): (8, 52.0)}, name="b")
    (model,) = figures.read_figures(tmp_path, STUDIES)
    assert [each.loss for each in model.arms if each.way == "small"] == [pytest.approx(0.04)]


def test_without_records_the_page_says_so_and_the_picture_is_empty(tmp_path):
    drawn = figures.parts(tmp_path, STUDIES)
    assert drawn["answer"] == drawn["bands"] == drawn["models"] == figures.NOTHING
    assert drawn["goals"].count("**not measured**") == 6
    assert not bits_picture.bits(tmp_path, STUDIES).axes


def test_the_picture_has_a_curve_for_each_family_of_usable_arms(write, tmp_path):
    values = {("dense", "", 0): (16, 50.0), ("dense 4", "", 0): (4, 50.1), ("dense 4-nearest", "", 0): (4, 50.2)}
    values |= {("repair 4", "80", 0): (2, 70.0), ("recover 4", "80", 0): (2, 52.0), ("repair 4", "90", 0): (1.5, 99.0)}
    write(values, model="stories15M")
    (axes,) = bits_picture.bits(tmp_path, STUDIES).axes
    curves = {line.get_label(): [*line.get_xdata()] for line in axes.lines if line.get_label()[0] != "_"}
    assert curves == {"dense in 16 to 2 bits": [4, 16], "sparse, 4 bits": [2]}
