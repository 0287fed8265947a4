"""Checkpoints of a training: the last two are kept, whole and with checksums, and read without executing anything.

One process writes checkpoint.pt, and what was there becomes checkpoint.previous.pt. Ranks write a folder
``checkpoint-STEP`` (``sharded_checkpoint``) and, at the end of a run, checkpoint.pt too. A run that is resumed from a
damaged checkpoint goes on from the one before. Disks need room for three: two that are kept, and the one being written.
"""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..files.one_line import in_one_line
from ..files.torch_file import FORMAT, read_torch_file, write_torch_file
from ..ops.machine import said_by_linux
from ..ranks import is_dtensor
from .parallel import Team
from .run import Run, run_of

LAST, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
KINDS = {"run": Mapping, "step": int, "seconds": float | int, "model": Mapping, "optimizer": Mapping, "rng": Tensor}


class Resumable(Protocol):
    """What a checkpoint needs of a training."""

    run: Run
    team: Team
    model: nn.Module
    optimizer: Optimizer
    pruner: Any

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


def save(training: Resumable, last: bool) -> None:
    """Write the checkpoint of the run folder; ranks put their ``last`` one together as checkpoint.pt, too."""
    out, team = training.run.out, training.team
    if team.kind == "none":
        was_there = (out / LAST).exists()
        write_torch_file(out / LAST, training.state(), previous=out / PREVIOUS)
        _remove(sharded_in(out)[0 if was_there else 1 :])
        return
    from .sharded_checkpoint import by_name, save_sharded

    team.average_buffers_(training.model)
    state = training.state() | {"digest": None}
    if pruner := training.pruner:
        state |= {"digest": pruner.digest(), "pruner": pruner.state_dict(unpacked=True)}
    path = save_sharded(out, by_name(state, training.model, training.optimizer), team)
    team.first(lambda: _remove_older(out))
    if last and team.is_first:
        room = said_by_linux("meminfo", "MemAvailable")  # None where the system does not say
        if room is None or 1.25 * sum(f.stat().st_size for f in path.iterdir()) < room:  # for all shards together
            write_torch_file(out / LAST, load_checkpoint(path))


def resume(training: Resumable) -> None:
    """Continue from the last checkpoint of the run folder that is whole; without one the training begins."""
    team, damaged = training.team, {}
    for path in team.first(lambda: checkpoints_in(training.run.out)):
        try:
            if path.is_dir() and team.kind != "none":
                state = team.each(lambda path=path: _load_sharded(path, training.model.state_dict(), team.rank))
            else:
                whole = team.each(lambda path=path: load_checkpoint(path))
                state = _shard_like(whole, training.model, training.optimizer)
        except ValueError as error:  # not OSError: a file that cannot be read now may be whole
            damaged[path] = str(error)
            continue
        training.run.check_trained(Run.from_json(state["run"]), path.name)
        if damaged:
            team.first(lambda: [_set_aside(bad) for bad in damaged])
        if damaged and team.is_first:
            first = next(iter(damaged.values()))
            warnings.warn(f"{first}; the run continues from {path.name}, step {state['step']}", stacklevel=2)
        training.load(state)
        return
    if damaged:
        raise ValueError(next(iter(damaged.values())))


def sharded_in(folder: Path) -> list[Path]:
    """Checkpoints that ranks completed in a run folder, the newest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    step_of = {path: int(step) for path, step in steps.items() if step.isdecimal() and (path / ".metadata").is_file()}
    return sorted(step_of, key=lambda path: -step_of[path])


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints of a run folder, the newest first; what a crash left incomplete has another name."""
    files = [path for path in (folder / LAST, folder / PREVIOUS) if path.is_file()]
    return sorted([*files, *sharded_in(folder)], key=lambda path: (path.name != LAST, path.name == PREVIOUS))


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run folder."""
    if not path.is_dir() or (path / ".metadata").is_file():
        return path
    return next(iter(checkpoints_in(path)), path / LAST)


def remove_checkpoints(folder: Path) -> None:
    _remove(checkpoints_in(folder))


def _remove_older(folder: Path) -> None:
    """After ranks wrote a checkpoint: keep the one before it too, of ranks or of one process, and no others."""
    _remove(sharded_in(folder)[2:])
    if len(sharded_in(folder)) > 1:
        _remove([folder / LAST, folder / PREVIOUS])
    elif (folder / LAST).is_file():
        (folder / LAST).replace(folder / PREVIOUS)
    for path in folder.glob("checkpoint-*"):  # without metadata: nobody finished it
        if path.name.removeprefix("checkpoint-").removesuffix(".part").isdecimal() and path not in sharded_in(folder):
            _remove([path])


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _set_aside(path: Path) -> None:
    """Give a damaged checkpoint a name that no command takes for one, so that it does not replace a whole one."""
    other = path.with_name(f"damaged-{path.name}")
    _remove([other])
    path.replace(other)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint of either kind; a missing, damaged or foreign one is a ValueError."""
    if not path.is_file() and not (path / ".metadata").is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    state = _load_sharded(path) if path.is_dir() else _load_file(path)
    for key, kind in KINDS.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(f"{path} is damaged, or not a checkpoint of prunus: it lacks {key!r}")
    run_of(state, path)
    return {key: value for key, value in state.items() if key != "digest"}


def _load_file(path: Path) -> dict[str, Any]:
    try:
        state = read_torch_file(path)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError(f"it lacks the format mark {FORMAT!r}")
    except ValueError as error:
        other = path.with_name(PREVIOUS)
        hint = f"; the one before it is {other.name}" if path.name == LAST and other.is_file() else ""
        raise ValueError(f"{path} is damaged, or not a checkpoint of prunus: {error}{hint}") from error
    return state


def _load_sharded(path: Path, like: Mapping[str, Tensor] | None = None, rank: int = 0) -> dict[str, Any]:
    """The state in a folder of ranks: that of one process, or for ``like`` that of this rank."""
    from .sharded_checkpoint import by_number, load_sharded

    unfit = (ValueError, KeyError, IndexError, TypeError, AttributeError)
    with in_one_line(f"{path} is damaged, or not a checkpoint of prunus", *unfit):
        return by_number(load_sharded(path, like or {}, rank), whole=like is None)


def _shard_like(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A whole state with each tensor sharded over ranks as its weight is."""
    from .sharded_checkpoint import shard

    like = model.state_dict()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {
        i: {key: shard(value, weights[i]) for key, value in row.items() if key != "mask" or not is_dtensor(weights[i])}
        for i, row in state["optimizer"]["state"].items()
    }
    return state | {
        "model": {name: shard(value, like.get(name)) for name, value in state["model"].items()},
        "optimizer": state["optimizer"] | {"state": rows},
    }
