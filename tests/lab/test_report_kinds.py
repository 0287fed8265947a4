"""A field of a folder that holds something else than it should is named in one line, with its file."""

import json

import pytest
from report_folders import make_run, make_study

from prunus.cli import main
from prunus.lab.schema import AMOUNT, ANY, COUNT, SHARE, TEXT, Maybe, Named, check

ROW = {"arm": "a", "sparsity": 0.5, "values": [], "budget_scale": 1.0}


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("result.json", '"seconds": 21.0', '"seconds": "x"', 'seconds should be a number from 0 on, but is "x"'),
        ("result.json", '"seconds": 21.0', '"seconds": NaN', "seconds should be a number from 0 on, but is null"),
        ("metrics.jsonl", '"zeros": [', '"zeros": [null, ', "zeros[0] should be a whole number from 0 on, but is null"),
        ("metrics.jsonl", '"zeros": [', '"zeros": 5, "x": [', "zeros should be a list, but is 5"),
        ("metrics.jsonl", "4096", "3", "at step 20 a layer has more zeros than weights"),
        ("result.json", '"seconds": 21.0, ', "", "seconds should be a number from 0 on, but is null"),
        ("run.json", '"steps": 200', '"steps": null', "the run: steps cannot be None; it takes int"),
        ("run.json", '"steps": 200, ', "", "the run lacks the field 'steps'"),
        ("run.json", "{", "[" * 100_000 + "{", "cannot be read as JSON"),
    ],
)
def test_what_is_wrong_in_a_run_is_said_with_its_file(file, old, new, said, tmp_path, capsys):
    path = make_run(tmp_path / "run") / file
    path.write_text(path.read_text().replace(old, new, -1 if file == "metrics.jsonl" else 1))
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert said in error and str(path) in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("study.json", {"arms": None}, "arms should be a list, but is null"),
        ("study.json", {"base": 5}, "base should be an object, but is 5"),
        ("study.json", {"base": {}}, "base: the run lacks the field"),
        ("study_result.json", {"rows": [ROW | {"beside": 5}]}, "rows[0].beside should be a list, but is 5"),
        ("study_result.json", {"rows": [ROW | {"arm": 1}]}, "rows[0].arm should be text, but is 1"),
    ],
)
def test_what_is_wrong_in_a_study_is_said_with_its_file(file, changes, said, tmp_path, capsys):
    path = make_study(tmp_path / "study", ["dense", "magnitude"], (0.5,), seeds=1) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "study")])
    error = capsys.readouterr().err
    assert f"{path}: {said}" in error and len(error.splitlines()) == 1


def test_a_folder_with_no_run_that_can_be_read_says_why(tmp_path, capsys):
    (make_run(tmp_path / "runs" / "a") / "result.json").write_text("[1]")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "runs")])
    assert "result.json should hold a JSON object, but holds a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (COUNT, [0, 7, 2**53], [True, -1, 1.0, 2**53 + 1, None, "1"]),
        (AMOUNT, [0, 1.5, 1e99], [True, -1.5, float("nan"), float("inf"), 10**400, None]),
        (SHARE, [0, 0.5, 1], [-0.1, 1.1, "0.5"]),
        (Maybe(TEXT), [None, ""], [5]),
        ([COUNT], [[], [1]], [{}, None, [1, None]]),
        (Named(COUNT), [{}, {"a": 1}], [[], {"a": "x"}]),
        (
            {"a": [{"b": TEXT}]},
            [{"a": []}, {"a": [{"b": ""}], "c": 1}],
            [{}, {"a": None}, {"a": [1]}, {"a": [{"b": 1}]}],
        ),
        (ANY, [None, 1], []),
    ],
)
def test_a_kind_holds_what_it_says(spec, good, bad):
    for value in good:
        check(value, spec, "", "it")
    for value in bad:
        with pytest.raises(ValueError, match="should be"):
            check(value, spec, "", "it")
