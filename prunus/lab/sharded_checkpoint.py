"""Checkpoints that ranks write together: every rank what it holds, with ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a folder ``checkpoint-STEP`` with one file a rank and ``.metadata``. It does not depend on how many
ranks wrote it or how they were wrapped: optimizer state goes by the weight's name, masks are those of whole weights,
and each rank's random state and digest are stored under its number. DCP would unpickle the metadata and plain values,
so it does not read them: ``files/distributed.py`` does, without executing anything.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from ..files.atomic import new_folder
from ..files.distributed import (
    block_checksums,
    check_complete,
    read_entries,
    read_shard,
    read_tensor,
    write_checksums,
)
from ..ops import bits
from ..ranks import is_dtensor
from .parallel import Team

State = dict[str, Any]
FORMAT = "prunus-pieces-2"
PER_RANK = ("rng", "cuda_rng", "digest")


def save_sharded(folder: Path, state: Mapping[str, Any], team: Team) -> Path:
    """Write a new checkpoint to a run folder, with a checksum of every block that a rank wrote."""
    path = folder / f"checkpoint-{state['step']}"
    own = dict(state)
    for key in PER_RANK:
        own[key] = {f"rank{team.rank}": state[key]}
    with ExitStack() as stack:
        part = team.first(lambda: stack.enter_context(new_folder(path, replace=True)))
        try:
            places = json.dumps(_places(own))
            dcp.save({"format": FORMAT, "places": places, **own}, storage_writer=dcp.FileSystemWriter(part))
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items())
            said = " ".join(str(reason).split())[:200]
            raise OSError(f"{path} could not be written: rank {rank}: {said}") from error

        def own_checksums() -> dict[str, str]:
            blocks = [block for entry in read_entries(part) for block in entry.shards]
            return block_checksums(part, [block for block in blocks if block.file.startswith(f"__{team.rank}_")])

        every: list[Any] = [team.each(own_checksums)] * team.size
        if team.kind != "none":
            dist.all_gather_object(every, every[0])
        team.first(lambda: write_checksums(part, {place: crc for own in every for place, crc in own.items()}))
        team.first(stack.close)
    return path


def load_sharded(path: Path, like: Mapping[str, Tensor], rank: int = 0) -> State:
    """The state that ``save_sharded`` wrote, put together for this rank.

    What belongs to one of the weights ``like`` by name is sharded as that is, as soon as it is read: a rank holds one
    whole tensor at a time. A name that is not there becomes a whole tensor on the CPU.
    """
    entries = read_entries(path, verify=False)  # each block is verified when it is read
    writers = sum(1 for entry in entries if entry.path[0] == "rng")
    if not writers:
        raise ValueError("no rank wrote its random state")
    values: dict[tuple[str, ...], Any] = {}
    for entry in entries:
        if entry.path[0] in PER_RANK and entry.path[1] != f"rank{rank % writers}":
            continue
        if entry.size is None:
            check_complete(path, entry)
            values[entry.path] = read_shard(path, entry.shards[0])
        else:
            weight = next((like[key] for key in entry.path[1:] if key in like), None)
            values[entry.path] = shard(read_tensor(path, entry), weight)
    has_checksums = any(block.crc32 for entry in entries for block in entry.shards)
    if values.get(("format",)) != FORMAT or not has_checksums:
        raise ValueError(f"it lacks checksums or the format mark {FORMAT!r}")
    state: State = {}
    for place in map(tuple, json.loads(values[("places",)])):
        if place[0] not in PER_RANK:
            inner = state
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = values.get(place, {})
    return state | {key: values[key, f"rank{rank % writers}"] for key in PER_RANK}


def shard(value: Any, weight: Any) -> Any:
    """A whole tensor, sharded over ranks as the weight that it belongs to; anything else as it is."""
    if not is_dtensor(weight) or not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


def _places(state: Mapping[str, Any], outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Keys from the outer mapping to the inner of every value: DCP keeps no order, and leaves out empty mappings."""
    places: list[tuple[str, ...]] = []
    for key, value in state.items():
        places += _places(value, (*outer, key)) if isinstance(value, Mapping) and value else [(*outer, key)]
    return places


def by_name(state: State, model: nn.Module, optimizer: Optimizer) -> State:
    """A training's state with what the optimizer keeps under the weights' names, and each tied weight once.

    Masks leave the optimizer's part, where they are a rank's own: the pruner's part has those of whole weights.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    ties = {name: first[id(p)] for name, p in every if first[id(p)] != name}
    names = [first[id(p)] for group in optimizer.param_groups for p in group["params"]]
    rows = {names[i]: _without(row, "mask") for i, row in state["optimizer"]["state"].items()}
    groups = {
        str(number): group | {"params": [names[i] for i in group["params"]]}
        for number, group in enumerate(state["optimizer"]["param_groups"])
    }
    cuda = state["cuda_rng"]
    return state | {
        "model": _without(state["model"], *ties),
        "ties": ties,
        "optimizer": {"state": rows, "groups": groups},
        "cuda_rng": torch.stack(cuda) if cuda else torch.empty(0, 0, dtype=torch.uint8),
    }


def by_number(state: State, whole: bool = False) -> State:
    """A state ``by_name`` as the optimizer numbers its weights; a ``whole`` one has packed masks, in its rows too."""
    groups = [state["optimizer"]["groups"][key] for key in sorted(state["optimizer"]["groups"], key=int)]
    number = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    masks: dict[str, Tensor] = {}
    if whole and state["pruner"]:
        masks = {name: bits.pack(mask != 0) for name, mask in state["pruner"]["masks"].items()}
        state = state | {"pruner": state["pruner"] | {"masks": masks}}
    rows = {
        number[name]: row | ({"mask": masks[name]} if name in masks else {})
        for name, row in state["optimizer"]["state"].items()
    }
    numbered = [group | {"params": [number[name] for name in group["params"]]} for group in groups]
    tensors = state["model"] | {alias: state["model"][name] for alias, name in state["ties"].items()}
    return _without(state, "ties") | {
        "model": tensors,
        "optimizer": {"state": dict(sorted(rows.items())), "param_groups": numbered},
        "cuda_rng": list(state["cuda_rng"].unbind()),
    }


def _without(values: Mapping[str, Any], *names: str) -> State:
    return {name: value for name, value in values.items() if name not in names}
