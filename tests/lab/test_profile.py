"""A profile's parts add up to what was measured, it changes nothing that is computed, and its advice follows."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from covering import quickly
from profile_runs import small

from prunus.cli import main
from prunus.cli.profile import advice, memory_rows, summary, time_rows
from prunus.lab.profile import memory_use as profile_memory
from prunus.lab.profile.measure import (
    Compiled,
    StepProfile,
    Window,
    _in_a_process,
    compare_compile,
    compared,
    measure,
    sentences,
)
from prunus.lab.profile.memory_use import Memory, measured_memory, steady_bytes
from prunus.lab.profile.step_parts import PARTS, instrument
from prunus.lab.profile.trace import Split
from prunus.lab.run import Run
from prunus.lab.study.tables import page
from prunus.lab.trainer import Training

pytestmark = pytest.mark.usefixtures("few_weights")
RUNS = {
    "hooks": {},
    "adamwprune": {"optimizer": "adamwprune", "spam": True, "score": "movement"},
    "regrow": {"regrow": 0.2, "regrow_by": "gradient", "allocate": "row"},
    "wanda, every step, accumulated": {"score": "wanda", "every": 1, "accumulate": 2},
    "constant": {"schedule": "constant"},
    "dense": {"score": "none", "clip": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(RUNS, "hooks", "adamwprune"))
def test_parts_and_categories_add_up_to_what_was_measured(name, text):
    run = small(text, **RUNS[name])
    profile = measure(run, Window(2, 2))
    for split in [profile.step] + ([profile.event] if profile.event else []):
        assert sum(split.host.values()) == pytest.approx(split.seconds, rel=1e-9)
        assert set(split.host) <= set(PARTS) and split.device is None
    assert {"data", "forward", "backward", "optimizer"} <= set(profile.step.host)
    assert ("clipping" in profile.step.host) == (run.clip > 0 and run.optimizer == "adamw")
    assert ("gradient masking" in profile.step.host) == (run.score != "none" and run.optimizer == "adamw")
    assert (profile.event is not None) == (run.score != "none")
    assert "event" not in profile.step.host
    memory = profile.memory
    assert memory.peak["activations"] > 0 and sum(memory.peak.values()) > sum(memory.steady.values())
    if profile.event:
        assert memory.event["event scratch"] > 0 and memory.event["gradients"] == memory.steady["weights"]
    restored = json.loads(json.dumps(profile.to_json()))
    assert Run.from_json(restored["run"]) == run
    assert time_rows(profile.step)[-1][0] == memory_rows(profile)[-1][0] == "in all"
    assert summary(profile) and advice(profile)


def test_categories_are_the_bytes_of_the_tensors(text):
    training = Training(small(text, optimizer="adamwprune", schedule="constant"))
    training.train_step()
    numel = sum(p.numel() for p in training.model.parameters())
    prunable = sum(mask.numel() for mask in training.pruner.masks.values())
    found = steady_bytes(training)
    assert found["weights"] == 4 * numel and found["masks"] == prunable // 8
    assert found["moments"] == 8 * numel + 4 * len(list(training.model.parameters()))


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamwprune"}], ids=str)
def test_an_instrumented_training_computes_what_it_did(options, text):
    plain, seen = (Training(small(text, begin=1, end=9, every=2, **options)) for _ in range(2))
    instrument(seen)
    for _ in range(6):
        assert plain.train_step()[0] == seen.train_step()[0]
    assert plain.pruner.digest() == seen.pruner.digest()
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), seen.model.parameters(), strict=True))


def test_the_allocators_moments_add_up_to_its_highest(text, monkeypatch):
    """A stand-in for the GPU's allocator: the highest memory is reached when half of the gradients are there."""
    training = Training(small(text, begin=0.0, every=1))
    training.train_step()
    instrument(training)
    sizes = [4 * p.numel() for p in training.model.parameters()]
    calls = {"num": 0}

    def highest(_):
        calls["num"] += 1
        return 10**9 + (500 if calls["num"] == 6 else 0)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", highest)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(profile_memory, "_by_trace", profile_memory._by_allocator)
    found = measured_memory(training, lambda: None)
    assert sum(found.peak.values()) == 10**9 + 500 and found.part == "backward"
    assert 0 < found.peak["gradients"] < sum(sizes)
    assert sum(found.event.values()) == 10**9 and found.event["gradients"] == sum(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"optimizer": "adamwprune"}, {"precision": "bfloat16"}], ids=str)
def test_on_a_gpu_both_sides_add_up_and_memory_is_the_allocators(options, text):
    profile = measure(small(text, device="cuda", batch=16, context=128, **options), Window(3, 4))
    for split in (profile.step, profile.event):
        assert sum(split.host.values()) == pytest.approx(split.seconds, rel=1e-6)
        assert sum(split.device.values()) == pytest.approx(split.seconds, rel=1e-6)
    assert 0 < profile.busy <= 1 and profile.step.device["backward"] > 0
    assert profile.memory.limits["reserved"] >= sum(profile.memory.peak.values())
    assert profile.memory.peak["activations"] > 0 and profile.memory.steady["rest"] >= 0
    assert {"weights", "moments", "masks"} <= set(profile.memory.steady)


SPLIT = Split(1.0, {"forward": 0.5, "other": 0.5}, {"forward": 0.9, "idle": 0.1})
ON_CPU = Split(1.0, {"forward": 0.5, "other": 0.5}, None)
MEMORY = Memory({"weights": 10, "rest": 0}, {"weights": 10, "activations": 60}, None, "backward", "", {"device": 100})
STARTUP = {"build": 1.0, "first step": 1.0}
BASE = StepProfile(
    Run(precision="bfloat16", every=50), "cuda:0", 1.0, 1.0, 1.0, SPLIT, None, None, MEMORY, 0.9, STARTUP, 1.0, None
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Nothing stands out"),
        ({"step": Split(1.0, {"other": 1.0}, {"forward": 0.5, "idle": 0.5})}, "waits for the host 50%"),
        ({"step": Split(1.0, {"data": 0.2, "other": 0.8}, {"forward": 1.0, "idle": 0.0})}, "making batches"),
        ({"step": Split(1.0, {"other": 1.0}, {"gradient masking": 0.1, "forward": 0.9})}, "adamwprune"),
        ({"event_seconds": 2.0}, "Events take 3.8% of the time: with --every 100 2.0%."),
        ({"run": Run()}, "bfloat16"),
        ({"device": "cpu", "step": ON_CPU}, "CPU thread"),
        ({"compiled": Compiled(1, 0, 3)}, "3 recompiles"),
        ({"memory": replace(MEMORY, limits={"device": 1000})}, "--batch 32 fits"),
        ({"memory": replace(MEMORY, limits={"device": 71})}, "--batch 8 --accumulate 2"),
        ({"memory": replace(MEMORY, event={"weights": 10, "event scratch": 90})}, "peak is in the event"),
    ],
    ids=str,
)
def test_advice_follows_from_the_figures(changes, said):
    lines = advice(replace(BASE, **changes))
    assert any(said in line for line in lines)
    assert ("Nothing stands out" in lines[0]) == (not changes)
    if changes:
        assert not any(said in line for line in advice(BASE))


@pytest.mark.parametrize(
    ("every", "seconds", "event", "share"),
    [(1, 1.0, 1.0, 1 / 2), (1, 0.04, 0.06, 0.6), (2, 1.0, 1.0, 1 / 3), (3, 1.0, 6.0, 2 / 3), (50, 1.0, 50.0, 1 / 2)],
)
def test_events_share_the_time_with_the_steps_between_them(every, seconds, event, share):
    profile = replace(BASE, run=Run(every=every), seconds=seconds, event_seconds=event)
    assert profile.event_share == pytest.approx(share)
    often = "at every step of the ramp" if every == 1 else f"once in {every} steps of the ramp"
    said = " ".join(summary(profile))
    assert f"{often}: {share:.2%} of the time" in said and "A step without an event takes" in said


@pytest.mark.parametrize("schedule", ["constant", "one_shot"])
def test_a_single_event_is_one_in_the_whole_run(schedule):
    profile = replace(BASE, run=Run(every=1, steps=9, schedule=schedule), event_seconds=1.0)
    assert profile.event_share == pytest.approx(1 / 10)
    assert "once in the run: 10.00%" in " ".join(summary(profile))
    assert not any("--every" in line for line in advice(profile))


def test_without_events_there_is_no_share():
    assert BASE.event_share == 0 and summary(BASE)[0].startswith("A step takes")


def arm(seconds, peak, startup, loss, graphs=None):
    counted = graphs and {"graphs": graphs, "graph_breaks": 0, "recompiles": None}
    memory = {"peak": {"weights": peak}}
    return {"seconds": seconds, "memory": memory, "startup": {"build": startup}, "loss": loss, "compiled": counted}


def test_a_comparison_says_what_compile_does():
    figures = compared(arm(0.2, 2**20, 1.0, 3.5), arm(0.1, 2**19, 21.0, 3.5001, 2))
    assert figures["speed_up"] == pytest.approx(2) and figures["peak_ratio"] == pytest.approx(0.5)
    assert figures["pays_after_steps"] == pytest.approx(200)
    words = " ".join(sentences(figures))
    assert (
        "2.00 times" in words and "0.50 times" in words and "after 200 steps" in words and "unknown recompiles" in words
    )
    assert "never pays" in " ".join(sentences(compared(arm(0.1, 1, 1.0, 1.0), arm(0.2, 1, 2.0, 1.0, 1))))


def test_arms_are_equal_in_all_but_compile(text, tmp_path, monkeypatch, capsys):
    runs = []

    def measured(run, window):
        runs.append(run)
        return arm(0.1, 10, 1.0, 2.0, 1)

    monkeypatch.setattr("prunus.lab.profile.measure._in_a_process", measured)
    main(["profile", "--compare", "compile", "--data", text, "--batch", "3", "--out", str(tmp_path)])
    assert [run.compile for run in runs] == [False, True] and replace(runs[1], compile=False) == runs[0]
    assert runs[0].batch == 3 and "Throughput" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "compile.json").read_text())["says"]) == 5


@pytest.mark.slow
def test_an_arm_is_measured_in_a_fresh_process_and_has_a_place_on_the_page(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes a minute; what is tested is all around it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = small(text, compile=True, score="none")
    found = _in_a_process(run, Window(1, 1))
    assert Run.from_json(found["run"]) == run and found["compiled"]["graphs"] == 0
    assert found["environment"]["command"] == sys.argv[1:]
    (tmp_path / "compile.json").write_text(
        json.dumps({"says": ["A word."], "arms": {"eager": found, "compile": found}})
    )
    section = page([tmp_path])
    assert f"| ms a step | {1e3 * found['seconds']:.2f} | {1e3 * found['seconds']:.2f} |" in section
    assert f"## {tmp_path.name}" in section and "A word." in section


def test_an_arm_that_fails_says_why_in_one_line(text, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nValueError: no memory\n")
    monkeypatch.setattr("prunus.lab.profile.measure.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"arm eager failed: ValueError: no memory"):
        compare_compile(small(text), Window(1, 1))


def test_the_command_writes_its_file_once_and_prints_tables(text, tmp_path, capsys):
    options = ["--model", "gpt2-tiny", "--context", "16", "--batch", "2", "--data", text, "--device", "cpu"]
    command = ["profile", *options, "--steps-before", "1", "--steps-to-measure", "1", "--out", str(tmp_path / "p")]
    main(command)
    out = capsys.readouterr().out
    assert "one step, on cpu" in out and "event scratch" in out and "profile.json: written" in out
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["seconds"] > 0
    with pytest.raises(SystemExit):
        main(command)
    assert "there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--resume"], "resume"),
        (["--track", "wandb"], "track"),
        (["--eval-every", "7"], "--eval-every"),
        (["--save-every", "7"], "--save-every"),
        (["--steps-to-measure", "0"], "at least 1"),
        (["--sparsity", "2"], "sparsity"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["profile", *options, "--out", str(tmp_path / "p")])
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert text in said and "\n" not in said and not (tmp_path / "p").exists()
