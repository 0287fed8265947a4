"""A search that was killed goes on where it was, and only where it was."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from probe_models import mlp
from test_search import searched

from prunus.oneshot import Levels, Limit, Probe

SEARCHES = """
import json, os, signal, sys
from pathlib import Path
import torch
from prunus import search
from prunus.oneshot import Levels, Limit, Probe, TauTuning
sys.path.insert(0, {here!r})
from probe_models import mlp
from test_search import held_out

def searched(folder, kill_at):
    case, events = mlp(), []
    def event(*_):
        events.append(1)
        if len(events) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    inner = held_out(case)
    def evaluate(model):
        event()
        return inner(model)
    options = {{"steps": Levels(0.2, 0.2, 0.8), "tune_tau": TauTuning(3, {both}), "state": folder, "progress": event}}
    options |= {{"probe": Probe(2.0, schedule={schedule!r}), "loss": case.loss}}
    limit = Limit(relative=0.003, better="lower")
    found = search(case.model, case.batches, evaluate, limit, **options)
    trials = [(t.target, t.sparsity, t.metric, t.accepted, t.scale) for t in found.trials]
    torch.save({{"model": case.model.state_dict(), "masks": dict(found.masks)}}, folder.with_suffix(".out"))
    return [len(events), trials, found.metric, found.sparsity, found.alone]

def forked(folder, kill_at):
    # a process of its own for each search; nothing has run in this one, so a fork of it is a fresh start
    answer = folder.with_suffix(".json")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            answer.write_text(json.dumps(searched(folder, kill_at)))
        finally:
            os._exit(0 if answer.is_file() else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(answer.read_text()) if answer.is_file() else None

torch.set_num_threads(1)
root = Path(sys.argv[1])
whole = forked(root / "whole", 0)
killed = []
for kill_at in (3, 5, 8, whole[1][0] // 2, 2):
    killed.append(forked(root / "broken", kill_at)[0])
    if killed[-1] == 0:
        break
print(json.dumps([whole, killed, forked(root / "broken", 0)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "both"), [("sequential", True), ("joint", False)])
def test_a_search_killed_anywhere_goes_on_and_ends_as_the_unbroken_one(schedule, both, tmp_path):
    script = SEARCHES.format(here=str(Path(__file__).parent), both=both, schedule=schedule)
    command, environment = [sys.executable, "-c", script, str(tmp_path)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    (status, (num_events, *expected)), killed, (resumed, (num_left, *found)) = json.loads(done.stdout)
    assert status == 0 and num_events > 8
    assert killed.count(-signal.SIGKILL) >= 2 and set(killed[:-1]) == {-signal.SIGKILL}
    assert killed[-1] in (0, -signal.SIGKILL)
    assert resumed == 0 and found == expected and num_left < num_events
    first, second = (torch.load(f"{tmp_path / name}.out", weights_only=True) for name in ("whole", "broken"))
    for part in ("model", "masks"):
        assert all(torch.equal(first[part][key], second[part][key]) for key in first[part])


HALF_WORSE = Limit(relative=0.5, better="lower")


def test_a_folder_of_another_search_is_refused(tmp_path):
    options = {"steps": Levels(0.2, 0.2, 0.2), "state": tmp_path / "state"}
    searched(mlp(), HALF_WORSE, Probe(1.0), **options)
    changed, drawn = mlp(), mlp()
    changed.model[0].weight.data[0, 0] += 1
    drawn.batches[0][0][0, 0] += 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for case, probe, more, said in (
        (mlp(), Probe(2.0), {}, r"probe = .*tau=1.0.*not .*tau=2.0"),
        (changed, Probe(1.0), {}, "other weights"),
        (drawn, Probe(1.0), {}, "samples = "),
        (mlp(), Probe(1.0), {"state": tmp_path / "mine"}, "holds files of something else"),
    ):
        with pytest.raises(ValueError, match=said):
            searched(case, HALF_WORSE, probe, **options | more)


@pytest.mark.parametrize("kind", ["trial", "group"])
def test_what_is_damaged_is_done_again_and_said(kind, tmp_path):
    options = {"steps": Levels(0.2, 0.2, 0.8), "state": tmp_path / "state"}
    calls = []

    def progress(_, __, phase):
        calls.append(phase.startswith("probed "))
        if kind == "group" and sum(calls) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if kind == "group" else nullcontext():
        searched(mlp(), HALF_WORSE, Probe(1.0), **options, progress=progress)
    paths = sorted((tmp_path / "state").glob(f"{kind}_*.pt"))
    assert len(paths) > 1
    data = bytearray(paths[1].read_bytes())
    data[data.index(b"prunus-checkpoint")] ^= 1
    paths[1].write_bytes(data)
    case, expected = mlp(), mlp()
    with pytest.warns(UserWarning, match=rf"{paths[1].name} is damaged .*computed again"):
        found = searched(case, HALF_WORSE, Probe(1.0), **options)
    whole = searched(expected, HALF_WORSE, Probe(1.0), steps=options["steps"])
    assert [trial.metric for trial in found.trials] == [trial.metric for trial in whole.trials]
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), expected.model.parameters(), strict=True))
