"""The page holds the numbers of its folder, and no text of the folder becomes markup."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode

import pytest
from report_folders import make_run, make_study
from report_pages import (
    ARMS,
    HOSTILE,
    VERDICTS,
    Page,
    changed,
    edit,
    figures_of,
    hostile_study,
    lines_of,
    page_of,
    rows_of,
)

from prunus.cli import main
from prunus.lab.report import page as report_page
from prunus.lab.report.cells import read_source
from prunus.lab.report.page import lede, render
from prunus.lab.report.sections import sections


def test_the_numbers_of_a_run_are_those_of_its_metrics(tmp_path):
    folder = make_run(tmp_path / "run")
    page, lines = page_of(folder), lines_of(folder)
    logged = [[float(cell) for cell in row] for row in page.tables["Every line of metrics.jsonl"][1:]]
    per_step = 16 * 128
    shown = [line for line in lines if "loss" in line]
    assert logged == [[one["step"], one["step"] * per_step, one["loss"], one["lr"]] for one in shown]
    held = [[float(cell) for cell in row] for row in page.tables["Every evaluation on held-out data"][1:]]
    evals = [line for line in lines if "eval" in line]
    assert [row[0] for row in held] == [line["step"] for line in evals]
    assert [row[2:] for row in held] == [
        [line["eval"]["loss"], line["eval"]["perplexity"], line["eval"]["accuracy"], line["sparsity"]] for line in evals
    ]
    layers = page.tables["Sparsity by layer over steps"]
    assert [float(row[-1]) for row in layers[1:]] == [zero / 4096 for zero in evals[-1]["zeros"]]


def test_the_figures_hold_the_same_numbers(tmp_path):
    folder = make_run(tmp_path / "run")
    figures = figures_of(folder)
    losses = [line["loss"] for line in lines_of(folder) if "loss" in line]
    assert figures[0]["data"][0]["y"] == losses
    assert figures[1]["data"][0]["y"] == [line["eval"]["perplexity"] for line in lines_of(folder) if "eval" in line]
    last = lines_of(folder)[-1]
    assert [row[-1] for row in figures[3]["data"][0]["z"]] == [zero / 4096 for zero in last["zeros"]]
    assert figures[2]["data"][0]["x"][1:-1] == [line["step"] for line in lines_of(folder) if "event" in line]


def test_a_study_shows_its_verdicts_and_says_the_finding(tmp_path):
    page = page_of(make_study(tmp_path / "study", ARMS))
    assert "At 80 % sparsity, bitter7 beats magnitude by 1.61 ± 0.50 perplexity over 3 seeds" in page.texts["h1"]
    rows = page.tables[VERDICTS][1:]
    expected = {(row["arm"], row["sparsity"], row["mean"]) for row in rows_of(tmp_path / "study")}
    assert {(row[0], float(row[1]), float(row[2])) for row in rows} == expected
    means = [float(row[2]) for row in rows if row[1] == "0.8"]
    assert means == sorted(means) and len(means) == 4
    assert [row[4] for row in rows if row[0] == "bitter3"][-1].startswith("no difference seen with 3 seeds: −0.30")
    best = [tag for tag, attrs in page.tags if tag == "tr" and "best" in (attrs.get("class") or "")]
    assert len(best) == 2
    for section in ("verdicts", "quality", "training", "sparsity", "layers", "overlap", "cost", "configuration"):
        assert ("section", {"id": section, "aria-labelledby": f"{section}-title"}) in page.tags


def test_a_line_begins_at_dense_of_its_own_recipe_or_nowhere(tmp_path):
    fast = {"dense": "dense fast", "against": "magnitude & more"}
    folder = changed(tmp_path / "study", bitter7=fast, bitter3={"dense": None})
    means = {(row["arm"], row["sparsity"]): row["mean"] for row in rows_of(folder)}
    dense = {"arm": "dense fast", "sparsity": 0.0, "values": [40.0], "mean": 40.0, "budget_scale": 1.0}
    edit(folder / "study_result.json", rows=[*rows_of(folder), dense])
    traces = next(f["data"] for f in figures_of(folder) if any(t.get("name") == "dense fast" for t in f["data"]))
    lines = {trace["name"]: trace["y"] for trace in traces}
    assert lines["bitter7"] == [40.0, means["bitter7", 0.5], means["bitter7", 0.8]]
    assert lines["bitter3"] == [means["bitter3", 0.5], means["bitter3", 0.8]]
    assert lines["magnitude"][0] == means["dense", 0.0] and lines["dense"] == [means["dense", 0.0]]
    page = page_of(folder)
    assert "against dense fast)" in page.texts["p"][0] + " ".join(page.texts["p"])
    rows = page.tables[VERDICTS][1:]
    assert all(row[4].endswith("against magnitude & more") == (row[0] == "bitter7") for row in rows)


def test_arms_far_from_the_others_leave_the_frame_and_are_named(tmp_path):
    folder = make_study(tmp_path / "study", ARMS)
    path = folder / "study_result.json"
    result = json.loads(path.read_text())
    for row in result["rows"]:
        if row["arm"] == "bitter3" and row["sparsity"] == 0.8:
            row["mean"] = 5000.0
    path.write_text(json.dumps(result))
    for run in folder.glob("runs/bitter3-0.8-*"):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        grown = [line | {"loss": 5000.0} if line.get("step", 0) > 150 and "loss" in line else line for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grown))
    figures = figures_of(folder)
    frames = [f["layout"]["yaxis"].get("range") for f in figures]
    assert max(high for _, high in filter(None, frames)) < 1000  # of curves too
    low, high = next(frame for frame, f in zip(frames, figures, strict=True) if len(f["data"]) == len(ARMS))
    inside = [row["mean"] for row in result["rows"] if row["arm"] in ("dense", "magnitude", "bitter7")]
    assert low < min(inside) and max(inside) < high < 100
    said = page_of(folder).texts["p"]
    assert any("Outside the frame: bitter3 at 80 %." in text for text in said)
    assert any("without bitter3 at 80 %, which may leave it." in text for text in said)


def test_a_sparsity_that_is_worse_as_a_whole_stays_in_the_frame(tmp_path):
    folder = make_study(tmp_path / "study", ARMS)
    path = folder / "study_result.json"
    result = json.loads(path.read_text())
    for row in result["rows"]:
        row["mean"] = {0.0: 20.0, 0.5: 20.2, 0.8: 90.0}[row["sparsity"]] + len(row["arm"]) / 100
    path.write_text(json.dumps(result))
    assert not any("Outside the frame" in text or "may leave it" in text for text in page_of(folder).texts["p"])


def test_a_mixed_comparison_is_told_and_is_no_headline(tmp_path):
    beside, longer = {"beside": ["lr"]}, {"budget_scale": 2.0}
    page = page_of(changed(tmp_path / "study", every={"against_budget": 1.0}, bitter7=beside, bitter3=longer))
    assert "bitter" not in page.texts["h1"][0].replace("bitter7 ended lowest", "")
    rows = page.tables[VERDICTS][1:]
    assert all(row[4].endswith("; lr differs too") for row in rows if row[0] == "bitter7")
    assert all(row[4].endswith("; 2 times the tokens") for row in rows if row[0].startswith("bitter3"))
    arms = [row[0] for row in page.tables["Paired differences"][1:]]
    assert "bitter7 – magnitude, more differs" in arms and not any("random –" in arm for arm in arms)


@pytest.mark.parametrize("budget", [1.0, 1.3])
def test_the_best_is_the_best_of_equal_budgets(budget, tmp_path):
    same, longer = {"against_budget": budget, "budget_scale": budget}, {"budget_scale": 2 * budget}
    better = {"verdict": "better by 0.30 ± 0.10 (3 seeds)"}
    folder = changed(tmp_path / "study", every=same, bitter7=longer, bitter3=better)  # bitter7 leads by its steps alone
    edit(folder / "study.json", base=json.loads((folder / "study.json").read_text())["base"] | {"budget_scale": budget})
    [table] = sections(read_source(folder))[0].tables
    best = [row[0].partition(" (")[0] for i, row in enumerate(table.rows) if "best" in table.looks[i]]
    assert best == ["bitter3", "bitter3"]
    assert [row[0] for row in table.rows].count(f"bitter7 (budget × {2 * budget:.2f})") == 2
    said = lede(read_source(folder))
    assert "Lowest at 50 % bitter3 (" in said and "; at 80 % bitter3 (" in said


def test_an_arm_with_fewer_seeds_is_not_called_the_lowest(tmp_path):
    folder = changed(tmp_path / "study", bitter7={"values": [50.0]})  # which has the best mean
    assert "Lowest at 50 % bitter3 (" in lede(read_source(folder))


def test_runs_of_a_longer_budget_do_not_end_lowest(tmp_path):
    for arm, budget in (("magnitude", 1.0), ("bitter3", 1.0), ("bitter7", 2.0)):
        make_run(tmp_path / "runs" / arm, arm, 0.8, budget_scale=budget)
    assert page_of(tmp_path / "runs").texts["h1"][0].startswith("At 80 % sparsity, bitter3 ended lowest")


def test_without_events_there_is_no_line_of_what_was_asked(tmp_path):
    folder = make_run(tmp_path / "run")
    kept = [line for line in lines_of(folder) if "event" not in line]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    [counted] = figures_of(folder)[2]["data"]
    shares = [line["sparsity"] for line in kept if "eval" in line]
    assert counted["mode"] == "markers" and counted["y"] == shares
    rows = page_of(folder).tables["Sparsity counted at every evaluation"][1:]
    assert [float(row[2]) for row in rows] == shares


def test_curves_of_a_study_are_means_over_seeds(tmp_path):
    folder = make_study(tmp_path / "study", ARMS, sparsities=(0.5,))
    rows = page_of(folder).tables["Training loss, mean over seeds"]
    runs = [lines_of(folder / "runs" / f"bitter7-0.5-s{seed}") for seed in range(3)]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in runs]
    column = rows[0].index("bitter7")
    assert [float(row[column]) for row in rows[1:]] == pytest.approx([sum(s) / 3 for s in zip(*losses, strict=True)])


def test_every_chart_has_words_and_a_table(tmp_path):
    page = page_of(make_study(tmp_path / "study", ARMS))
    charts = [attrs for _, attrs in page.tags if attrs.get("class") == "chart"]
    assert len(charts) == len(figures_of(tmp_path / "study")) > 10
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 20 for attrs in charts)
    assert sum(tag == "details" for tag, _ in page.tags) >= len(charts)
    assert {"header", "main", "nav", "footer", "h1"} <= {tag for tag, _ in page.tags}


def test_the_same_folder_gives_the_same_page(tmp_path):
    folder = make_study(tmp_path / "a" / "study", ARMS)
    shutil.copytree(folder, tmp_path / "b" / "study")
    assert render(read_source(folder)) == render(read_source(tmp_path / "b" / "study"))


def test_no_text_of_a_folder_becomes_markup(tmp_path):
    page = page_of(hostile_study(tmp_path / "<b>study"))
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe")]
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert any(HOSTILE in text for text in page.texts["li"])
    for figure in figures_of(tmp_path / "<b>study"):
        assert "<img" not in json.dumps(figure)  # the chart library reads some markup


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    own = [text for text in page.texts["script"] if not text.startswith("[{")]
    digests = {f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in own}
    assert len(own) == 2 and set(re.findall(r"'sha256-[^']+'", policy)) == digests
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "http" not in policy
    assert not [a for _, a in page.tags if (a.get("src") or a.get("href") or "#")[:1] not in "#d"]


def test_an_arm_that_is_another_says_so_and_is_drawn_once(tmp_path):
    folder = make_study(tmp_path / "study", ARMS)
    result = json.loads((folder / "study_result.json").read_text())
    twins = [row | {"arm": "bitter1", "same_as": "magnitude"} for row in result["rows"] if row["arm"] == "magnitude"]
    twins = [row | {"difference": {"mean": 0.0, "half_width": 0.5, "num": 2}} for row in twins]
    (folder / "study_result.json").write_text(json.dumps(result | {"rows": result["rows"] + twins}))
    rows = page_of(folder).tables[VERDICTS]
    assert [row[3:5] for row in rows if row[0] == "bitter1"] == [["–", "the same computation as magnitude"]] * 2
    assert "bitter1" not in json.dumps(figures_of(folder))


def test_long_runs_are_thinned_to_their_last_line(tmp_path):
    folder = make_run(tmp_path / "run")
    more = [{"step": 201 + i, "loss": 4.0 + i, "lr": 0.1} for i in range(4000)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in more))
    drawn = figures_of(folder)[0]["data"][0]["y"]
    assert drawn[-1] == 4.0 + 3999 and drawn[0] == lines_of(folder)[2]["loss"] and 1000 < len(drawn) <= 1501
    table = next(rows for caption, rows in page_of(folder).tables.items() if "of 4020 lines" in caption)
    assert float(table[-1][2]) == 4.0 + 3999 and len(table) <= 253


def test_a_page_of_images_speaks_of_accuracy(tmp_path):
    folder = make_run(tmp_path / "run", model="lenet5", data="digits")
    edit(folder / "result.json", tokens=0)
    page = page_of(folder)
    assert any("ended at 50.00 % accuracy" in text for text in page.texts["h1"])
    assert "images read" in page.texts["dt"]


def test_a_run_of_the_trainer_has_a_page(tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    options = "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --eval-every 3 --warmup 1"
    out = str(tmp_path / "run")
    main(["train", *options.split(), "--data", str(tmp_path / "text.txt"), "--out", out])
    main(["report", out])
    assert "report.html" in capsys.readouterr().out
    page, last = Page((tmp_path / "run" / "report.html").read_text()), lines_of(tmp_path / "run")[-1]
    total = sum(lines_of(tmp_path / "run")[0]["layers"].values())
    assert sum(last["zeros"]) / total == last["sparsity"] == 0.5
    assert float(page.tables["Every evaluation on held-out data"][-1][2]) == last["eval"]["loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["peak_memory"] > 2**20


def test_a_report_is_made_without_torch(tmp_path):
    make_run(tmp_path / "run")
    code = "import sys; from prunus.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "report", str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_in_the_place_of_the_page_is_refused_and_nothing_lies_beside_it(tmp_path, capsys):
    make_run(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run"), "--out", str(tmp_path)])
    assert f"give the name of the page too: {tmp_path / 'report.html'}" in capsys.readouterr().err
    assert not list(tmp_path.parent.glob("*.part"))


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    report_page._template.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    make_run(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run")])
    assert "pip install plotly jinja2" in capsys.readouterr().err


def test_what_is_called_shared_is_shared(tmp_path):
    page = page_of(make_study(tmp_path / "study", ARMS))
    for title in ("Shared by all runs: all fields", "Shared by all runs: what differs from the defaults"):
        names = {row[0] for row in page.tables[title][1:]}
        assert not names & {"score", "sparsity", "seed", "out"}, title
    assert "lr" in {row[0] for row in page.tables["Shared by all runs: all fields"]}
