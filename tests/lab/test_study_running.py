"""A study runs each computation once, alike in all that is not named, and goes on where it was killed or failed."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from report_pages import page_of
from study_command import ASKED, Quiet, losses, rows, stamps, study

from prunus.cli import main
from prunus.files.json_file import read_json
from prunus.lab.run import Run
from prunus.lab.study.arms import Arm, read_base
from prunus.lab.study.runner import Options, Worker, estimate
from prunus.lab.study.study_folder import Folder
from prunus.lab.study.study_plan import make_plan
from prunus.lab.study.tables import page


def test_each_computation_is_run_once_and_small(done):
    names = {f"{arm}-s{seed}" for arm in ("dense-0", "random-0.5", "magnitude-0.5", "bitter7-0.5") for seed in (0, 1)}
    assert set(stamps(done)) == names  # bitter1 is magnitude
    assert not list(done.glob("runs/*/checkpoint.pt"))
    assert {path.parent.name for path in done.glob("runs/*/masks.safetensors")} == {
        n for n in names if "dense" not in n
    }


def test_arms_differ_in_what_is_named_and_in_nothing_else(done):
    seen = {}
    for path in done.glob("runs/*-s0/run.json"):
        run = {**read_json(path)["run"], "out": ""}
        seen[path.parent.name] = run
    dense = seen.pop("dense-0-s0")
    for run in seen.values():
        assert {name for name in run if run[name] != dense[name]} == {"score", "sparsity"}


def test_a_dry_run_writes_nothing(base, tmp_path, capsys):
    assert study(base, tmp_path / "study", *ASKED, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "magnitude, bitter1" in said
    assert "left to do: 64 examples = 512 tokens" in said
    assert not (tmp_path / "study").exists()


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


@pytest.fixture(scope="module")
def unbroken(base, tmp_path_factory):
    """The losses of the study that other processes run too, with all the weights of its model."""
    out = tmp_path_factory.mktemp("unbroken") / "study"
    assert study(base, out, *ASKED) == 0
    return losses(out)


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [0, 1])
def test_a_study_killed_and_started_again_equals_the_unbroken_one(save_every, unbroken, base, tmp_path):
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
    assert losses(out) == {name: loss for name, loss in unbroken.items() if name in losses(out)}
    assert read_json(out / "study_result.json")["num_finished"] == (4 if save_every else 8)
    assert not list(out.glob("runs/*/checkpoint.pt"))
    for run in out.glob("runs/*"):  # what was trained before the end counts
        assert read_json(run / "cell.json")["wall_seconds"] >= read_json(run / "result.json")["seconds"]
    lines = (out / "runs" / "magnitude-0.5-s0" / "metrics.jsonl").read_text()
    assert lines.count('"eval"') == 1


def test_failures_are_told_and_tried_again_and_stop_nobody(copy, base, capsys):
    bad = [
        *("--arm", "huge: score=none optimizer=sgd lr=1e30 clip=0"),
        *("--arm", "lost: score=magnitude optimizer=sgd lr=1e30 clip=0"),
    ]
    before = stamps(copy)
    assert study(base, copy, *ASKED[2:4], "--seeds", "1", *bad, "--scores", "bitter3") == 1
    said = {entry["arm"]: entry["message"] for entry in read_json(copy / "study_result.json")["failed"]}
    assert set(said) == {"lost", "huge"}
    assert "loss is nan" in said["lost"]
    assert "loss is nan" in said["huge"]
    assert "failed: lost at 0.5, seed 0" in capsys.readouterr().out
    assert "bitter3-0.5-s0" in stamps(copy)
    assert not {"lost", "huge"} & set(rows(copy))
    first = read_json(copy / "runs" / "lost-0.5-s0" / "failed.json")
    assert study(base, copy, *ASKED[2:4], "--seeds", "1", *bad) == 1
    assert read_json(copy / "runs" / "lost-0.5-s0" / "failed.json")["session"] != first["session"]
    assert {name: stamps(copy)[name] for name in before} == before


def test_a_failure_is_not_tried_twice_in_one_session(copy, base):
    folder, session = Folder(copy), Options(device="cpu", session="now")
    ruin = {"score": "none", "optimizer": "sgd", "lr": 1e30, "clip": 0.0}
    arms = [*folder.plan().arms]
    plan = make_plan(folder.plan().base, [*arms, replace(arms[0], name="bad", changes=ruin)], (0.5,), (0,))
    folder.join(plan, {})
    said = []
    for _ in range(2):
        Worker(folder, session, Quiet(said)).work(plan.cells)
    assert len(said) == 1


@pytest.mark.slow
def test_workers_share_the_runs_and_their_times_say_so(unbroken, base, tmp_path):
    out = tmp_path / "study"
    assert study(base, out, *ASKED, "--seeds", "1", "--devices", "cpu,cpu") == 0
    assert losses(out) == {name: loss for name, loss in unbroken.items() if name.endswith("s0")}
    assert read_json(out / "study_result.json")["num_finished"] == 4
    runs = [read_json(path)["environment"]["command"] for path in out.glob("runs/*/run.json")]
    assert len(runs) == 4 and all(
        command == read_json(out / "study.json")["environment"]["command"] for command in runs
    )
    assert {row["at_once"] for row in rows(out).values()} == {2}
    assert ", 2 at once |" in page([out])
    assert any("Up to 2 runs shared a device" in text for text in page_of(out).texts["p"])


@pytest.mark.slow
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


def test_arms_that_are_added_at_the_same_time_are_all_there(done, base, tmp_path):
    whole = Folder(done).plan()
    plans = [make_plan(whole.base, [Arm(f"arm{i}", {"lr": 1e-3 * i})], (0.5,), (0,)) for i in range(1, 9)]
    folder, start = Folder(tmp_path / "study"), threading.Barrier(len(plans))

    def join(plan):
        start.wait()
        folder.join(plan, {})

    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(join, plans))
    assert {arm for plan in plans for arm in plan.arm} == set(folder.plan().arm)


def test_a_worker_that_dies_is_told_by_the_exit_code(base, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/bin/false")
    assert study(base, tmp_path / "study", *ASKED, "--devices", "cpu,cpu") == 1
    assert "the worker on cpu ended with code 1; run the same command again to continue" in capfd.readouterr().err


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


def test_no_run_is_begun_that_would_not_end_in_time(copy, base, capsys):
    shutil.rmtree(copy / "runs" / "bitter7-0.5-s1")
    assert study(base, copy, *ASKED, "--time-limit", "1") == 0  # the slack alone is more
    assert "bitter7-0.5-s1" not in stamps(copy)
    assert "\nruns left: 1," in capsys.readouterr().out
    assert study(base, copy, *ASKED, "--time-limit", "1000") == 0
    assert "bitter7-0.5-s1" in stamps(copy)
    assert "are left" not in capsys.readouterr().out


def test_the_estimate_is_the_longest_run_scaled_by_its_budget(copy):
    folder = Folder(copy)
    notes = [read_json(path) for path in copy.glob("runs/*/cell.json")]
    run = Run(batch=notes[0]["examples"], steps=2)
    longest = max(note["wall_seconds"] for note in notes if not note["cold"])
    assert estimate(folder, run, cold=False) == pytest.approx(1.05 * 2 * longest + 2)
    path = copy / "runs" / "bitter7-0.5-s0" / "cell.json"  # runs that shared a device are slower, and not asked for
    path.write_text(json.dumps(read_json(path) | {"at_once": 2, "wall_seconds": 1000.0}))
    assert estimate(folder, run, cold=False) <= 1.05 * 2 * longest + 2
    assert estimate(folder, run, cold=False, at_once=2) == pytest.approx(1.05 * 2 * 1000 + 2)
    assert estimate(folder, run, cold=False, at_once=3) == pytest.approx(1.05 * 2 * 1000 + 2)
    shutil.rmtree(copy / "runs")
    assert estimate(folder, run, cold=False) is None


@pytest.mark.slow
def test_a_run_leaves_no_weights_behind(copy, monkeypatch):
    from prunus.lab.study import runner

    seen, train = [], runner.train

    def watched(*args, finish, **options):
        def ended(training):
            seen.append(weakref.ref(next(training.model.parameters())))
            finish(training)

        return train(*args, finish=ended, **options)

    monkeypatch.setattr(runner, "train", watched)
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
        cold.append(worker._prepare_compiler(each))
        worker.num_done += 1
    assert cold == [True, False, True, False, False]
    assert len(resets) == 1


def test_a_reader_of_the_progress_that_leaves_is_no_failure_of_a_run(base, tmp_path):
    def unread(step, values):
        raise BrokenPipeError

    folder, show = Folder(tmp_path / "study"), Quiet([])
    show.running = lambda title, run: contextlib.nullcontext(unread)
    folder.join(make_plan(read_base(base)[0], [], [0.5], [0]), {})
    with pytest.raises(BrokenPipeError):
        Worker(folder, Options(device="cpu"), show).work(folder.plan().cells)
    assert not folder.failures()
