"""What the ranks of test_parallel do, each job in one launch: torchrun parallel_worker.py JOB DATA FOLDER."""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prunus.cli import main
from prunus.files.torch_file import write_torch_file
from prunus.lab import sharded_checkpoint
from prunus.lab.checkpoint import resume, save
from prunus.lab.parallel import Team, join
from prunus.lab.run import Parallel, Run, read_run
from prunus.lab.trainer import Training, train
from prunus.ops import bits

KINDS: tuple[Parallel, ...] = ("ddp", "fsdp")
STOP = 7  # the step after which an interrupted run ends; its last checkpoint is of step 6


# five batches of evaluation are no multiple of 2 or 3 ranks, and with accumulation gradients wait
NAMES = "context batch accumulate steps every begin end warmup log_every eval_every eval_size save_every device".split()
OPTIONS: dict[str, Any] = dict(zip(NAMES, (16, 6, 2, 12, 2, 2, 10, 3, 1, 6, 30, 3, "cpu"), strict=True))


class Interrupted(Exception):
    pass


def options(data: Path, out: Path, parallel: Parallel = "none") -> Run:
    return Run(data=str(data), out=out, parallel=parallel, **OPTIONS)


def until_stop(step: int, _: object) -> None:
    if step == STOP:
        raise Interrupted


def interrupted(run: Run) -> None:
    with suppress(Interrupted):
        train(run, until_stop)
    dist.barrier()


def resaved(folder: Path, out: Path, parallel: Parallel) -> None:
    """Read a run's checkpoint and write it anew, without a step in between."""
    run = replace(read_run(folder), out=folder, parallel=parallel)
    training = Training(run, team=Team(run.parallel, dist.get_rank(), dist.get_world_size()))
    resume(training)
    training.run = replace(training.run, out=out)
    if training.team.is_first:
        out.mkdir()
    dist.barrier()
    save(training, last=False)


def gathered(run: Run, out: Path) -> None:
    """What one rank puts together from the ranks' tensors, without the checkpoint's own files."""
    training = Training(replace(run, resume=True), team=Team(run.parallel, dist.get_rank(), dist.get_world_size()))
    resume(training)
    state = training.state()
    for tensors in (state["model"], *state["optimizer"]["state"].values()):
        for name, value in tensors.items():
            tensors[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert training.pruner is not None
    masks = {name: bits.pack(mask) for name, mask in training.pruner.full_masks().items()}
    if training.team.is_first:
        write_torch_file(out, state | {"pruner": state["pruner"] | {"masks": masks}})
    dist.barrier()


def three(data: Path, folder: Path) -> None:
    """Interrupted runs on a number of ranks that does not divide the weights."""
    for kind in KINDS:
        interrupted(options(data, folder / f"{kind}-three", kind))


def two(data: Path, folder: Path) -> None:
    """All that two ranks do; in the first attempt one is killed."""
    killed(data, folder / "killed")
    for kind in KINDS:
        whole_and_broken(options(data, folder / kind, kind), folder)
    resaved(folder / "ddp-three", folder / "ddp-fsdp", "fsdp")
    resaved(folder / "fsdp-three", folder / "fsdp-ddp", "ddp")
    resaved(folder / "none", folder / "none-fsdp", "fsdp")
    train(Run(out=folder / "fsdp-three", resume=True))


def killed(data: Path, out: Path) -> None:
    """The command line's run, in whose first attempt a rank dies with half of its second checkpoint written."""
    if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        write, calls = sharded_checkpoint.dcp.FileSystemWriter.write_data, []

        def write_data(self, plan, planner):
            calls.append(1)
            done = write(self, plan, planner)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        sharded_checkpoint.dcp.FileSystemWriter.write_data = write_data
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    main(["train", "--data", str(data), "--out", str(out), "--parallel", "fsdp", *words])


def whole_and_broken(run: Run, folder: Path) -> None:
    """An unbroken run, and one that is interrupted and resumed, with what the ranks hold in between."""
    train(run)
    broken = replace(run, out=folder / f"{run.parallel}-broken")
    interrupted(broken)
    gathered(broken, folder / f"{run.parallel}-gathered.pt")
    resaved(broken.out, folder / f"{run.parallel}-sharded", run.parallel)
    train(replace(broken, resume=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    join(on_gpu=False)
    job, data, folder = sys.argv[1:]
    globals()[job](Path(data), Path(folder))
    dist.destroy_process_group()
