"""A repair on ranks, of which one or all kill themselves after some groups: shared_work_killed.py STATE OUT KILL ..."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from families import build, tokens

from prunus import Repair, prune
from prunus.oneshot.samples import digest

state, out, killed, num_groups = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
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
model, began = build("llama"), time.monotonic()
progress = kill_after_groups if num_groups else False
try:
    result = prune(
        model, [{"input_ids": tokens(8, 12)}], repair=Repair(iterations=6), state=state, group=True, progress=progress
    )
except RuntimeError as error:  # of the transport, where another rank was killed
    (out / f"lost_{rank}").write_text(str(error))
    raise
sparsity = result.sparsity
(out / f"rank_{rank}.json").write_text(json.dumps({"bits": digest(model.state_dict()), "sparsity": sparsity}))
