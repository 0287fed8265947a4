"""A repair on ranks, of which one or all are killed after some groups: shared_work_killed.py KIND STATE OUT KILL NUM"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import build, tokens
from safetensors.torch import load_file

from prunus import Repair, prune
from prunus.oneshot.samples import digest

kind, killed, num_groups = sys.argv[1], sys.argv[4], int(sys.argv[5])
state, out = map(Path, sys.argv[2:4])  # of a folder, the state is kept beside the result
target = state.with_name(state.name.removeprefix(".").removesuffix(".unfinished"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


def kill_after_groups(num_done, total, what):
    """Only the first rank reports; what it kills is another rank, or all."""
    if what.startswith("repaired") and len(list(state.glob("group_*.pt"))) >= num_groups:
        pids = [int(path.read_text()) for path in sorted(out.glob("pid_*"))]
        for pid in pids[1:] if killed == "one" else reversed(pids):
            os.kill(pid, signal.SIGKILL)


(out / f"pid_{rank}").write_text(str(os.getpid()))
dist.barrier()
torch.manual_seed(0)
model = build("llama")
progress = kill_after_groups if num_groups else False
how = {"repair": Repair(iterations=6), "group": True, "progress": progress}
try:
    if kind == "folder":
        if rank == 0 and not (out.parent / "dense").exists():
            model.save_pretrained(out.parent / "dense")
        dist.barrier()
        result = prune(out.parent / "dense", [{"input_ids": tokens(8, 12)}], out=target, **how)
        done = load_file(target / "model.safetensors")
    else:
        result = prune(model, [{"input_ids": tokens(8, 12)}], state=state, **how)
        done = model.state_dict()
except RuntimeError as error:  # of the transport, where another rank was killed
    (out / f"lost_{rank}").write_text(str(error))
    raise
(out / f"rank_{rank}.json").write_text(json.dumps({"bits": digest(done), "sparsity": result.sparsity}))
