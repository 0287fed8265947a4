"""Checkpoints that ranks write together: every rank what it holds, with ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a folder ``checkpoint-STEP`` with one file a rank and ``.metadata``. It does not depend on how many
ranks wrote it or how they were wrapped: optimizer state goes by the weight's name, masks are those of whole weights,
and each rank's random state and digest are stored under its number. DCP would unpickle the metadata and plain values;
here both are read without executing anything.
"""

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future
from torch.optim import Optimizer

from ..files.atomic import new_folder
from ..files.distributed import (
    Entry,
    StoredBlock,
    block_checksums,
    check_complete,
    read_entries,
    read_shard,
    write_checksums,
)
from ..ops import bits
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
            raise OSError(f"{path} could not be written: {_cause(error)}") from error
        every: list[Any] = [team.each(lambda: _own_checksums(part, team.rank))] * team.size
        if team.kind != "none":
            dist.all_gather_object(every, every[0])
        team.first(lambda: write_checksums(part, {place: crc for own in every for place, crc in own.items()}))
        team.first(stack.close)
    return path


def _own_checksums(part: Path, rank: int) -> dict[str, str]:
    """Checksums of the blocks in this rank's files."""
    blocks = [block for entry in read_entries(part) for block in entry.shards]
    return block_checksums(part, [block for block in blocks if block.file.startswith(f"__{rank}_")])


def load_sharded(path: Path, like: Mapping[str, Tensor], team: Team = Team()) -> State:
    """The state that ``save_sharded`` wrote, put together for this rank.

    ``like`` are the model's tensors by name: its weights are read into them, and what belongs to a weight is sharded
    as the weight is. A name that is not there becomes a whole tensor on the CPU.
    """
    entries = team.each(lambda: _read_entries(path))
    writers = sum(1 for entry in entries if entry.path[0] == "rng")
    state: State = {}
    for entry in entries:
        if entry.path[0] not in PER_RANK or entry.path[1] == f"rank{team.rank % writers}":
            _set(state, entry.path, _blank(entry, like))
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(
                state,
                storage_reader=_CheckedReader(path, entries),
                planner=_PlainPlanner(),
                no_dist=team.kind == "none",
            )
    except CheckpointException as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of prunus: {_cause(error)}") from error
    has_checksums = any(block.crc32 for entry in entries for block in entry.shards)
    if state["format"] != FORMAT or not has_checksums:
        raise ValueError(f"{path} is damaged, or no checkpoint of prunus: it lacks checksums or the mark {FORMAT!r}")
    state = _ordered(state, json.loads(state["places"]))
    for key in PER_RANK:
        state[key] = next(iter(state[key].values()))
    return state


def _read_entries(path: Path) -> list[Entry]:
    try:
        entries = read_entries(path, verify=False)  # each rank verifies what it reads
        for entry in entries:
            if entry.size is not None:
                check_complete(path, entry)
        if not {("format",), ("places",), ("step",)} <= {entry.path for entry in entries}:
            raise ValueError(f"it lacks the mark {FORMAT!r}")
        if not any(entry.path[0] == "rng" for entry in entries):
            raise ValueError("no rank wrote its random state")
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of prunus: {error}") from error
    return entries


def _blank(entry: Entry, like: Mapping[str, Tensor]) -> Tensor | None:
    """Room for an entry; None for what is no tensor."""
    if entry.size is None:
        return None
    weight = next((like[key] for key in entry.path[1:] if key in like), None)
    if weight is None or weight.shape != entry.size:
        return torch.empty(entry.size, dtype=entry.dtype)
    return weight if entry.path[0] == "model" else torch.empty_like(weight, dtype=entry.dtype)


def _places(state: Mapping[str, Any], outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Keys from the outer mapping to the inner of every value: DCP keeps no order, and leaves out empty mappings."""
    places: list[tuple[str, ...]] = []
    for key, value in state.items():
        places += _places(value, (*outer, key)) if isinstance(value, Mapping) and value else [(*outer, key)]
    return places


def _ordered(state: Mapping[str, Any], places: list[list[str]]) -> State:
    """The state as it was saved, with ``places`` for its order; a place without a value is an empty mapping."""
    ordered: State = {}
    for place in places:
        value: Any = state
        for key in place:
            value = value.get(key, {})
        if place[0] not in PER_RANK:
            _set(ordered, tuple(place), value)
    return ordered | {key: state[key] for key in PER_RANK}


def _set(state: State, place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value


def _cause(error: CheckpointException) -> str:
    """The first rank's own words, in one line."""
    rank, (reason, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(reason).split())[:200]}"


def _metadata(entries: list[Entry]) -> Metadata:
    """The entries in DCP's own terms, without their places, which ``_CheckedReader`` knows."""
    kinds: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in entries:
        chunks = [ChunkStorageMetadata(torch.Size(s.offset or ()), torch.Size(s.size or ())) for s in entry.shards]
        kinds[entry.name] = BytesStorageMetadata()
        if entry.size is not None and entry.dtype is not None:
            properties = TensorProperties(dtype=entry.dtype)
            kinds[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
    return Metadata(kinds, {entry.name: entry.path for entry in entries}, {})


class _CheckedReader(dcp.FileSystemReader):
    """DCP's reader with metadata that were read already, and with blocks compared with their checksums."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        super().__init__(path)
        self.folder, self.metadata = path, _metadata(entries)
        self.blocks = {MetadataIndex(entry.name, block.offset): block for entry in entries for block in entry.shards}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        loaded: tuple[StoredBlock, Any] | None = None  # parts of one block may go to several places
        for item in sorted(plan.items, key=lambda item: (self.blocks[item.storage_index].file, item.storage_index.fqn)):
            block = self.blocks[item.storage_index]
            if loaded is None or loaded[0] != block:
                loaded = block, read_shard(self.folder, block)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, loaded[1])
                continue
            places = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(loaded[1][tuple(slice(start, start + n) for start, n in places)])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _PlainPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Take a value that ``_CheckedReader`` has read; torch's own would unpickle whatever is there."""
        _set(self.original_state_dict, self.mappings[read_item.dest_index.fqn], value)


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
    """A state ``by_name`` as the optimizer numbers its weights.

    A ``whole`` one is that of one process: masks are packed bits, and the optimizer's rows have them too.
    """
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
