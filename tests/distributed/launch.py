"""Ranks that are real processes: they are forked from one that has loaded everything, and each runs all checks.

``python launch.py WORLD OUT EVERY`` writes what went wrong to OUT, a file a rank; of the runs that are compared with
one process it takes one of EVERY.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import checks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_of_many(rank: int, world: int, out: str) -> None:
    torch.set_num_threads(1)  # makes anew what a fork cannot take along, before two threads of autograd would at once
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", f"file://{out}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    failures = {}
    for check, worlds in checks.CHECKS.items():
        name = check.__name__
        if world not in worlds:
            continue
        try:
            check(rank, world)
        except BaseException:
            failures[name] = traceback.format_exc()
            break  # the others may wait for this rank: they end by the timeout, or when it closes its sockets
    Path(out, f"{rank}.json").write_text(json.dumps(failures))
    if failures:
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks.every = int(sys.argv[3])
    checks.prepare()
    mp.start_processes(rank_of_many, (int(sys.argv[1]), sys.argv[2]), int(sys.argv[1]), start_method="fork")
