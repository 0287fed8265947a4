"""The pages of studies: records of one model become one table, goals are held against it, and misses are named."""

import pytest

from benchmarks import bits_figures, bits_picture, page, recover_figures, repair_figures, shrink_figures
from benchmarks.figures import NOTHING, outcome_of

STUDIES = page.Path(page.__file__).parents[1] / "studies"
DENSE = {("dense", "", 0, 0): 2.0}


@pytest.fixture
def repair(write_study):
    def counted(row):
        return {"zeros": 500, "num_weights": 1000, "cpu_seconds": 3.0}

    return lambda values, **options: write_study(repair_figures.WHAT, values, row=counted, **options)


@pytest.fixture
def recover(write_study):
    def zeros(row):
        return {"zeros": 8, "num_weights": 10} | ({"zeros_before": 8} if row["steps"] else {})

    return lambda values, **options: write_study(recover_figures.WHAT, values, **{"row": zeros} | options)


@pytest.fixture
def shrink(write_study):
    return lambda values, **options: write_study(shrink_figures.WHAT, values, settings={"of": "weights"}, **options)


@pytest.fixture
def bits(write_study):
    """Writes a record: figures (way, level, seed) -> bits a weight, value."""

    def record(values, **options):
        sizes = {key: each[0] for key, each in values.items()}

        def row(row):
            size = sizes[row["way"], row["level"], row["seed"]]
            return {"bits_a_weight": size, "num_bytes": 1e6 * size / 8, "num_weights": 10**6, "elapsed": 1.0}

        rows = {(way, level, 0, seed): value for (way, level, seed), (_, value) in values.items()}
        write_study(bits_figures.WHAT, rows, row=row, **options)

    return record


# All studies


def test_records_of_one_model_become_one_table_in_which_the_newest_figure_counts(repair, tmp_path):
    repair(DENSE | {("repair", "50", 0, 0): 9.0, ("wanda", "50", 0, 0): 7.0}, name="b")
    newer = {("repair", "50", 0, 0): 3.0, ("repair", "50", 0, 1): 4.0}
    repair(newer, name="a", date="2026-01-02", settings={"note": "in haste"})
    (model,) = repair_figures.read_figures(tmp_path)
    assert model.mean("repair", "50") == 3.5 and model.mean("wanda", "50") == 7.0 and model.dense == 2.0
    drawn = repair_figures.parts(tmp_path)["models"]
    assert "| repair | 3.500 (3.000 to 4.000) | 0 | 3.0 of a CPU | 2 |" in drawn
    assert "`b.json`\n2." in drawn and "`a.json`; in haste\n" in drawn
    assert "| WANDA by row | 7.000 (n = 1) | 0 | 3.0 of a CPU | 1 |" in drawn


def test_records_made_with_other_data_are_refused(repair, tmp_path):
    repair(DENSE, name="a")
    repair(DENSE, name="b", settings={"held_out": 5})
    with pytest.raises(ValueError, match=r"a.json and b.json differ in held_out: 3 and 5; remove one of them"):
        repair_figures.parts(tmp_path)


@pytest.mark.parametrize(
    ("gains", "expected"), [((1, 2), "better"), ((-1, -2), "worse"), ((1, -2), ""), ((1,), ""), ((0.05, 0.05), "")]
)
def test_a_difference_is_clear_where_all_seeds_agree(gains, expected):
    assert outcome_of(gains) == expected


def test_each_student_is_compared_with_the_dense_model_of_its_seed(recover, tmp_path):
    recover({("dense", "", 0, 0): 50.0, ("dense", "", 0, 1): 60.0})
    recover({("recover", "80", 9, 0): 51.0, ("recover", "80", 9, 1): 60.6}, name="b")
    (model,) = recover_figures.read_figures(tmp_path)
    assert model.above("recover", "80") == pytest.approx(0.015)
    goals = recover_figures.parts(tmp_path)["goals"]
    assert "+1.5% | +1.8% | met |" in goals
    assert goals.count("**not measured**") == len(recover_figures.GOALS) - 1


def test_goals_are_missed_by_shares_and_points(recover, tmp_path):
    recover({("dense", "", 0, 0): 50.0, ("repair", "50", 0, 0): 52.0, ("recover", "50", 9, 0): 51.0})
    images = {("dense", "", 0, 0): 0.92, ("recover", "80", 9, 0): 0.9}
    recover(images, model="ResNet-20", metric="accuracy", name="b")
    recover({("dense", "", 0, 0): 38.0, ("recover", "70", 9, 0): 55.0}, model="SmolLM2-135M", name="c")
    goals = recover_figures.parts(tmp_path)["goals"]
    assert "| 52.00 | +4.0% | 51.00 | +2.0% | +0.2% | **missed by 1.8 points** |" in goals
    assert "-2.00 points | 91.3% | **missed by 1.3 points** |" in goals and "| 50 | **missed by 10.0%** |" in goals


def test_the_best_of_several_ways_counts(repair, shrink, tmp_path):
    repair(
        DENSE | {("repair", "50", 0, 0): 3.4, ("tuned", "50", 0, 0): 3.2, ("repair", "70", 0, 0): 9.0},
        model="stories15M",
    )
    goals = repair_figures.parts(tmp_path)["goals"]
    assert "| 3.300 | met by repair, tuned: 3.200 |" in goals
    assert "| 6.000 | **missed by 50.0%**; best is repair: 9.000 |" in goals
    shrink({("dense", "", 0, 0): 50.0, ("tuned-recover", "25", 9, 0): 50.25, ("measured-recover", "25", 9, 0): 51.0})
    goals = shrink_figures.parts(tmp_path, STUDIES)["goals"]
    assert "| **shrink, tuned**, recovered | 50.25 | +0.5% | +0.7% | met |" in goals


def test_choices_are_compared_with_plain_repair_seed_by_seed(repair, tmp_path):
    plain = {("repair", "50", 0, seed): 4.0 for seed in (0, 1)}
    better = {("fisher", "50", 0, seed): 3.0 for seed in (0, 1)}
    unclear = {("by-row", "50", 0, 0): 3.0, ("by-row", "50", 0, 1): 4.4}
    repair(DENSE | plain | better | unclear | {("own-targets", "50", 0, 0): None})
    drawn = repair_figures.parts(tmp_path)["choices"]
    assert "| repair, fisher allocation | **+25.0** | 1 | 0 | 1 |" in drawn and "| repair, by row | +7.5 |" in drawn
    assert "| repair, own targets | -inf |" in drawn


def test_pages_without_records_say_so_and_have_all_of_their_goals(tmp_path):
    drawn = bits_figures.parts(tmp_path, STUDIES)
    assert drawn["answer"] == drawn["bands"] == drawn["models"] == NOTHING
    assert drawn["goals"].count("**not measured**") == len(bits_figures.GOALS)
    assert not bits_picture.bits(tmp_path, STUDIES).axes
    drawn = shrink_figures.parts(tmp_path, STUDIES)
    assert drawn["time"] == drawn["speed"] == drawn["models"] == NOTHING
    assert drawn["goals"].count("**not measured**") == len(shrink_figures.GOALS)


# Repair


def test_times_are_held_against_their_goals_and_a_block_of_each_model_is_shown(write_record, tmp_path):
    settings = {"windows": 128, "length": 2048, "dtype": "bfloat16", "offload": False, "tune": False}
    models = {  # options: blocks, seconds, GiB
        "": (32, 300.0, 16.0),
        ", offload": (32, 200.0, 23.0),
        ", tune blocks": (4, 64.0, 9.0),
    }
    for options, (blocks, seconds, gib) in models.items():
        row = {"seconds": seconds, "peak_gib": gib, "forwards": seconds / 2, "iterations": seconds / 3}
        row |= {"cpu_seconds": seconds, "other": 0.0} | ({"tune": 36.0} if "tune" in options else {})
        of = {"weights": f"{blocks} blocks of Mistral-7B's shape{options}", "blocks": blocks}
        write_record("repair", settings | of, [row], name=f"r{options}")
    of = {"weights": "4 blocks of Llama-3-70B's shape", "blocks": 4}
    row = {"seconds": 150.0, "cpu_seconds": 150.0, "peak_gib": 41.0, "forwards": 150.0, "other": 0.0}
    write_record("repair", settings | of, [row], name="70B")
    drawn = repair_figures.parts(tmp_path)
    assert "| 160 s, 40 GiB | **missed**: peak_gib |" in drawn["times"]
    assert "| 4 blocks of Llama-3-70B's shape | 37.50 |  | 41.0 | 80 | 3,000 |" in drawn["blocks"]
    assert "| forwards, 50% | 33% | 240 s, 24 GiB | **missed**: seconds |" in drawn["times"]
    assert drawn["times"].count("| 240 s, 24 GiB | met |") == 1
    assert "| 600 s | **not measured** |" in drawn["times"]
    assert "| 32 blocks of Mistral-7B's shape | 9.38 |  | 16.0 | 32 | 300 |" in drawn["blocks"]
    assert "| 4 blocks of Mistral-7B's shape, tune blocks | 7.00 | 9.00 | 9.0 | 32 | 512 |" in drawn["blocks"]


# Recovery


def test_the_longest_runs_stand_in_the_tables_and_shorter_ones_beside_them(recover, tmp_path):
    values = {("dense", "", 0, 0): 50.0, ("control", "", 9, 0): 48.0, ("repair", "80", 0, 0): 60.0}
    values |= {("recover", "80", steps, 0): value for steps, value in ((3, 58.0), (9, 52.0), (27, 51.0))}
    recover(values | {("hard", "80", 27, 0): 50.49})
    drawn = recover_figures.parts(tmp_path)
    assert "| repaired, recovered | 51.00 | 27 | 0.001 | 2.0 |" in drawn["models"]
    assert "equal in number and place in 5 of 5 runs" in drawn["models"]
    assert "| GPT-51M, 80 % | 60.00 | 3 steps: 58.00; 9 steps: 52.00; 27 steps: 51.00 |" in drawn["budgets"]
    assert "| dense, trained on by cross-entropy | +5.88 |" in drawn["choices"] and "| +1.00 |" in drawn["choices"]
    assert drawn["curves"].count("7.389") == 2 * 8


def test_runs_with_a_given_rate_stand_apart_from_those_of_trials(recover, tmp_path):
    recover({("dense", "", 0, 0): 50.0, ("dense", "", 0, 1): 60.0, ("recover", "80", 9, 0): 52.0})
    given = {"zeros": 8, "num_weights": 10, "zeros_before": 8, "lr_reason": "given"}
    for name, rate, values in (("b", 2e-3, {0: 50.5}), ("c", 4e-3, {0: 51.0, 1: 60.6})):
        runs = {("recover", "80", 9, seed): value for seed, value in values.items()}
        recover(runs, name=name, row=lambda row, rate=rate: given | {"lr": rate})
    drawn = recover_figures.parts(tmp_path)
    assert "+4.0% | +1.8% | **missed by 2.2 points** |" in drawn["goals"] and "| 52.00 (n = 1) | 9 |" in drawn["models"]
    cells = "52.00 (n = 1), +4.00% | 50.50 (n = 1), +1.00% | 55.80, +1.50% | +1.8% | met |"
    assert "| by trials | 0.002 | 0.004 | goal |" in drawn["rates"] and cells in drawn["rates"]


# Smaller models


def test_what_others_add_to_the_loss_stands_beside_what_shrink_adds(shrink, tmp_path):
    values = {("dense", "", 0, seed): 2.0 for seed in range(2)}
    for way, factor in {"norm": 16, "wanda": 4, "wanda-refit": 1.5, "solved": 2, "tuned": 1.25}.items():
        values |= {(way, "1/3", 0, seed): 2.0 * factor for seed in range(2)}
    shrink(values, model="stories15M")
    (line,) = [line for line in shrink_figures.parts(tmp_path, STUDIES)["peers"].splitlines() if "stories15M" in line]
    assert "| WANDA, summed | 1.386 nats | WANDA, summed, our refit | 0.405 nats | 0.693 nats (50%) |" in line
    assert line.endswith("| **shrink, tuned** |")


# Few bits


def arm(bits, loss, way="dense", form="4"):
    return bits_figures.Arm(way, "" if way == "dense" else "50", form, bits, loss)


def test_an_arm_counts_if_it_is_clearly_better_than_all_smaller_ones_and_usable():
    arms = [arm(16, 0, form=""), arm(8, 0.0005), arm(4, 0.002), arm(3, 0.03), arm(3.5, 0.04), arm(1, 0.7)]
    assert [each.bits for each in bits_figures.frontier(arms)] == [8, 4, 3]
    assert bits_figures.frontier([]) == []


def test_ranges_follow_from_the_arms_and_narrow_ones_are_joined():
    arms = [arm(4, 0.0), arm(3.2, 0.01, "repair"), arm(3.1, 0.02, "shrink"), arm(2, 0.03, "recover"), arm(1, 0.1)]
    assert [what for what, _ in bits_figures.bands(arms)] == [
        "above 4.00 bits a weight **quantise the dense model**",
        "from 2.00 to 4.00 **prune and quantise**",
        "from 1.00 to 2.00 **quantise the dense model**",
    ]
    assert [each.bits for each in bits_figures.bands(arms)[1][1]] == [3.2, 2]


def test_the_answer_depends_on_what_a_user_has(bits, tmp_path):
    values = {("dense", "", 0): (16, 50.0), ("dense 4", "", 0): (4, 50.04), ("dense 2", "", 0): (2.2, 60.0)}
    values |= {("repair 4", "50", 0): (3, 70.0), ("recover 4", "50", 0): (3, 50.5), ("repair 4", "90", 0): (1.5, 99.0)}
    bits(values, model="SmolLM2-135M")
    drawn = bits_figures.parts(tmp_path, STUDIES)
    assert drawn["answer"] == (
        "- SmolLM2-135M: above 4.00 bits a weight **quantise the dense model** (+0.1%); from 3.00 to 4.00 **prune and "
        "quantise** (+1.0%); from 2.20 to 3.00 **quantise the dense model** (+20.0%); below 2.20 all that was measured "
        "loses more than 50%."
    )
    alone, learning = drawn["bands"].split("With text to learn from:")
    assert "prune" not in alone and "50 % pruned, repaired and recovered in 4 bits: 3.00 bits, +1.0%" in learning
    assert "No quantiser of others was installed there." in drawn["models"]


def test_goals_compare_four_bits_with_sixteen_of_the_best_way_seed_by_seed(bits, tmp_path):
    values = {("dense", "", seed): (16, 50.0) for seed in range(2)}
    for seed in range(2):
        values |= {("repair", "80", seed): (4.2, 60.0), ("repair 4", "80", seed): (1.9, 66.0)}
        values |= {("recover", "80", seed): (4.2, 50.0 + 5 * seed), ("recover 4", "80", seed): (1.9, 50.25 + 5 * seed)}
        values |= {("recover 4-nearest", "80", seed): (1.9, 51.0 + 5 * seed)}
    bits(values)
    goals = bits_figures.parts(tmp_path, STUDIES)["goals"]
    assert "| pruned, repaired and recovered | 52.50 | 52.75, +0.48% |  |  |  | 53.50, +1.91% |" in goals
    assert "| +0.3% | **missed by 0.18 points** |" in goals
    bits({("recover 4-scales", "80", seed): (1.9, 50.1 + 5 * seed) for seed in range(2)}, name="scales")
    goals = bits_figures.parts(tmp_path, STUDIES)["goals"]
    assert "| 52.75, +0.48% |  | 52.60, +0.19% |  | 53.50, +1.91% | +0.3% | met |" in goals


def test_smaller_models_come_from_another_study_where_this_one_has_none(bits, tmp_path):
    bits({("dense", "", 0): (16, 50.0)})
    (model,) = bits_figures.read_figures(tmp_path, STUDIES)
    small = [each for each in model.arms if each.way == "small"]
    assert len(small) == 4 and small[0].bits == pytest.approx(16 * 448**2 / 512**2) and 0.02 < small[0].loss < 0.04
    bits({("small", "50", 0): (8, 52.0)}, name="b")
    (model,) = bits_figures.read_figures(tmp_path, STUDIES)
    assert [each.loss for each in model.arms if each.way == "small"] == [pytest.approx(0.04)]
