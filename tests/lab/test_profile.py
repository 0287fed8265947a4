"""A profile's parts add up, it changes nothing that is computed, and it measures events that have something to do."""

import json
import time
from dataclasses import replace

import pytest
import torch
from covering import quickly

from prunus import Pruner
from prunus.cli import main
from prunus.cli.profile import rows_of, summary
from prunus.lab.profile import compile_arms
from prunus.lab.profile.compile_arms import compare_compile, compared, in_a_process, sentences
from prunus.lab.profile.measure import (
    Memory,
    StepProfile,
    Window,
    measure,
    measured_memory,
    steady_bytes,
    time_events,
    to_the_middle,
)
from prunus.lab.profile.parts import NUM_EVENTS, PARTS, due_events, instrument, plain_step
from prunus.lab.run import Run
from prunus.lab.study.study_plan import dense_of
from prunus.lab.study.tables import page
from prunus.lab.trainer import Training

pytestmark = pytest.mark.usefixtures("few_weights")
RUNS = {
    "hooks": {},
    "adamwprune": {"optimizer": "adamwprune", "spam": True, "score": "movement"},
    "regrow": {"regrow": 0.2, "regrow_by": "gradient", "allocate": "row"},
    "wanda, every step, accumulated": {"score": "wanda", "every": 1, "accumulate": 2},
    "constant": {"schedule": "constant"},
    "one shot": {"schedule": "one_shot"},
    "dense": {"score": "none", "clip": 0.0},
}
PRUNED = [name for name in RUNS if name != "dense"]


def small(text, **options):
    base = {"model": "gpt2-tiny", "context": 16, "batch": 2, "steps": 100, "every": 5, "device": "cpu"}
    return Run(**base | {"data": text} | options)


def begun(text, **options):
    training = Training(small(text, **options))
    training.train_step()
    return training


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(RUNS, "hooks", "adamwprune"))
def test_parts_are_those_of_the_run_and_add_up(name, text):
    run = small(text, **RUNS[name])
    profile = measure(run, Window(2, 2))
    hooked, memory = run.score != "none" and run.optimizer == "adamw", profile.memory
    assert {"data", "forward", "backward", "optimizer"} <= set(profile.parts) <= set(PARTS) - {"event"}
    assert ("clipping" in profile.parts) == (run.clip > 0 and run.optimizer == "adamw")
    assert ("gradient masking" in profile.parts) == hooked
    assert (profile.event_seconds is not None) == ("event" in memory.parts) == (run.score != "none")
    assert set(memory.parts) - {"event"} == set(profile.parts)
    assert sum(memory.peak.values()) == max(size for part, size in memory.parts.items() if part != "event")
    assert Run.from_json(json.loads(json.dumps(profile.to_json()))["run"]) == run
    assert dense_of(run).score == "none" and summary(profile) and rows_of({"a": profile})


def test_categories_are_the_bytes_of_the_tensors(text):
    training = begun(text, optimizer="adamwprune", schedule="constant")
    numel = sum(p.numel() for p in training.model.parameters())
    sizes = steady_bytes(training)
    assert sizes["weights"] == 4 * numel
    assert sizes["masks"] == sum(mask.numel() for mask in training.pruner.masks.values()) // 8
    assert sizes["moments"] == 8 * numel + 4 * len(list(training.model.parameters()))


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamwprune"}], ids=str)
def test_an_instrumented_training_computes_what_it_did(options, text):
    plain, seen = (Training(small(text, begin=1, end=9, every=2, **options)) for _ in range(2))
    instrument(seen)
    for _ in range(6):
        assert plain.train_step()[0] == seen.train_step()[0]
    assert plain.pruner.digest() == seen.pruner.digest()
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), seen.model.parameters(), strict=True))


@pytest.mark.parametrize("name", PRUNED)
@pytest.mark.parametrize("every", [1, 74])
def test_a_plain_step_has_no_event_and_keeps_the_masks(name, every, text):
    """Of a ramp from 10 to 85, 74 steps apart, two events follow one another."""
    training = begun(text, **RUNS[name] | {"every": every})
    to_the_middle(training, 0)
    before, num_events = training.pruner.digest(), len(training.events)
    for _ in range(3):
        plain_step(training)
    assert training.pruner.digest() == before and len(training.events) == num_events


@pytest.mark.parametrize("options", [{}, {"regrow": 0.2}, {"schedule": "constant"}], ids=str)
def test_every_event_that_is_measured_has_weights_to_prune(options, text):
    training = begun(text, every=1, begin=1, end=100, **options)
    instrument(training)
    due = to_the_middle(training, 30)  # plain steps, which do not pass the events that are measured
    assert training.events[-1].step == due[0]
    training.events.clear()
    assert time_events(training, due) > 0
    assert len(training.events) == (NUM_EVENTS if len(due) > 1 else 1)
    assert all(event.newly_pruned > 0 for event in training.events)


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(PRUNED, "hooks"))
def test_with_an_event_at_every_step_its_time_is_not_in_the_step(name, text, monkeypatch):
    pause, update = 0.1, Pruner.update

    def slow(pruner):
        time.sleep(pause)
        update(pruner)

    monkeypatch.setattr(Pruner, "update", slow)
    profile = measure(small(text, **RUNS[name] | {"every": 1}), Window(1, 3))
    assert profile.seconds < pause < profile.event_seconds and "event" not in profile.parts


def test_events_that_wait_for_moments_are_left_out(text):
    training = begun(text, every=1, optimizer="adamwprune", spam=True)
    for group in training.optimizer.param_groups:
        group["num_steps"] = 505
    instrument(training)
    due = due_events(training)
    assert time_events(training, due) is None and "event" not in measured_memory(training, due).parts


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"optimizer": "adamwprune"}, {"precision": "bfloat16"}], ids=str)
def test_on_a_gpu_parts_are_those_of_its_stream_and_memory_is_the_allocators(options, text):
    profile = measure(small(text, device="cuda", batch=16, context=128, **options), Window(3, 4))
    assert 0 < profile.busy <= 1 and profile.parts["backward"] > 0 and profile.event_seconds > 0
    assert profile.memory.peak["activations"] > 0 and profile.memory.steady["rest"] >= 0
    assert {"weights", "moments", "masks"} <= set(profile.memory.steady)


BASE = StepProfile(
    *(Run(precision="bfloat16", every=50), "cuda:0", 1.0, 1.0, 1.0, {"forward": 1.0}, None),
    *(Memory({"weights": 10}, {"weights": 10, "activations": 60}, {"forward": 70}), 0.9),
    *({"build": 1.0, "first step": 1.0}, 1.0, None),
)


@pytest.mark.parametrize(
    ("options", "seconds", "event", "share", "often"),
    [
        ({"every": 1}, 0.04, 0.06, 0.6, "at every step of the ramp"),
        ({"every": 2}, 1.0, 1.0, 1 / 3, "once in 2 steps of the ramp"),
        ({"every": 50}, 1.0, 50.0, 1 / 2, "once in 50 steps of the ramp"),
        ({"every": 1, "steps": 9, "schedule": "constant"}, 1.0, 1.0, 0.1, "once in the run"),
        ({"every": 1, "steps": 9, "schedule": "one_shot"}, 1.0, 1.0, 0.1, "once in the run"),
    ],
)
def test_events_share_the_time_with_the_steps_between_them(options, seconds, event, share, often):
    profile = replace(BASE, run=Run(**options), seconds=seconds, event_seconds=event)
    assert profile.event_share == pytest.approx(share)
    words = " ".join(summary(profile))
    assert f"{often}: {share:.2%} of the time" in words and "A step without an event takes" in words


def test_without_events_there_is_no_share():
    assert BASE.event_share == 0 and summary(BASE)[0].startswith("A step takes")


def arm(seconds, peak, startup, loss, graphs=None):
    counts = graphs and {"graphs": graphs, "graph_breaks": 0, "recompiles": None}
    memory = {"peak": {"weights": peak}}
    return {"seconds": seconds, "memory": memory, "startup": {"build": startup}, "loss": loss, "compiled": counts}


def test_a_comparison_says_what_compile_does():
    figures = compared(arm(0.2, 2**20, 1.0, 3.5), arm(0.1, 2**19, 21.0, 3.5001, 1))
    words = " ".join(sentences(figures))
    for part in ("2.00 times", "0.50 times", "after 200 steps", "1 graph, 0 graph breaks, unknown recompiles"):
        assert part in words
    assert "never pays" in " ".join(sentences(compared(arm(0.1, 1, 1.0, 1.0), arm(0.2, 1, 2.0, 1.0, 1))))


def test_arms_are_equal_in_all_but_compile(text, tmp_path, monkeypatch, capsys):
    runs = []

    def measured(run, window):
        runs.append(run)
        return arm(0.1, 10, 1.0, 2.0, 1)

    monkeypatch.setattr(compile_arms, "in_a_process", measured)
    main(["profile", "--compare", "compile", "--data", text, "--batch", "3", "--out", str(tmp_path)])
    assert [run.compile for run in runs] == [False, True] and replace(runs[1], compile=False) == runs[0]
    assert runs[0].batch == 3 and "Throughput" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "compile.json").read_text())["says"]) == 5


@pytest.mark.slow
def test_an_arm_is_measured_in_a_fresh_process_and_has_a_place_on_the_page(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes a minute; what is tested is all around it
    run = small(text, compile=True, score="none")
    profile = in_a_process(run, Window(1, 1))
    assert Run.from_json(profile["run"]) == run and profile["compiled"]["graphs"] == 0
    arms = {"eager": profile, "compile": profile}
    (tmp_path / "compile.json").write_text(json.dumps({"says": ["A word."], "arms": arms}))
    section = page([tmp_path])
    assert f"| ms a step | {1e3 * profile['seconds']:.2f} | {1e3 * profile['seconds']:.2f} |" in section
    assert f"## {tmp_path.name}" in section and "A word." in section


def test_an_arm_that_fails_says_why_in_one_line(text, monkeypatch):
    def failing(run, window):
        raise MemoryError("much\nno memory\n")

    monkeypatch.setattr(compile_arms, "in_a_process", failing)
    with pytest.raises(ValueError, match=r"arm eager failed: MemoryError: no memory$"):
        compare_compile(small(text), Window(1, 1))


def test_the_command_writes_its_file_once_and_prints_a_table(text, tmp_path, capsys):
    options = ["--model", "gpt2-tiny", "--context", "16", "--batch", "2", "--data", text, "--device", "cpu"]
    command = ["profile", *options, "--steps-before", "1", "--steps-to-measure", "1", "--out", str(tmp_path / "p")]
    main(command)
    out = capsys.readouterr().out
    assert "a training step, on cpu" in out and "gradient masking" in out and "profile.json: written" in out
    written = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert written["with_pruning"]["event_seconds"] > 0 and written["without_pruning"]["event_seconds"] is None
    with pytest.raises(SystemExit):
        main(command)
    assert "there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume"], "resume"),
        (["--track", "wandb"], "track"),
        (["--eval-every", "7"], "--eval-every"),
        (["--save-every", "7"], "--save-every"),
        (["--steps-to-measure", "0"], "at least 1"),
        (["--sparsity", "2"], "sparsity"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(options, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["profile", *options, "--out", str(tmp_path / "p")])
    assert stop.value.code == 2
    message = capsys.readouterr().err.strip()
    assert words in message and "\n" not in message and not (tmp_path / "p").exists()
