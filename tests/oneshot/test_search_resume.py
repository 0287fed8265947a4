"""A search that was killed goes on where it was, and only where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from probe_models import mlp
from test_search import searched

from prunus import Levels, Limit, Probe

# runs of one search, each in a process forked for it: an unbroken one, some that are killed, and one that ends them
KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from prunus import *
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
    options = SearchOptions(Levels(0.2, 0.2, 0.8), Tune(3, {both}), folder, progress=event)
    found = search(case.model, case.batches, evaluate, Limit(relative=0.003), Probe(2.0, schedule={schedule!r}),
                   loss=case.loss, options=options)
    trials = [(t.asked, t.sparsity, t.metric, t.accepted, t.scale) for t in found.trials]
    torch.save({{"model": case.model.state_dict(), "masks": dict(found.masks)}}, folder.with_suffix(".out"))
    folder.with_suffix(".json").write_text(
        json.dumps([len(events), trials, found.metric, found.sparsity, found.alone]))

def run(name, kill_at=0):
    folder = Path(sys.argv[1], name)
    child = os.fork()
    if not child:
        code = 1
        try:
            searched(folder, kill_at)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL) if kill_at else code == 0, code
    return json.loads(folder.with_suffix(".json").read_text()) if code == 0 else None

whole, num_killed = run("whole"), 0
for kill_at in (3, 5, 8, whole[0] // 2, 2):
    if run("broken", kill_at) is not None:
        break
    num_killed += 1
print(json.dumps([whole, run("broken"), num_killed]))
"""


@pytest.mark.parametrize(
    ("schedule", "both"),
    [
        ("sequential", True),
        pytest.param("sequential", False, marks=pytest.mark.slow),
        pytest.param("joint", False, marks=pytest.mark.slow),
    ],
)
def test_a_search_killed_anywhere_goes_on_and_ends_as_the_unbroken_one(schedule, both, tmp_path):
    script = KILLED.format(here=str(Path(__file__).parent), both=both, schedule=schedule)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    (num_events, *expected), (num_left, *found), num_killed = json.loads(done.stdout)
    assert num_events > 8 and num_killed >= 2
    assert found == expected and num_left < num_events
    first, second = (torch.load(f"{tmp_path / name}.out", weights_only=True) for name in ("whole", "broken"))
    for part in ("model", "masks"):
        assert all(torch.equal(first[part][key], second[part][key]) for key in first[part])


def test_a_folder_of_another_search_is_refused(tmp_path):
    options = {"steps": Levels(0.2, 0.2, 0.2), "state": tmp_path / "state"}
    searched(mlp(), Limit(relative=0.5), Probe(1.0), **options)
    with pytest.raises(ValueError, match=r"probe = .*tau=1.0.*not .*tau=2.0"):
        searched(mlp(), Limit(relative=0.5), Probe(2.0), **options)
    other = mlp()
    with torch.no_grad():
        other.model[0].weight[0, 0] += 1
    with pytest.raises(ValueError, match="other weights"):
        searched(other, Limit(relative=0.5), Probe(1.0), **options)
    drawn = mlp()
    drawn.batches[0][0][0, 0] += 1
    with pytest.raises(ValueError, match="samples = "):
        searched(drawn, Limit(relative=0.5), Probe(1.0), **options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other things"):
        searched(mlp(), Limit(relative=0.5), Probe(1.0), **options | {"state": tmp_path / "mine"})
    trial = next((tmp_path / "state").glob("trial_*.pt"))
    trial.write_bytes(trial.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read back"):
        searched(mlp(), Limit(relative=0.5), Probe(1.0), **options)
