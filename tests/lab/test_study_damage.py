"""A result that is damaged is told in one line and kept; the other runs of the study are shown and go on."""

import json
import shutil

import pytest
from covering import quickly
from report_pages import page_of
from study_command import ASKED, losses, rows, stamps, study

from prunus.cli import main
from prunus.files.json_file import read_json
from prunus.lab.study.merge import merge
from prunus.lab.study.tables import page

LACKING = "has no number for"
DAMAGES = {
    "truncated": (lambda text: text[: len(text) // 2], "cannot be read"),
    "empty": (lambda text: "", "cannot be read"),
    "not JSON": (lambda text: "\x00" * 40, "cannot be read"),
    "a list": (lambda text: "[1]", "should hold a JSON object"),
    "no fields": (lambda text: "{}", f"{LACKING} accuracy"),
    "no loss": (lambda text: without(text, "loss"), f"{LACKING} loss"),
    "no tokens": (lambda text: without(text, "tokens"), f"{LACKING} tokens"),
    "no number asked": (lambda text: json.dumps(json.loads(text) | {"num_asked": None}), f"{LACKING} num_asked"),
    "words": (lambda text: json.dumps(json.loads(text) | {"sparsity": "half"}), f"{LACKING} sparsity"),
}


def without(text: str, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != name})


def lines_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if "result.json" in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(DAMAGES, "truncated", "a list", "no loss", "no number asked"))
def test_it_is_told_and_the_others_are_shown(name, copy, capsys):
    change, wrong = DAMAGES[name]
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    main(["study", "show", str(copy)])
    shown = capsys.readouterr().out
    [line] = lines_of(shown)
    assert line.startswith(f"failed: bitter7 at 0.5, seed 0: runs/bitter7-0.5-s0/result.json {wrong}")
    assert line.endswith("; move it away to have it run again") and "7 of 8 runs" in shown
    with pytest.raises(SystemExit) as stop:
        main(["study", "--out", str(copy), "--devices", "cpu"])  # continued
    assert stop.value.code == 1 and lines_of(capsys.readouterr().out) == [line]
    assert path.read_bytes() == before, "nobody overwrites it"
    seeds = {arm: row["seeds"] for arm, row in rows(copy).items()}
    assert seeds == {"dense": [0, 1], "random": [0, 1], "magnitude": [0, 1], "bitter7": [1], "bitter1": [0, 1]}
    notes = [note for note in page_of(copy).texts["li"] if "to have it run again" in note]
    assert notes == [line.removeprefix("failed: ").replace("at 0.5, seed 0:", "at 50 %, seed 0 failed:")]
    assert line in page([copy])


def test_moved_away_it_is_run_again(copy, done, base, tmp_path, capsys):
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text("")
    assert study(base, copy, *ASKED, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "damaged" in said and "left to do: 0 examples" in said
    path.rename(tmp_path / "result.json")
    before = stamps(copy)
    assert study(base, copy, *ASKED) == 0
    assert losses(copy) == losses(done)
    assert {name: stamps(copy)[name] for name in before} == before
    assert read_json(copy / "study_result.json")["failed"] == []


@pytest.mark.parametrize("first", [True, False])
def test_a_whole_result_is_merged_before_a_damaged_one(first, copy, done, tmp_path):
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text("")
    merge([copy, done] if first else [done, copy], tmp_path / "both")
    assert losses(tmp_path / "both") == losses(done)
    shutil.rmtree(tmp_path / "both")
    assert [entry["arm"] for entry in merge([copy], tmp_path / "both")["failed"]] == ["bitter7"]
