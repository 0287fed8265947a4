"""Folders that are not whole: what is missing or failed is said and the rest shown, or one line says why not."""

import json
import shutil

import pytest
from report_folders import make_run, make_study, stopped
from report_pages import ARMS, VERDICTS, edit, page_of

from prunus.cli import main
from prunus.lab.report.cells import read_source

DAMAGES = {
    "no result": (lambda f: (f / "result.json").unlink(), "it goes on, or was interrupted"),
    "no metrics": (lambda f: (f / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
    "empty metrics": (lambda f: (f / "metrics.jsonl").write_text(""), ""),
    "cut line": (lambda f: (f / "metrics.jsonl").open("a").write('{"step": 21'), "is damaged"),
    "no step": (lambda f: (f / "metrics.jsonl").open("a").write('{"loss": 1}\n'), "has no step"),
    "diverged": (lambda f: (f / "metrics.jsonl").open("a").write('{"step": 201, "loss": NaN}\n'), "it diverged"),
    "words": (lambda f: (f / "metrics.jsonl").open("a").write('{"step": 201, "loss": "x"}\n'), "not finite"),
    "no environment": (lambda f: edit(f / "run.json", environment=None), ""),
}


def test_a_run_that_failed_is_said_to_have_failed_once(tmp_path):
    folder = make_study(tmp_path / "study", ARMS, (0.8,))
    failed = stopped(folder / "runs" / "bitter3-0.8-s1", 0.5, "the loss is nan")
    result = json.loads((folder / "study_result.json").read_text())
    told = [{"arm": "bitter3", "sparsity": 0.8, "seed": 1, "message": "the loss is nan"}]
    # a run that failed before it had a run.json is known to the result alone
    told.append({"arm": "bitter7", "sparsity": 0.8, "seed": 7, "message": "no data"})
    (folder / "study_result.json").write_text(json.dumps(result | {"failed": told}))
    notes = page_of(folder).texts["li"]
    assert [note for note in notes if "nan" in note] == ["bitter3-0.8-s1 failed: the loss is nan."]
    assert "bitter7 at 80 %, seed 7 failed: no data" in notes
    assert not any("interrupted" in note for note in notes)
    assert page_of(failed).texts["h1"] == ["bitter3 failed at step 100 of 200"]


def test_runs_without_an_end_are_counted_and_failures_with_them(tmp_path):
    for name, failure in (("a", ""), ("b", "the loss is nan")):
        stopped(make_run(tmp_path / "runs" / name), 0.5, failure)
    assert page_of(tmp_path / "runs").texts["h1"] == ["2 runs, none of which has ended yet; 1 failed"]


def test_a_study_of_which_only_dense_runs_have_ended_has_a_page(tmp_path):
    folder = make_study(tmp_path / "study", ["dense", "magnitude"], (0.5,))
    (folder / "study_result.json").unlink()
    for run in folder.glob("runs/magnitude-*"):
        stopped(run, 0.5)
    assert page_of(folder).texts["h1"] == ["6 runs, of which only dense ones have ended yet"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["run", "study"])
def test_what_is_missing_is_said_and_the_rest_is_shown(kind, damage, tmp_path):
    change, said = DAMAGES[damage]
    folder = make_run(tmp_path / "x") if kind == "run" else make_study(tmp_path / "x", ARMS[:4], (0.8,), seeds=2)
    change(folder if kind == "run" else folder / "runs" / "bitter7-0.8-s1")
    page = page_of(folder)
    assert said in " ".join(page.texts.get("li", []))
    assert len(page.texts["h2"]) >= 4


@pytest.mark.parametrize("missing", ["study_result.json", "runs", "study.json"])
def test_a_study_without_a_part_of_it_is_shown(missing, tmp_path):
    folder = make_study(tmp_path / "study", ARMS)
    shutil.rmtree(folder / missing) if missing == "runs" else (folder / missing).unlink()
    if missing == "study.json":
        folder = folder / "runs"  # a folder of runs
    page = page_of(folder)
    tables = page.tables[VERDICTS]
    assert len(tables) == 10
    assert ("verdict" in tables[0]) == (missing == "runs")
    assert any("Measured on a machine." in text for text in page.texts["p"])


@pytest.mark.parametrize(("field", "unit"), [("steps", "steps"), ("budget_scale", "steps"), ("context", "tokens")])
def test_a_run_json_that_contradicts_what_was_counted_is_refused_by_its_field(field, unit, tmp_path):
    folder = make_run(tmp_path / "x")
    values = json.loads((folder / "run.json").read_text())
    values["run"][field] *= 2
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"run\.json: (steps|context) make \d+ {unit}, but result\.json counted \d+"):
        read_source(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no run"),
        ("[1]", "run.json should hold a JSON object, but holds a list"),
        ("{}", "does not describe a run"),
        ("{", "run.json cannot be read as JSON"),
        ('{"run": {"batch": "x"}}', "run.json cannot be read: the run lacks the field"),
    ],
)
def test_a_folder_without_a_run_is_one_line_and_nothing_is_written(content, said, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()
