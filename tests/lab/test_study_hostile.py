"""Whatever the files of a study hold, every reader reads it or refuses it in one line, soon and in little memory."""

import contextlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prunus.files.json_file import read_json
from prunus.lab.report import page as report_page
from prunus.lab.report.cells import read_source
from prunus.lab.report.page import render
from prunus.lab.run import Run
from prunus.lab.study.arms import read_base
from prunus.lab.study.merge import merge
from prunus.lab.study.results import summary
from prunus.lab.study.runner import estimate, num_shared
from prunus.lab.study.study_folder import Folder, jaccard
from prunus.lab.study.tables import page

DEEP = {"DEEP": "[" * 100_000 + "]" * 100_000, "LESS DEEP": "[" * 700 + "]" * 700}
VALUES = [None, True, -1, 0, 0.5, 10**400, 1e300, "", "x", "../x", "\x1b[2J", [], [[]], [None], {}, {"a": {"b": []}}]
VALUES += [*DEEP, "\ud800", "9" * 5000, 1e-320, -(10**30), float("nan"), float("inf")]


def readers(study, out):
    """What is done with the folder of a study, short of running it."""
    folder = Folder(study)

    return {
        "show": lambda: summary(folder, folder.plan()),
        "page": lambda: page([study]),
        "merge": lambda: merge([study], out, slim=len(study.name) % 2 == 0),
        "report": lambda: render(read_source(study)),
        "report of runs": lambda: render(read_source(study / "runs")),
        "report of a run": lambda: render(read_source(study / "runs" / "bitter7-0.5-s0")),
        "estimate": lambda: estimate(folder, Run(), cold=False),
    }


def mutated(value, draw):
    """The value with something in it replaced or left out; often deep inside."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        changed = value.copy()
        if draw.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutated(value[key], draw)
        return changed
    return draw.choice(VALUES)


def mutate(path, draw):
    """Change a file of JSON, or cut it short."""
    text = path.read_text()
    if draw.random() < 0.1:
        path.write_text(text[: draw.randrange(len(text))])
        return
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    place = draw.randrange(len(lines))
    lines[place] = json.dumps(mutated(json.loads(lines[place]), draw))
    for name, nested in DEEP.items():
        lines[place] = lines[place].replace(f'"{name}"', nested)
    path.write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "slim"])
def test_a_changed_file_is_read_or_refused(kind, studies, tmp_path, monkeypatch):
    """By every reader, on a copy with one file changed for each seed."""
    study, (template, fixed) = studies / kind, report_page._template(has_charts=True)
    small = template, fixed | {"scripts": []}  # without four megabytes that no field is in
    monkeypatch.setattr(report_page, "_template", lambda has_charts: small)
    files = [path.relative_to(study) for path in sorted(study.rglob("*.json*"))]
    for seed in range(120):
        draw, copy = random.Random(seed), tmp_path / f"copy{seed}"
        shutil.copytree(study, copy)
        name = draw.choice(files)
        mutate(copy / name, draw)
        for reader, read in readers(copy, tmp_path / "out").items():
            try:
                read()
            except (ValueError, OSError):
                pass
            except Exception as error:
                raise AssertionError(f"{reader} of {name}, seed {seed}: {error!r}") from error
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(copy)


@pytest.fixture(scope="module")
def studies(done, tmp_path_factory):
    """A study in folders, of which one run failed, and the same as one file."""
    folder = tmp_path_factory.mktemp("studies")
    shutil.copytree(done, folder / "whole")
    failed = folder / "whole" / "runs" / "random-0.5-s1"
    (failed / "result.json").unlink()
    (failed / "failed.json").write_text('{"message": "no memory", "session": "1", "when": "today"}')
    merge([folder / "whole"], folder / "slim", slim=True)
    return folder


def test_a_comparison_of_compile_is_read_or_refused(tmp_path):
    path = tmp_path / "compile.json"
    text = (Path("studies") / "gpt2-124m-compile" / "compile.json").read_text()
    for seed in range(100):
        path.write_text(text)
        mutate(path, random.Random(seed))
        with contextlib.suppress(ValueError, OSError):
            page([tmp_path])


LINKS = ["study.json", "notes.md", "runs.jsonl", "runs", "runs/bitter7-0.5-s0", "runs/bitter7-0.5-s0/masks.safetensors"]


@pytest.mark.parametrize("name", LINKS)
def test_merging_refuses_a_link_out_of_the_study(name, copy, tmp_path):
    elsewhere, path = tmp_path / "elsewhere", copy / name
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("a secret")
    path.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"is a link out of the study, to .*elsewhere"):
        merge([copy], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_merging_takes_a_link_that_stays_inside_and_a_study_behind_a_link(copy, tmp_path):
    run = copy / "runs" / "bitter7-0.5-s0"
    (run / "metrics.jsonl").rename(copy / "curve.jsonl")
    (run / "metrics.jsonl").symlink_to(copy / "curve.jsonl")
    (tmp_path / "name").symlink_to(copy)
    merge([tmp_path / "name"], tmp_path / "out")
    copied = tmp_path / "out" / "runs" / run.name / "metrics.jsonl"
    assert copied.read_text() == (copy / "curve.jsonl").read_text() and not copied.is_symlink()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch", 10**12, "batch must be at most 1,048,576"),
        ("context", 2**40, "context must be at most 1,048,576"),
        ("vocab_size", 10**9, "vocab_size must be at most 1,048,576"),
        ("steps", 10**30, "steps cannot be 1000"),
        ("lr", "fast", "lr cannot be 'fast'; it takes float"),
        ("track", [1], r"track cannot be \[1\]"),
        ("model", ["gpt2"], "model cannot be"),
    ],
)
def test_an_absurd_field_of_a_plan_is_named(field, value, words, copy):
    values = read_json(copy / "study.json")
    values["base"][field] = value
    (copy / "study.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"study.json cannot be read: .*{words}"):
        Folder(copy).plan()


@pytest.mark.parametrize("name", ["study.json", "runs/bitter7-0.5-s0/metrics.jsonl", "runs/bitter7-0.5-s0/cell.json"])
def test_deep_nesting_below_the_limit_of_the_parser_is_refused(name, copy, tmp_path):
    line = (copy / name).read_text().splitlines()[-1] if name.endswith("l") else (copy / name).read_text()
    nested = {"environment": "LESS DEEP", "eval": "LESS DEEP"}
    (copy / name).write_text(json.dumps(json.loads(line) | nested).replace('"LESS DEEP"', DEEP["LESS DEEP"]))
    with pytest.raises(ValueError, match="nested too deep"):
        merge([copy], tmp_path / "out", slim=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "steps = 1e", "lr = {a = {b = 1}}", "arm = 3", "\x00"])
def test_a_hostile_base_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=r"run\.toml") as refused:
        read_base(tmp_path / "run.toml")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_masks_of_another_shape_or_kind_are_refused(tmp_path):
    for name, masks, header in (
        ("short", {"w": np.zeros(3, np.uint8)}, {"w": "5x8"}),
        ("floats", {"w": np.zeros(5, np.float32)}, {"w": "5x8"}),
        ("no shapes", {"w": np.zeros(5, np.uint8)}, None),
        ("words", {"w": np.zeros(5, np.uint8)}, {"w": "five"}),
        ("no bits", {}, {"w": "5x8"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_file(masks, folder / "masks.safetensors", header)
        with pytest.raises(ValueError, match="cannot be read"):
            jaccard(folder, folder)


def test_a_run_of_a_million_million_steps_is_planned_at_once():
    run = Run(steps=10**12, eval_every=10**12, begin=0.9, end=0.95)
    assert num_shared(run) == 9 * 10**11 - 1
    assert num_shared(replace(run, begin=0, every=7)) == 6
