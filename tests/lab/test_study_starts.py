"""Runs of one recipe and seed share their dense start, and end with the bits of runs that were made alone."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_gpt import fewer_weights
from study_command import Quiet
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prunus.files.json_file import read_json
from prunus.lab.run import Run
from prunus.lab.study import runner
from prunus.lab.study.arms import parse_arm
from prunus.lab.study.runner import Options, Starts, Worker, num_shared
from prunus.lab.study.study_folder import Folder
from prunus.lab.study.study_plan import make_plan, only
from prunus.lab.trainer import train

pytestmark = pytest.mark.usefixtures("few_weights")
RUN = Run(steps=100, begin=10, end=90, every=7, eval_every=50)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 9),
        ({"score": "none"}, 99),
        ({"begin": 0.3}, 29),
        ({"begin": 80}, 79),
        ({"eval_every": 1}, 9),
        ({"schedule": "constant"}, 0),
        ({"schedule": "one_shot", "begin": 20}, 19),
        ({"schedule": "zhu_gupta", "begin": 1}, 0),
        ({"begin": 0}, 6),  # the event at step 0 is none
        ({"score": "movement"}, 0),
        ({"score": "wanda"}, 0),
        ({"optimizer": "adamwprune"}, 0),
        ({"regrow": 0.2}, 9),
        ({"every": 200}, 9),
    ],
    ids=str,
)
def test_what_is_shared_ends_before_the_first_event(changes, steps):
    assert num_shared(replace(RUN, **changes)) == steps


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of several recipes, and the optimizer steps that it took."""
    folder = tmp_path_factory.mktemp("starts")
    letters = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_bytes(bytes(letters))
    small = {"model": "gpt2-tiny", "context": 8, "batch": 2, "warmup": 2, "log_every": 1, "eval_size": 2}
    when = {"steps": 12, "begin": 6, "end": 10, "every": 2, "eval_every": 3}
    base = Run(data=str(folder / "text.txt"), rate_power=0.0, **when, **small)
    arms = (
        "bitter7: score=bitter7",
        "late: score=bitter7 begin=8",
        "bitter7 regrow: score=bitter7 regrow=0.2",
        "movement: score=movement",
        "fast: score=bitter7 lr=3e-3",
        "dense fast: score=none lr=3e-3",
        "inside: score=bitter7 optimizer=adamwprune",
        "replay: score=none replay=rate-0.5-s{seed}",
        "rate: score=bitter7 rate_power=1",
        "magnitude rate: score=magnitude rate_power=1",
    )
    plan = make_plan(base, map(parse_arm, arms), [0.5], [0, 1])
    twice = ("dense", "bitter7")  # another seed has a start of its own
    plan = replace(plan, cells=tuple(cell for cell in plan.cells if not cell.seed or cell.arm in twice))
    out = Folder(folder / "study")
    out.write(plan, {})
    steps = []
    handle = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    said: list[str] = []
    worker = Worker(out, Options(device="cpu"), Quiet(said))
    with fewer_weights():
        worker.work(plan.cells)
    handle.remove()
    assert not any("failed" in line for line in said)
    assert worker.starts.states == {}, "nobody needs them any more"
    return out, plan, len(steps)


@pytest.mark.slow
def test_few_starts_are_kept_and_none_of_a_resumed_run(tmp_path, study, monkeypatch):
    monkeypatch.setattr(runner, "MOST_STARTS", 2)
    _, plan, _ = study
    arms = [f"b{begin}: score=bitter7 begin={begin}" for begin in range(3, 6)]
    many = make_plan(plan.base, map(parse_arm, arms), [0.5], [0])
    folder, most = Folder(tmp_path / "study"), []
    folder.write(many, {})
    worker = Worker(folder, Options(device="cpu"), Quiet([]))
    kept = worker.starts.recorder

    def watched(run, others):
        most.append((len(worker.starts.states), run.resume, len(list(others))))
        return kept(run, others)

    worker.starts.recorder = watched
    worker.work(many.cells)
    assert max(number for number, _, _ in most) == 2
    cell = many.cells[0]
    alone = replace(many.run_of(cell), out=folder.run(cell), device="cpu", save_every=5)
    shutil.rmtree(folder.run(cell))
    with pytest.raises(KeyboardInterrupt):
        train(alone, interrupt_at_7)
    shutil.rmtree(folder.run(many.cells[-1]))
    worker.work(many.cells)
    assert (0, True, 0) in most


def test_what_only_the_first_step_of_a_process_takes_is_nobody_elses(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    starts, run = Starts(), replace(RUN, out=tmp_path)
    taker = starts.recorder(replace(run, score="none"), [run])
    for step in range(1, 10):
        state = {"seconds": 30 + 0.1 * (step - 1)}
        taker(SimpleNamespace(step=step, run=run, seconds=state["seconds"], state=lambda state=state: state))
    start = starts.of(run)
    assert start.state["seconds"] == pytest.approx(0.9) and 0 < start.wall_seconds < 0.9


def interrupt_at_7(step, values):
    if step == 7:
        raise KeyboardInterrupt


def lines_of(folder):
    """Lines of metrics.jsonl without what is timed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("event", {}).pop("seconds", None)
    return lines


@pytest.mark.slow
def test_every_run_is_the_one_that_is_made_alone(study, tmp_path):
    folder, plan, _ = study
    for cell in plan.ordered():
        alone = replace(plan.run_of(cell), out=tmp_path / cell.folder, device="cpu", save_every=0)
        result, shared = train(alone), folder.run(cell)
        found = read_json(shared / "result.json")
        assert {name: found[name] for name in ("loss", "accuracy", "sparsity", "digest", "steps")} == {
            "loss": result.loss,
            "accuracy": result.accuracy,
            "sparsity": result.sparsity,
            "digest": result.digest,
            "steps": result.steps,
        }, cell
        assert lines_of(shared) == lines_of(alone.out), cell


@pytest.mark.slow
def test_the_start_is_trained_once(study):
    folder, plan, num_steps = study
    shared = {cell: read_json(folder.run(cell) / "cell.json")["shared_steps"] for cell in plan.cells}
    by_arm = {cell.arm: num for cell, num in shared.items()}
    assert by_arm == {
        "dense": 0,
        "random": 5,
        "magnitude": 5,
        "bitter7": 5,
        "late": 7,
        "bitter7 regrow": 5,
        "movement": 0,
        "fast": 0,
        "dense fast": 5,
        "inside": 0,
        "rate": 0,  # its optimizer has other groups
        "magnitude rate": 5,
        "replay": 5,
    }
    assert num_steps == 12 * len(plan.cells) - sum(shared.values())


@pytest.mark.slow
def test_a_run_is_replayed_when_it_is_there_whichever_worker_trains_it(study, tmp_path, monkeypatch):
    _, plan, _ = study
    plan = only(plan, ["replay"])
    source, replay = (next(cell for cell in plan.cells if cell.arm == arm) for arm in ("rate", "replay"))
    folder, locked = Folder(tmp_path / "study"), Folder.locked
    folder.write(plan, {})
    others = []

    @contextmanager
    def beside_another(self, name, *, wait=False):
        """As if another worker trained the run that is replayed, until somebody waits for it."""
        if name == source.folder and not others:
            if wait:
                others.append(Worker(folder, Options(device="cpu"), Quiet([])))
                others[0].work([source])
            yield wait
        else:
            with locked(self, name, wait=wait) as free:
                yield free

    monkeypatch.setattr(Folder, "locked", beside_another)
    Worker(folder, Options(device="cpu"), Quiet([])).work(plan.cells)
    assert len(others) == 1 and (folder.run(replay) / "result.json").is_file()
    rates = [line["event"]["rates"] for line in lines_of(folder.run(source)) if "event" in line]
    assert rates and all(rate > 1 for rate in rates[-1])
