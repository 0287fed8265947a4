"""The page of repair: records of one model become one table, goals are held against it, and misses are named."""

import json

import pytest

from benchmarks.repair_figures import figures_of, outcome_of, parts

ENVIRONMENT = {"machine": "a machine", "python": "3", "versions": {"torch": "2"}, "commit": "abc"}


def write(folder, name, what, settings, rows, day=1):
    record = {"what": what, "date": f"2026-01-{day:02}", "environment": ENVIRONMENT, "settings": settings, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(record))


def quality(folder, name, values, *, model="stories15M", metric="perplexity", day=1, **settings):
    """A record of figures (way, level, seed) -> value of a model with 1,000 weights."""
    rows = [
        {"way": way, "level": level, "seed": seed, "value": value, "metric": metric, "zeros": 500, "num_weights": 1000}
        | {"seconds": 2.0, "cpu_seconds": 3.0}
        for (way, level, seed), value in values.items()
    ]
    given = {"weights": model, "about": "", "device": "cpu", "samples": 4, "length": 8, "held_out": 3} | settings
    write(folder, name, "repair quality", given, rows, day)


def page(folder):
    return "\n".join(parts(folder).values())


DENSE = {("dense", "", 0): 2.0}


def test_records_of_one_model_become_one_table_in_which_the_newest_figure_counts(tmp_path):
    quality(tmp_path, "b", DENSE | {("repair", "50", 0): 9.0, ("wanda", "50", 0): 7.0})
    quality(tmp_path, "a", {("repair", "50", 0): 3.0, ("repair", "50", 1): 4.0}, day=2, note="in haste")
    (model,) = figures_of(tmp_path)
    assert model.mean("repair", "50") == 3.5 and model.mean("wanda", "50") == 7.0 and model.dense == 2.0
    drawn = page(tmp_path)
    assert "| repair | 3.500 (3.000 to 4.000) | 0 | 3.0 of a CPU | 2 |" in drawn
    assert "`b.json`\n2." in drawn and "`a.json`; in haste\n" in drawn
    assert "| WANDA by row | 7.000 (n = 1) | 0 | 3.0 of a CPU | 1 |" in drawn


def test_records_made_with_other_data_are_refused(tmp_path):
    quality(tmp_path, "a", DENSE)
    quality(tmp_path, "b", DENSE, held_out=5)
    with pytest.raises(ValueError, match=r"a.json and b.json differ in held_out: 3 and 5; remove one of them"):
        page(tmp_path)


def test_goals_are_met_missed_or_not_measured(tmp_path):
    quality(tmp_path, "a", DENSE | {("repair", "50", 0): 3.4, ("tuned", "50", 0): 3.2, ("repair", "70", 0): 9.0})
    images = {("dense", "", 0): 0.92, ("repair", "70", 0): 0.85}
    quality(tmp_path, "b", images, model="ResNet-20", metric="accuracy")
    drawn = page(tmp_path)
    assert "| 3.300 | met by repair, tuned: 3.200 |" in drawn
    assert "| 6.000 | **missed by 50.0%**; best is repair: 9.000 |" in drawn
    assert "| 90.00% | **missed by 5.0 points**; best is repair: 85.00% |" in drawn
    assert drawn.count("| **not measured** |") == 4 + 3  # of the quality and of the time


def test_choices_are_compared_with_plain_repair_seed_by_seed(tmp_path):
    repair = {("repair", "50", seed): 4.0 for seed in (0, 1)}
    better = {("fisher", "50", seed): 3.0 for seed in (0, 1)}
    unclear = {("by-row", "50", 0): 3.0, ("by-row", "50", 1): 4.4}
    quality(tmp_path, "a", DENSE | repair | better | unclear | {("own-targets", "50", 0): None})
    drawn = page(tmp_path)
    assert "| repair, fisher allocation | **+25.0** | 1 | 0 | 1 |" in drawn and "| repair, by row | +7.5 |" in drawn
    assert "| repair, own targets | -inf |" in drawn


@pytest.mark.parametrize(
    ("gains", "expected"), [((1, 2), "better"), ((-1, -2), "worse"), ((1, -2), ""), ((1,), ""), ((0.05, 0.05), "")]
)
def test_a_difference_is_clear_where_all_seeds_agree(gains, expected):
    assert outcome_of(gains) == expected


def test_times_are_held_against_their_goals_and_a_block_of_each_model_is_shown(tmp_path):
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
        write(tmp_path, f"r{options}", "repair", settings | of, [row])
    drawn = page(tmp_path)
    assert "| forwards, 50% | 33% | 240 s, 24 GiB | **missed**: seconds |" in drawn
    assert drawn.count("| 240 s, 24 GiB | met |") == 1 and "| 600 s | **not measured** |" in drawn
    assert "| 32 blocks of Mistral-7B's shape | 9.38 |  | 16.0 | 300 |" in drawn
    assert "| 4 blocks of Mistral-7B's shape, tune blocks | 7.00 | 9.00 | 9.0 | 512 |" in drawn
