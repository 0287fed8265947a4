"""Arms that are named after a recipe: said once where two share it, with room for the charts beside them."""

import pytest
from report_pages import VERDICTS, changed, figures_of, page_of

from prunus.lab.report.comparison import split_recipe

RECIPE = "lr 2e-3 to 0 warmup 200 every 5 beta2 0.99"


@pytest.mark.parametrize(
    ("arm", "other", "expected"),
    [
        ("bitter7 lr 2e-3", "magnitude lr 2e-3", ("bitter7", "magnitude", "lr 2e-3")),
        ("bitter7 lr 2e-3", "magnitude lr 1e-3", ("bitter7 lr 2e-3", "magnitude lr 1e-3", "")),
        ("bitter7 every 5 fast", "bitter7 every 50 fast", ("bitter7 every 5 fast", "bitter7 every 50 fast", "")),
        ("bitter7", "magnitude", ("bitter7", "magnitude", "")),
        ("bitter7", "", ("bitter7", "", "")),
    ],
)
def test_a_recipe_is_what_both_names_end_with_behind_one_word(arm, other, expected):
    assert split_recipe(arm, other) == expected


def test_a_recipe_that_two_arms_share_is_said_once(tmp_path):
    fast = {"bitter7": {"arm": f"bitter7 {RECIPE}", "against": f"magnitude {RECIPE}"}}
    folder = changed(tmp_path / "study", **fast)
    finding = "At 80 % sparsity, bitter7 beats magnitude by 1.61 ± 0.50 perplexity over 3 seeds"
    assert page_of(folder).texts["h1"] == [f"{finding}, both {RECIPE}"]
    labels = {label for figure in figures_of(folder) for label in figure["data"][0]["y"] if isinstance(label, str)}
    assert f"bitter7 {RECIPE}<br>– magnitude, same recipe" in labels


def test_a_chart_beside_long_names_has_the_width_of_the_page(tmp_path):
    for name, arm in (("short", "bitter7 fast"), ("long", f"bitter7 {RECIPE}")):
        page = page_of(changed(tmp_path / name, bitter7={"arm": arm}))
        wide = [attributes for tag, attributes in page.tags if tag == "figure" and attributes.get("class") == "wide"]
        assert bool(wide) == (name == "long")


def test_a_difference_far_from_the_others_does_not_stretch_their_chart(tmp_path):
    ruined = {"bitter3": {"difference": {"mean": 5000.0, "half_width": None}}}
    folder = changed(tmp_path / "study", **ruined)
    frames = [figure["layout"] for figure in figures_of(folder) if figure["layout"].get("annotations")]
    assert frames and all(frame["xaxis"]["range"][1] < 100 for frame in frames)
    assert all("+5,000.00 →" in [note["text"] for note in frame["annotations"]] for frame in frames)


def test_what_differs_beside_is_not_told_of_a_comparison_that_was_not_made(tmp_path):
    nothing = {"difference": None, "beside": ["beta2", "lr"]}
    folder = changed(tmp_path / "study", bitter3=nothing | {"verdict": ""}, bitter7=nothing | {"verdict": "one seed"})
    rows = page_of(folder).tables[VERDICTS][1:]
    said = {row[0]: row[4] for row in rows}
    assert (said["bitter3"], said["bitter7"]) == ("", "one seed; beta2, lr differ too")
