"""The page of a recovered model holds the numbers of recovery.json, leaves out what is not finite, and escapes text."""

import json
import math
import subprocess
import sys

import pytest
from report_folders import make_recovery, recovery_values
from report_pages import HOSTILE, Page, figures_in

from prunus.cli import main
from prunus.lab.report.page import write_report

NAN = float("nan")
SAME_DATA = "All models on the same held-out data"
LABELS = {"perplexity": "perplexity", "accuracy": "accuracy, %", "kl": "KL divergence"}


def shown(figures: dict, metric: str) -> float:
    if metric == "perplexity":
        return math.exp(figures["loss"])
    return 100 * figures["accuracy"] if metric == "accuracy" else figures["kl"]


def read(folder):
    text = write_report(folder).read_text()
    return Page(text), figures_in(text)


@pytest.mark.parametrize("metric", LABELS)
def test_every_figure_of_the_page_is_in_the_file(metric, tmp_path):
    page, charts = read(make_recovery(tmp_path / "recovered", metric))
    values = recovery_values(metric)
    metrics = list(dict.fromkeys((metric, "kl")))
    models = {"before recovery": values["before"], "recovered": values["after"], "teacher": values["teacher"]}
    assert len(charts) == len(metrics)
    for chart, name in zip(charts, metrics, strict=True):
        *levels, curve = chart["data"]
        assert curve["x"] == [point["tokens"] for point in values["curve"]]
        assert curve["y"] == pytest.approx([shown(point, name) for point in values["curve"]])
        assert [size > 5 for size in curve["marker"]["size"]] == [point["step"] == 300 for point in values["curve"]]
        lines = ["before recovery"] if name == "kl" else ["before recovery", "teacher"]
        assert [level["name"] for level in levels] == lines
        for level in levels:
            assert level["y"] == pytest.approx([shown(models[level["name"]], name)] * len(level["x"]))
            assert (level["x"][0], level["x"][-1]) == (0, values["tokens"])
    head, *rows = page.tables[SAME_DATA]
    assert head == ["model", *(LABELS[name] for name in metrics)]
    assert {name: [*map(float, cells)] for name, *cells in rows} == {
        name: pytest.approx([shown(figures, each) for each in metrics]) for name, figures in models.items()
    }
    assert ["train", "*.weight"] in page.tables["What the command was given"]
    assert page.texts["li"][0] == "Logits are whole."


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("perplexity", "Held-out perplexity went from 61.25 to 56.50; the teacher has 55.00"),
        ("accuracy", "Held-out accuracy went from 77.50 % to 87.00 %; the teacher has 90.00 %"),
        ("kl", "Held-out KL divergence from the teacher went from 0.1250 to 0.03000"),
    ],
)
def test_the_headline_says_before_after_and_teacher_and_the_next_line_what_it_took(metric, said, tmp_path):
    page, _ = read(make_recovery(tmp_path / "recovered", metric))
    assert page.texts["h1"] == [said]
    unit = "tokens" if metric == "perplexity" else "tokens or samples"
    took = f"40,632,320 zeros kept; 360 steps, 184,320 {unit}, 47.2 s. Learning rate 0.002: the best of 3 trials"
    assert page.texts["p"][1].startswith(took)
    assert any("Trials of learning rates are not on the curve" in text for text in page.texts["p"])


@pytest.mark.parametrize("bad", [None, NAN, float("inf"), -float("inf"), "x", True, 1e300, [1], {}])
def test_what_is_no_finite_number_is_left_out_of_the_curve(bad, tmp_path):
    values = recovery_values()
    values["curve"][2] |= {"kl": bad, "loss": bad, "accuracy": bad}
    del values["curve"][3]["kl"], values["curve"][3]["loss"]
    _, charts = read(make_recovery(tmp_path / "recovered", curve=values["curve"]))
    for chart in charts:
        assert chart["data"][-1]["x"] == [512 * step for step in (0, 120, 300, 360)]


@pytest.mark.parametrize("bad", [None, NAN, "x", 1e300])
def test_a_model_without_a_figure_has_no_line_and_the_headline_says_it(bad, tmp_path):
    page, charts = read(make_recovery(tmp_path / "a", before={"kl": bad, "loss": bad}))
    assert [trace["name"] for trace in charts[0]["data"]] == ["teacher", "recovered"]
    assert page.texts["h1"] == ["Held-out perplexity went from no finite value to 56.50; the teacher has 55.00"]
    page, charts = read(make_recovery(tmp_path / "b", teacher={"kl": None, "loss": 4.0}))  # there was no teacher
    assert [trace["name"] for trace in charts[0]["data"]] == ["before recovery", "recovered"]
    assert "teacher" not in page.texts["h1"][0] and len(page.tables[SAME_DATA]) == 3
    nothing = {"before": {}, "after": {}, "teacher": {}, "curve": []}
    page, charts = read(make_recovery(tmp_path / "c", **nothing))
    assert "from no finite value to no finite value" in page.texts["h1"][0] and charts[0]["data"][0]["x"] == []


def test_a_run_that_ended_at_its_first_point_has_the_lines_and_the_point(tmp_path):
    values = recovery_values()
    ended = {"curve": values["curve"][:1], "after": values["before"], "best_step": 0, "steps": 0, "tokens": 0}
    page, charts = read(make_recovery(tmp_path / "recovered", **ended, lr_reason="given", notes=None, settings=None))
    before, teacher, curve = charts[0]["data"]
    assert before["x"] == teacher["x"] == [0, 1] and curve["x"] == [0] and curve["marker"]["size"] == [11]
    assert page.texts["h2"] == ["Recovery", "On held-out data"] and "aside" not in page.texts
    assert not any("Trials" in text for text in page.texts["p"])


def test_a_perplexity_that_fell_far_is_drawn_on_a_logarithmic_axis(tmp_path):
    values = recovery_values()
    for figures in (values["before"], values["curve"][0]):
        figures |= {"loss": math.log(4000.0)}
    _, charts = read(make_recovery(tmp_path / "far", before=values["before"], curve=values["curve"]))
    _, near = read(make_recovery(tmp_path / "near"))
    assert charts[0]["layout"]["yaxis"]["type"] == "log" and "type" not in near[0]["layout"]["yaxis"]


def test_text_of_the_file_stays_text(tmp_path):
    words = {"lr_reason": HOSTILE, "notes": [HOSTILE], "settings": {HOSTILE: HOSTILE, "train": [HOSTILE]}}
    folder = make_recovery(tmp_path / "<b>recovered", **words, before={"kl": HOSTILE, "loss": HOSTILE})
    page, charts = read(folder)
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe")] and "<b>recovered" in page.texts["b"]
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert page.texts["li"][0] == HOSTILE and [HOSTILE, HOSTILE] in page.tables["What the command was given"]
    assert HOSTILE in page.texts["p"][1] and "<img" not in json.dumps(charts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "recovery.json cannot be read as JSON"),
        ("[1]", "recovery.json should hold a JSON object, but holds a list"),
        ("{}", "recovery.json: before should be an object, but is null"),
        ({"curve": 5}, "recovery.json: curve should be a list, but is 5"),
        ({"curve": [None]}, "recovery.json: curve[0] should be an object, but is null"),
        ({"curve": [{"step": 1.5, "tokens": 1}]}, "curve[0].step should be a whole number from 0 on, but is 1.5"),
        ({"lr": "x\x1b[2J\n"}, r'lr should be a number from 0 on, but is "x\u001b[2J\n"'),
        ({"seconds": NAN}, "seconds should be a number from 0 on, but is null"),
        ({"num_zeros": -1}, "num_zeros should be a whole number from 0 on, but is -1"),
        ({"notes": [1]}, "notes[0] should be text, but is 1"),
        ({"settings": []}, "settings should be an object, but is []"),
    ],
)
def test_a_damaged_file_is_one_line_and_nothing_is_written(content, said, tmp_path, capsys):
    folder = make_recovery(tmp_path / "recovered", **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        (folder / "recovery.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(folder)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and len(error.splitlines()) == 1
    assert [path.name for path in folder.iterdir()] == ["recovery.json"]


def test_the_page_of_a_pruned_model_shows_the_recovery_that_it_had(tmp_path):
    result = {
        "rows": {"dense": {"sparsity": 0, "perplexity": 55.0}, "recovered": {"sparsity": 0.5, "perplexity": NAN}},
        "layers": [{"name": "<b>a.weight", "sparsity": 0.5}],
        "settings": {"model": HOSTILE},
        "seconds": 12,
        "peak_bytes": 2**30,
    }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "result.json").write_text(json.dumps(result))
    plain = write_report(tmp_path).read_text()
    assert Page(plain).texts["h2"] == ["On held-out data", "Layer by layer"] and "<script" not in plain
    (tmp_path / "result.json").write_text(json.dumps(result | {"recovery": recovery_values()}))
    page, charts = read(tmp_path)
    assert page.texts["h2"] == ["On held-out data", "Recovery", "Layer by layer"] and HOSTILE in page.texts["b"]
    assert any("went from 61.25 to 56.50" in text and "184,320 tokens" in text for text in page.texts["p"])
    assert charts[0]["data"][-1]["y"] == pytest.approx([math.exp(p["loss"]) for p in recovery_values()["curve"]])
    assert page.tables[SAME_DATA][1:] == [["dense", "0", "55.0"], ["recovered", "0.5", "not finite"]]


def test_the_command_writes_the_page_without_torch(tmp_path):
    folder = make_recovery(tmp_path / "recovered")
    (folder / "config.json").write_text("{}")
    (folder / "result.json").write_text("{}")  # of the pruning before
    code = "import sys; from prunus.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "report", str(folder), "--out", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "page.html" in done.stdout, done.stderr
    assert "Held-out perplexity" in Page((tmp_path / "page.html").read_text()).texts["h3"]
