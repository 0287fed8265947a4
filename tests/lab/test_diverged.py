"""A training that diverges leaves JSON that every reader takes, and is said to have diverged by whatever shows it."""

import json
import math
import shutil
from pathlib import Path

import pytest
from report_folders import make_run
from report_pages import page_of

from prunus.cli import main
from prunus.files.json_file import read_json, to_json
from prunus.lab.report.cells import read_source
from prunus.lab.report.sections import sections

OPTIONS = (
    "--model gpt2-tiny --context 8 --batch 2 --steps 6 --eval-every 3 --eval-size 2 --log-every 1 --warmup 0 "
    "--score none --optimizer sgd --lr 1e30 --clip 0"
).split()


@pytest.fixture(scope="module")
def diverged(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diverged")
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 40)
    main(["train", *OPTIONS, "--data", str(folder / "text.txt"), "--out", str(folder / "run")])
    return folder / "run"


@pytest.fixture
def run(diverged, tmp_path) -> Path:
    """The run, for one test to add to what lies beside it."""
    return Path(shutil.copytree(diverged, tmp_path / "run"))


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null(diverged):
    result = strict((diverged / "result.json").read_text())
    lines = [strict(line) for line in (diverged / "metrics.jsonl").read_text().splitlines()]
    assert result["loss"] is None and result["perplexity"] is None and result["steps"] == 6
    assert lines[-1]["loss"] is None and lines[-1]["eval"]["loss"] is None and lines[0]["loss"] > 0


def test_all_that_shows_it_says_so(run):
    page = page_of(run)
    assert page.texts["h1"] == ["The dense run diverged: it ended with no finite quality"]
    assert "This run has losses that are not finite: it diverged." in page.texts["li"]
    assert [row.mean for row in read_source(run.parent).rows] == [None]
    assert read_json(run / "result.json")["loss"] is None


def test_it_is_the_worst_of_its_runs(run):
    make_run(run.parent / "other", "dense", 0.0)
    [table] = sections(read_source(run.parent))[0].tables
    assert [row[0] for row in table.rows] == ["other", "run"]


def test_its_checkpoint_is_evaluated(diverged, capsys):
    main(["eval", str(diverged)])
    assert "loss nan" in capsys.readouterr().out


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_null_stands_for_it_at_any_depth(value):
    assert to_json({"a": [value, (1.5, {"b": value})], "c": 1, "d": "NaN"}) == (
        '{"a": [null, [1.5, {"b": null}]], "c": 1, "d": "NaN"}'
    )
