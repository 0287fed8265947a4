"""What would not be comparable is refused in one line, and the folder stays as it was."""

import json

import pytest
from study_command import ASKED, study

from prunus.cli.study import Command, planned
from prunus.files.atomic import part_name
from prunus.files.json_file import read_json
from prunus.lab.run import Run
from prunus.lab.study.study_folder import Folder

CHANGED = {
    "base": (("--set", "lr=3e-3"), "has lr = 0.002, not 0.003"),
    "budget": (("--set", "steps=7"), "has steps = 4, not 7"),
    "arm": (("--arm", "bitter7: score=bitter7 end=3"), "two arms are named bitter7"),
    "arm of the folder": (("--arm", "bitter1: score=bitter1 end=3", "--scores", "random"), "arm bitter1 of"),
    "data": (("--data", "stdlib"), "another data"),
    "evaluation": (("--set", "eval_size=1"), "has eval_size = 2, not 1"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_configuration_is_refused_and_nothing_is_touched(case, copy, base, capsys):
    options, said = CHANGED[case]
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.json")}
    asked = ("--seeds", "2") if "--scores" in options else ASKED
    assert study(base, copy, *asked, *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.json")} == before


def test_a_run_that_is_not_what_its_name_says_is_refused(copy, base, capsys):
    path = copy / "runs" / "bitter7-0.5-s0" / "run.json"
    values = read_json(path)
    values["run"]["lr"] = 0.5
    path.write_text(json.dumps(values))
    assert study(base, copy, *ASKED) == 2
    assert "was run with lr = 0.5, but the study has 0.002" in capsys.readouterr().err


def test_scores_alone_are_compared_in_the_default_recipe(tmp_path):
    plan = planned(Command(out=tmp_path / "study", scores="bitter7"))
    assert plan.base == Run() and [arm.name for arm in plan.arms] == ["dense", "random", "magnitude", "bitter7"]
    with pytest.raises(ValueError, match="say what to run: --scores, --base"):
        planned(Command(out=tmp_path / "study"))


def test_a_seed_in_the_file_is_refused(base, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(base.read_text() + "seed = 5\n")
    assert study(file, tmp_path / "study") == 2
    assert "--seeds sets the seeds" in capsys.readouterr().err and not (tmp_path / "study").exists()


def test_a_folder_of_something_else_is_left_alone(base, tmp_path, capsys):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.txt").write_text("mine")
    assert study(base, tmp_path / "study") == 2
    assert "neither empty nor a study" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["thesis.txt"]


def test_what_a_killed_study_left_before_its_plan_is_no_hindrance(base, tmp_path):
    folder = tmp_path / "study"
    (folder / "locks").mkdir(parents=True)
    (folder / "locks/study.lock").touch()
    part_name(folder / "study.json").write_text('{"format": ')
    assert study(base, folder, "--dry-run") == 0
    plan = planned(Command(base=base, seeds="1"))
    assert Folder(folder).join(plan, {}) == plan and (folder / "study.json").is_file()


def test_mistakes_are_one_line(base, tmp_path, capsys):
    for options, said in {
        ("--seeds", "0"): "at least 1",
        ("--sparsity", "half"): "expected a number",
        ("--only", "nobody"): "there is no arm 'nobody'",
        ("--devices", "tpu"): "--devices takes numbers of GPUs or cpu",
        ("--scores", "bitter77"): "there is no score 'bitter77'",
        ("--data", "nowhere.txt"): "nowhere.txt is neither a file nor a folder",
        ("--set", "model=lenet5"): "lenet5",
        ("--set", "augment=true"): "augment crops and flips images",
        ("paint",): "expected merge, show, page or options after prunus study, got 'paint'",
        ("--preset", "eps"): "give one of them",
        ("--set", "out=here"): "the runs of a study do not choose out; leave it out and pass --out",
        ("merge", "x"): "study merge does not read --base",
        ("--slim",): "a study does not read --slim",
        ("--time-limit", "-3"): "--time-limit must be at least 0",
        ("--save-every", "-3"): "--save-every must be at least 0",
    }.items():
        assert study(base, tmp_path / "study", *options) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "study").exists()
