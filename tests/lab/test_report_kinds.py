"""Whatever stands in a field of a folder, a report is made or one line says what is wrong; never a traceback."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_folders import make_run, make_study

from prunus.cli import main
from prunus.lab.report import page
from prunus.lab.schema import AMOUNT, ANY, COUNT, SHARE, TEXT, Maybe, Named, check

VALUES = ["x", "", "\ud800", None, [], [1], {}, {"a": None}, True, 0, -1, 5, 0.3, 1e-320, 1e308, 10**400, -(10**30)]
VALUES += [float("nan"), float("inf"), [[]], "9" * 5000]
FILES = ("run.json", "metrics.jsonl", "result.json", "cell.json", "failed.json", "study.json", "study_result.json")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a value of JSON."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def spoil(path: Path, rng: random.Random) -> tuple[Any, Any]:
    """Put some value in some field of a file; fields of the same name are as likely as one with a name of its own."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    values = [json.loads(line) for line in lines]
    by_name: dict[Any, list[tuple[Any, Any]]] = {}
    for where, key in places(values):
        by_name.setdefault(key if isinstance(key, str) else "[]", []).append((where, key))
    (where, key), value = rng.choice(by_name[rng.choice(list(by_name))]), rng.choice(VALUES)
    where[key] = value
    path.write_text("".join(json.dumps(one) + "\n" for one in values))
    return key, value


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_run(folder / "run")
    make_run(folder / "runs" / "a")
    make_study(folder / "study", ["dense", "magnitude", "bitter7"], (0.5,), seeds=2)
    result = json.loads((folder / "study" / "study_result.json").read_text())
    told = {"arm": "bitter7", "sparsity": 0.5, "seed": 7, "message": "no data"}
    for row in result["rows"]:
        row |= {"dense": "dense", "beside": ["lr"], "against_budget": 1.0, "same_as": None}
    result |= {"failed": [told], "off_target": [told]}
    (folder / "study" / "study_result.json").write_text(json.dumps(result))
    failed = make_run(folder / "study" / "runs" / "bitter7-0.5-s7", seed=7)
    (failed / "result.json").unlink()
    (failed / "failed.json").write_text(json.dumps({"message": "no data"}))
    return folder


def assert_shown_or_refused(command: list[str], capsys, about: object) -> None:
    code = 0
    try:
        main(command)
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        raise AssertionError(f"{command[0]} fell over {about}") from error
    said = capsys.readouterr().err.splitlines()
    assert (code, len(said)) in ((0, 0), (2, 1)), (about, code, said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "runs", "study"])
@pytest.mark.parametrize("seed", range(8))
def test_a_field_of_any_kind_is_shown_or_refused_in_one_line(kind, seed, good, tmp_path, capsys, monkeypatch):
    template, fixed = page._template()
    small = template, fixed | {"scripts": []}  # without four megabytes that no field is in
    monkeypatch.setattr(page, "_template", lambda: small)
    rng = random.Random(f"{kind} {seed}")
    for i in range(20):
        folder = Path(shutil.copytree(good / kind, tmp_path / str(i)))
        path = rng.choice([path for name in FILES for path in sorted(folder.rglob(name))[:3]])
        about = (str(path.relative_to(folder)), *spoil(path, rng))
        assert_shown_or_refused(["report", str(folder)], capsys, about)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("result.json", '"seconds": 21.0', '"seconds": "x"', 'seconds should be a number from 0 on, but is "x"'),
        ("result.json", '"seconds": 21.0', '"seconds": NaN', "seconds should be a number from 0 on, but is NaN"),
        ("metrics.jsonl", '"zeros": [', '"zeros": [null, ', "zeros[0] should be a whole number from 0 on, but is null"),
        ("metrics.jsonl", '"zeros": [', '"zeros": 5, "x": [', "zeros should be a list, but is 5"),
        ("metrics.jsonl", "4096", "3", "at step 20 a layer has more zeros than weights"),
        ("run.json", '"steps": 200', '"steps": null', "run.steps should be a whole number from 0 on, but is null"),
        ("run.json", "{", "[" * 100_000 + "{", "is not JSON"),
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
        ("study_result.json", {"rows": [{"arm": "a", "beside": 5}]}, "rows[0].beside should be a list, but is 5"),
        ("study_result.json", {"rows": [{"arm": 1}]}, "rows[0].arm should be text, but is 1"),
    ],
)
def test_what_is_wrong_in_a_study_is_said_with_its_file(file, changes, said, good, tmp_path, capsys):
    path = Path(shutil.copytree(good / "study", tmp_path / "study")) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "study")])
    error = capsys.readouterr().err
    assert f"{path}: {said}" in error and len(error.splitlines()) == 1


def test_a_folder_with_no_run_that_can_be_read_says_why(good, tmp_path, capsys):
    folder = Path(shutil.copytree(good / "runs", tmp_path / "runs"))
    (folder / "a" / "result.json").write_text("[1]")
    with pytest.raises(SystemExit):
        main(["report", str(folder)])
    assert "result.json: it should be an object, but is [1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (COUNT, [0, 7, 2**53], [True, -1, 1.0, 2**53 + 1, None, "1"]),
        (AMOUNT, [0, 1.5, 1e99], [True, -1.5, float("nan"), float("inf"), 10**400, None]),
        (SHARE, [0, 0.5, 1], [-0.1, 1.1, "0.5"]),
        (Maybe(TEXT), [None, ""], [5]),
        ([COUNT], [[], [1]], [{}, None, [1, None]]),
        (Named(COUNT), [{}, {"a": 1}], [[], {"a": "x"}]),
        ({"a": [{"b": TEXT}]}, [{}, {"c": 1}, {"a": [{}]}], [{"a": None}, {"a": [1]}, {"a": [{"b": 1}]}]),
        (ANY, [None, 1], []),
    ],
)
def test_a_kind_holds_what_it_says(spec, good, bad):
    for value in good:
        check(value, spec, "", "it")
    for value in bad:
        with pytest.raises(ValueError, match="should be"):
            check(value, spec, "", "it")
