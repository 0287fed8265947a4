"""Real studies of a tiny GPT: fair, resumed without redoing anything, merged, and told as they are."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prunus.cli import main
from prunus.lab.report.read import read_record
from prunus.lab.run import Run
from prunus.lab.study.folder import Folder, read_json
from prunus.lab.study.masks import jaccard, save_masks
from prunus.lab.study.merge import merge
from prunus.lab.study.page import page
from prunus.lab.study.plan import make_plan
from prunus.lab.study.results import summary
from prunus.lab.study.runner import Options, Worker, estimate
from prunus.lab.study.table import cells_of
from prunus.lab.trainer import train

BASE = """model = "gpt2-tiny"
data = "{data}"
context = 8
batch = 2
steps = 4
begin = 2
end = 4
every = 2
eval_every = 4
eval_size = 2
warmup = 2
log_every = 3
"""
ASKED = ("--scores", "bitter7,bitter1", "--sparsity", "0.5", "--seeds", "2")
ARMS = ["dense", "random", "magnitude", "bitter7", "bitter1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    letters = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_bytes(bytes(letters))
    (folder / "run.toml").write_text(BASE.format(data=folder / "text.txt"))
    return folder / "run.toml"


def study(base: Path, out: Path, *options: object) -> int:
    """Exit code of the command."""
    try:
        main(["study", "--base", str(base), "--out", str(out), "--devices", "cpu", *map(str, options)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def done(base, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("done") / "study"
    assert study(base, out, *ASKED) == 0
    return out


@pytest.fixture
def copy(done, tmp_path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "study"))


def stamps(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}


def rows(out: Path) -> dict[str, dict]:
    return {row["arm"]: row for row in read_json(out / "study_result.json")["rows"]}


def losses(out: Path) -> dict[str, float]:
    return {path.parent.name: read_json(path)["loss"] for path in out.glob("runs/*/result.json")}


def paths(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and sparsities of the events of each run, as a report reads them."""
    records = {path.parent.name: read_record(path.parent) for path in out.glob("runs/*/run.json")}
    return {name: [(e["step"], e["sparsity"]) for e in record.events] for name, record in records.items()}


def test_each_computation_is_run_once_and_small(done):
    names = {f"{arm}-s{seed}" for arm in ("dense-0", "random-0.5", "magnitude-0.5", "bitter7-0.5") for seed in (0, 1)}
    assert set(stamps(done)) == names  # bitter1 is magnitude
    assert not list(done.glob("runs/*/checkpoint.pt"))
    assert {path.parent.name for path in done.glob("runs/*/masks.safetensors")} == {
        n for n in names if "dense" not in n
    }


def test_rows_are_the_results_of_ordinary_runs(done, base, tmp_path):
    found = rows(done)
    assert list(found) == ARMS
    alone = train(
        replace(Folder(done).plan().base, score="bitter7", sparsity=0.5, seed=1, out=tmp_path / "run", device="cpu")
    )
    assert found["bitter7"]["values"][1] == pytest.approx(alone.perplexity, rel=1e-12)
    assert found["bitter7"]["measured_sparsity"] == 0.5
    assert found["dense"]["measured_sparsity"] == 0.0
    assert found["bitter1"]["same_as"] == "magnitude"
    assert found["bitter1"]["values"] == found["magnitude"]["values"]
    assert found["bitter1"]["overlap"] == found["magnitude"]["overlap"] == 1.0
    assert 0.3 < found["random"]["overlap"] < 0.37  # two random halves share a third
    assert found["bitter7"]["difference"]["num_seeds"] == 2
    assert found["bitter7"]["cost"]["mean"] == pytest.approx(found["bitter7"]["mean"] - found["dense"]["mean"])


def test_arms_differ_in_what_is_named_and_in_nothing_else(done):
    seen = {}
    for path in done.glob("runs/*-s0/run.json"):
        run = {**read_json(path)["run"], "out": ""}
        seen[path.parent.name] = run
    dense = seen.pop("dense-0-s0")
    for run in seen.values():
        assert {name for name in run if run[name] != dense[name]} == {"score", "sparsity"}


def test_the_same_command_again_redoes_nothing(copy, base):
    before = stamps(copy)
    assert study(base, copy, *ASKED) == 0
    assert stamps(copy) == before
    assert study(base, copy, "--scores", "bitter3", "--seeds", "1") == 0  # an arm more
    assert set(stamps(copy)) - set(before) == {"bitter3-0.5-s0"}
    assert {name: stamps(copy)[name] for name in before} == before


def test_a_folder_alone_is_continued(copy, capsys):
    shutil.rmtree(copy / "runs" / "bitter7-0.5-s1")
    before = stamps(copy)
    main(["study", "--out", str(copy), "--devices", "cpu", "--keep-checkpoints"])
    assert set(stamps(copy)) - set(before) == {"bitter7-0.5-s1"}
    assert [path.parent.name for path in copy.glob("runs/*/checkpoint.pt")] == ["bitter7-0.5-s1"]
    assert "8 of 8 runs" in capsys.readouterr().out


KILLED = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
calls = []
def hook(*_):
    calls.append(1)
    if len(calls) == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(hook)
from prunus.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_study_killed_and_started_again_equals_the_unbroken_one(save_every, done, base, tmp_path):
    out = tmp_path / "study"
    asked = (*ASKED, "--seeds", 2 - save_every, "--save-every", save_every)
    options = ["--base", base, "--out", out, *asked]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", KILLED.format(step=9), "study", *map(str, options)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert killed.returncode == -9, killed.stderr
    before = stamps(out)
    assert set(before) == {"dense-0-s0", "random-0.5-s0"}  # 4 and 3 steps; it died in the third run
    assert study(base, out, *asked) == 0
    assert {name: stamps(out)[name] for name in before} == before
    assert losses(out) == {name: loss for name, loss in losses(done).items() if name in losses(out)}
    assert read_json(out / "study_result.json")["num_finished"] == (4 if save_every else 8)
    assert not list(out.glob("runs/*/checkpoint.pt"))
    lines = (out / "runs" / "magnitude-0.5-s0" / "metrics.jsonl").read_text()
    assert lines.count('"eval"') == 1


def test_failures_are_told_and_tried_again_and_stop_nobody(copy, base, capsys):
    bad = ["--arm", "sgd: score=bitter7 optimizer=sgd", "--arm", "huge: score=none optimizer=sgd lr=1e30 clip=0"]
    before = stamps(copy)
    assert study(base, copy, *ASKED[2:4], "--seeds", "1", *bad, "--scores", "bitter3") == 1
    said = {entry["arm"]: entry["message"] for entry in read_json(copy / "study_result.json")["failed"]}
    assert set(said) == {"sgd", "huge"}
    assert "exp_avg_sq" in said["sgd"]
    assert "loss is nan" in said["huge"]
    assert "failed: sgd at 0.5, seed 0" in capsys.readouterr().out
    assert "bitter3-0.5-s0" in stamps(copy)
    assert not {"sgd", "huge"} & set(rows(copy))
    first = read_json(copy / "runs" / "sgd-0.5-s0" / "failed.json")
    assert study(base, copy, *ASKED[2:4], "--seeds", "1", *bad) == 1
    assert read_json(copy / "runs" / "sgd-0.5-s0" / "failed.json")["session"] != first["session"]
    assert {name: stamps(copy)[name] for name in before} == before


def test_a_failure_is_not_tried_twice_in_one_session(copy, base):
    folder, session = Folder(copy), Options(device="cpu", session="now")
    arms = [*folder.plan().arms]
    plan = make_plan(
        folder.plan().base, [*arms, replace(arms[0], name="bad", changes={"optimizer": "sgd"})], (0.5,), (0,)
    )
    folder.join(plan, {})
    said = []
    for _ in range(2):
        Worker(folder, session, Quiet(said)).work(plan.cells)
    assert len(said) == 1


class Quiet:
    """Takes notes."""

    def __init__(self, lines: list) -> None:
        self.lines = lines

    def running(self, title, run):
        return contextlib.nullcontext(lambda step, values: None)

    def done(self, line, values):
        self.lines.append(line)


CHANGED = {
    "base": (("--set", "lr=2e-3"), "has lr = 0.001, not 0.002"),
    "budget": (("--set", "steps=7"), "has steps = 4, not 7"),
    "arm": (("--arm", "bitter7: score=bitter7 end=3"), "two arms are called bitter7"),
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
    assert "was run with lr = 0.5, the study has 0.001" in capsys.readouterr().err


def test_quality_off_the_target_does_not_count(copy):
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text(json.dumps(read_json(path) | {"sparsity": 0.14}))
    found = summary(Folder(copy), Folder(copy).plan())
    assert next(row for row in found["rows"] if row["arm"] == "bitter7")["seeds"] == [1]
    assert "14.0000% of the prunable weights are zero" in found["off_target"][0]["message"]


def test_a_longer_budget_is_told(copy, base, capsys):
    assert study(base, copy, "--arm", "longer: score=bitter7 budget_scale=1.5", "--seeds", "1") == 0
    assert rows(copy)["longer"]["tokens"] == 1.5 * rows(copy)["dense"]["tokens"]
    assert "; 1.5 times the tokens)" in capsys.readouterr().out.replace("\n", " ")
    assert rows(copy)["longer"]["beside"] == []


def test_workers_share_the_runs(done, base, tmp_path):
    out = tmp_path / "study"
    assert study(base, out, *ASKED, "--seeds", "1", "--devices", "cpu,cpu") == 0
    assert losses(out) == {name: loss for name, loss in losses(done).items() if name.endswith("s0")}
    assert read_json(out / "study_result.json")["num_finished"] == 4


def test_workers_end_with_the_command_that_started_them(base, tmp_path):
    out = tmp_path / "study"
    options = ["--base", base, "--out", out, "--seeds", "1", "--set", "steps=5000", "--devices", "cpu,cpu"]
    command = [sys.executable, "-c", "import sys; from prunus.cli import main; main(sys.argv[1:])", "study"]
    parent = subprocess.Popen([*command, *map(str, options)], stderr=subprocess.PIPE, text=True)
    started = [out / "runs" / name / "metrics.jsonl" for name in ("dense-0-s0", "random-0.5-s0")]
    assert eventually(lambda: all(path.exists() for path in started))
    parent.kill()
    parent.wait()
    for path in started:
        assert eventually(lambda name=path.parent.name: is_free(Folder(out), name))


def eventually(holds) -> bool:
    """Whether it comes true within two minutes."""
    for _ in range(1200):
        if holds():
            return True
        time.sleep(0.1)
    return False


def is_free(folder: Folder, name: str) -> bool:
    with folder.locked(name) as free:
        return free


def test_a_run_that_another_holds_is_left_to_it(copy):
    folder = Folder(copy)
    shutil.rmtree(copy / "runs" / "bitter7-0.5-s1")
    with folder.locked("bitter7-0.5-s1") as free:
        assert free
        Worker(folder, Options(device="cpu"), Quiet([])).work(folder.plan().cells)
        assert "bitter7-0.5-s1" not in stamps(copy)


def test_no_run_is_begun_that_would_not_end_in_time(copy, base):
    shutil.rmtree(copy / "runs" / "bitter7-0.5-s1")
    assert study(base, copy, *ASKED, "--time-limit", "1") == 0  # the slack alone is more
    assert "bitter7-0.5-s1" not in stamps(copy)
    assert study(base, copy, *ASKED, "--time-limit", "1000") == 0
    assert "bitter7-0.5-s1" in stamps(copy)


def test_the_estimate_is_the_longest_run_scaled_by_its_budget(copy):
    folder = Folder(copy)
    notes = [read_json(path) for path in copy.glob("runs/*/cell.json")]
    run = Run(batch=notes[0]["examples"], steps=2)
    longest = max(note["wall_seconds"] for note in notes if not note["cold"])
    assert estimate(folder, run, cold=False) == pytest.approx(1.05 * 2 * longest + 2)
    shutil.rmtree(copy / "runs")
    assert estimate(folder, run, cold=False) is None


def split(done: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The same study as two machines would have it that each did some of the runs."""
    parts = []
    for seed in (0, 1):
        parts.append(Path(shutil.copytree(done, tmp_path / f"machine{seed}")))
        for run in parts[-1].glob(f"runs/*-s{1 - seed}"):
            shutil.rmtree(run)
    return parts[0], parts[1]


def test_parts_merge_to_the_whole(done, tmp_path):
    merge(split(done, tmp_path), tmp_path / "whole")
    assert losses(tmp_path / "whole") == losses(done)
    assert rows(tmp_path / "whole") == rows(done)
    assert read_json(tmp_path / "whole" / "study.json")["hash"] == read_json(done / "study.json")["hash"]


def test_doubled_runs_must_agree_and_studies_be_alike(done, copy, base, tmp_path):
    assert merge([done, copy], tmp_path / "same")["num_finished"] == 8
    path = copy / "runs" / "bitter7-0.5-s0" / "result.json"
    path.write_text(json.dumps(read_json(path) | {"loss": 1.0}))
    with pytest.raises(ValueError, match=r"are the same run but ended with loss .* and 1\.0"):
        merge([done, copy], tmp_path / "other")
    plan = Folder(done).plan()
    Folder(tmp_path / "b").write(replace(plan, base=replace(plan.base, lr=0.5)), {})
    with pytest.raises(ValueError, match=r"has lr = 0\.001, not 0\.5"):
        merge([done, tmp_path / "b"], tmp_path / "other")
    with pytest.raises(ValueError, match="not empty"):
        merge([done], tmp_path / "same")
    assert not (tmp_path / "other").exists()


def test_a_slim_copy_says_the_same_and_is_continued(copy, base, tmp_path):
    slim = tmp_path / "slim"
    main(["study", "merge", str(copy), "--out", str(slim), "--slim"])
    assert rows(slim) == rows(copy)
    assert not list(slim.rglob("*.safetensors"))
    assert str(copy.parent) not in "".join(path.read_text() for path in slim.rglob("*.json*"))
    assert paths(slim) == paths(copy) and all(paths(slim)[name] for name in paths(slim) if "dense" not in name)
    before = stamps(slim)
    assert study(base, slim, *ASKED) == 0
    assert stamps(slim) == before
    assert rows(slim)["random"]["overlap"] == rows(copy)["random"]["overlap"]


def test_the_page_is_made_of_the_rows(copy):
    (copy / "notes.md").write_text("A remark.")
    text = page([copy])
    row = rows(copy)["bitter7"]
    assert f"| {row['mean']:.2f} ± {row['sd']:.2f} |" in text
    assert row["verdict"] in text
    assert "A remark." in text
    assert "the same computation as magnitude" in text
    assert ", score " not in text  # every arm has its own
    assert text.count("---: | --- |\n") == 1  # verdicts are words
    with pytest.raises(ValueError, match="name the studies"):
        page([])


def test_a_dry_run_writes_nothing(base, tmp_path, capsys):
    assert study(base, tmp_path / "study", *ASKED, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "magnitude, bitter1" in said
    assert "left to do: 64 examples = 512 tokens" in said
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_overlap_is_the_jaccard_index_of_what_was_pruned(numel, tmp_path):
    keep = [{"a": torch.rand(numel) < 0.5, "b": torch.rand(3, 5) < 0.4} for _ in range(2)]
    folders = []
    for number, masks in enumerate(keep):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        save_masks(folders[-1], masks)
    first, second = (torch.cat([~mask.flatten() for mask in masks.values()]) for masks in keep)
    assert jaccard(*folders) == pytest.approx(int((first & second).sum()) / int((first | second).sum()))
    assert jaccard(folders[0], folders[0]) == 1.0
    assert jaccard(folders[0], tmp_path) is None
    (folders[1] / "masks.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="cannot be read"):
        jaccard(*folders)


def test_images_are_compared_by_accuracy(tmp_path):
    plan = make_plan(
        Run(model="lenet5", data="digits", steps=3, begin=1, end=2, every=1, batch=8, eval_size=16), [], (0.7,), (0,)
    )
    folder = Folder(tmp_path / "study")
    folder.join(plan, {})
    Worker(folder, Options(device="cpu"), Quiet([])).work(plan.cells)
    found = read_json(folder.path / "study_result.json")
    assert (found["metric"]["name"], found["metric"]["better"]) == ("accuracy", "higher")
    assert all(0 <= row["mean"] <= 100 for row in found["rows"])


def test_a_run_leaves_no_weights_behind(copy, monkeypatch):
    from prunus.lab.study import runner

    seen = []
    keep = runner.keep_masks

    def watched(training):
        seen.append(weakref.ref(next(training.model.parameters())))
        keep(training)

    monkeypatch.setattr(runner, "keep_masks", watched)
    shutil.rmtree(copy / "runs")
    folder = Folder(copy)
    folder.join(folder.plan(), {})
    Worker(folder, Options(device="cpu"), Quiet([])).work(folder.plan().cells[:6])
    gc.collect()
    assert len(seen) >= 3
    assert not [ref for ref in seen if ref() is not None]


def test_compiled_code_for_other_shapes_is_forgotten(copy, monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    worker, run = Worker(Folder(copy), Options(device="cpu"), Quiet([])), Run(compile=True)
    cold = []
    for each in (run, run, replace(run, batch=3), replace(run, batch=3, compile=False), replace(run, batch=3)):
        cold.append(worker._settle(each))
        worker.num_done += 1
    assert cold == [True, False, True, False, False]
    assert len(resets) == 1


def test_recipes_are_compared_with_dense_and_magnitude_of_their_own(copy, base):
    arms = ("dense fast: score=none lr=3e-3", "fast: score=bitter7 lr=3e-3", "slow: score=bitter7 lr=1e-4")
    assert study(base, copy, "--seeds", "1", *(word for arm in arms for word in ("--arm", arm))) == 0
    found = rows(copy)
    fast, slow = found["fast"], found["slow"]
    assert found["dense fast"]["against"] == "dense"
    assert fast["cost"]["mean"] == pytest.approx(fast["mean"] - found["dense fast"]["mean"])
    assert slow["cost"] is None and slow["overlap"] is None, "no run of that recipe to compare with"
    assert "(against magnitude; lr differs too)" in " ".join(cells_of(slow))
    assert found["bitter7"]["beside"] == [] and 0 < found["bitter7"]["overlap"] <= 1


def test_a_row_is_compared_where_most_of_its_seeds_are(copy, base):
    assert study(base, copy, "--arm", "fast: score=bitter7 lr=3e-3", "--seeds", "2") == 0
    assert rows(copy)["fast"]["against"] == "magnitude"
    assert study(base, copy, "--arm", "magnitude fast: score=magnitude lr=3e-3", "--seeds", "0,1") == 0
    found = rows(copy)["fast"]
    assert (found["against"], found["difference"]["num_seeds"], found["beside"]) == ("magnitude fast", 2, [])
    assert rows(copy)["magnitude fast"]["overlap"] == 1.0


def test_an_overlap_with_another_recipe_is_not_shown(copy, base):
    assert study(base, copy, "--arm", "fast: score=bitter7 lr=3e-3", "--seeds", "1") == 0
    noted = copy / "runs" / "fast-0.5-s0" / "cell.json"
    noted.write_text(json.dumps(read_json(noted) | {"overlap": 0.4}))  # as older versions did, with magnitude's
    assert summary(Folder(copy), Folder(copy).plan())["rows"][-1]["overlap"] is None
    assert study(base, copy, "--arm", "magnitude fast: score=magnitude lr=3e-3", "--seeds", "1") == 0
    found = read_json(noted)
    assert found["overlap_with"] == "magnitude fast" and found["overlap"] == rows(copy)["fast"]["overlap"] != 0.4


def test_a_preset_without_data_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["study", "--preset", "lenet-mnist", "--out", str(tmp_path / "study")])
    assert "the preset lenet-mnist needs --data: the folder of MNIST" in capsys.readouterr().err


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
        ("paint",): "expected merge, show, page or options alone",
        ("--preset", "eps"): "give one of them",
        ("merge", "x"): "study merge does not read --base",
        ("--slim",): "a study does not read --slim",
    }.items():
        assert study(base, tmp_path / "study", *options) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "study").exists()
