"""Checkpoints of a training, replaced only by complete ones and read without executing anything.

One process writes checkpoint.pt. Ranks write a folder ``checkpoint-STEP`` (``sharded_checkpoint``) and, at the end of
a run, checkpoint.pt too.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..files.atomic import write_atomically
from ..files.torch_file import read_torch_file
from ..ops.machine import said_by_linux
from ..ranks import is_dtensor
from .parallel import Team
from .run import Run

FORMAT = "prunus-checkpoint-1"


class Training(Protocol):
    """What a checkpoint needs of a training."""

    run: Run
    team: Team
    model: nn.Module
    optimizer: Optimizer
    pruner: Any

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


def save(training: Training, last: bool) -> None:
    """Write the checkpoint of the run folder; ranks put their ``last`` one together as checkpoint.pt, too."""
    out, team = training.run.out, training.team
    if team.kind == "none":
        save_checkpoint(out / "checkpoint.pt", training.state())
        if any(out.glob("checkpoint-*")):  # the module takes a second to import
            from .sharded_checkpoint import remove_sharded

            remove_sharded(out)
        return
    from .sharded_checkpoint import by_name, save_sharded

    team.average_buffers_(training.model)
    state = training.state() | {"digest": None}
    if pruner := training.pruner:
        state |= {"digest": pruner.digest(), "pruner": pruner.state_dict(unpacked=True)}
    path = save_sharded(out, by_name(state, training.model, training.optimizer), team)
    if last and team.is_first and _fits_in_memory(path):
        save_checkpoint(out / "checkpoint.pt", load_checkpoint(path))


def resume(training: Training) -> None:
    """Continue from the checkpoint of the run folder; without one the training begins."""
    path, team = checkpoint_of(training.run.out), training.team
    if not path.exists():
        return
    if path.is_dir() and team.kind != "none":
        from .sharded_checkpoint import by_number, load_sharded

        state = by_number(load_sharded(path, training.model.state_dict(), team))
    else:
        state = _shard_like(team.each(lambda: load_checkpoint(path)), training.model, training.optimizer)
    training.load(state)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run folder's; where there is a checkpoint.pt, it is the newest.

    What a crash left incomplete has another name and is never taken.
    """
    if not path.is_dir() or (path / ".metadata").is_file():
        return path
    one_file = path / "checkpoint.pt"
    found = {
        int(step): folder
        for folder in path.glob("checkpoint-*")
        if (step := folder.name.removeprefix("checkpoint-")).isdecimal() and (folder / ".metadata").is_file()
    }
    return one_file if one_file.is_file() or not found else found[max(found)]


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint of either kind; a missing, truncated or foreign one is a ValueError."""
    if (path / ".metadata").is_file():
        from .sharded_checkpoint import by_number, load_sharded

        state = by_number(load_sharded(path, {}), whole=True)
        return {key: value for key, value in state.items() if key != "digest"}
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    try:
        state = read_torch_file(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole checkpoint of prunus: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of prunus: it lacks the mark {FORMAT!r}")
    return state


def _shard_like(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A whole state with each tensor sharded over ranks as its weight is."""
    like = model.state_dict()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {
        i: {key: _shard(value, weights[i]) for key, value in row.items() if key != "mask" or not is_dtensor(weights[i])}
        for i, row in state["optimizer"]["state"].items()
    }
    return state | {
        "model": {name: _shard(value, like[name]) if name in like else value for name, value in state["model"].items()},
        "optimizer": state["optimizer"] | {"state": rows},
    }


def _shard(value: Any, weight: Any) -> Any:
    if not is_dtensor(weight) or not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


def _fits_in_memory(path: Path) -> bool:
    """Whether main memory has room for all shards together; assumed where the system does not say."""
    available = said_by_linux("meminfo", "MemAvailable")
    return available is None or 1.25 * sum(f.stat().st_size for f in path.iterdir()) < available
