"""Checkpoints in pieces: every rank writes what it holds with ``torch.distributed.checkpoint``.

A checkpoint is a folder ``checkpoint-STEP`` with one file a rank and ``.metadata``. It does not depend on how many
ranks wrote it or how they were wrapped: optimizer state goes by the weight's name, masks are those of whole weights,
and each rank's random state and digest stand under its number. DCP keeps descriptions and plain values as pickles;
here they are read by unpicklers that know the few types that such a description needs, and no other.
"""

import io
import json
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta, TensorStorageMetadata

from ..files.atomic import flushed
from ..files.plain_pickle import plain
from ..files.torch_file import read_saved
from .checkpoint import drop_pieces
from .parallel import Team

FORMAT = "prunus-pieces-1"
PER_RANK = ("rng", "cuda_rng", "digest")


def save_pieces(folder: Path, state: Mapping[str, Any], team: Team) -> Path:
    """The new checkpoint of a run folder; older ones go once it is whole and in its place."""
    path = folder / f"checkpoint-{state['step']}"
    part = path.with_name(path.name + ".part")
    team.first(lambda: shutil.rmtree(part, ignore_errors=True))
    own = dict(state)
    for key in PER_RANK:
        own[key] = {f"rank{team.rank}": state[key]}
    try:
        places = json.dumps(_places(own))
        dcp.save({"format": FORMAT, "places": places, **own}, storage_writer=dcp.FileSystemWriter(part))
    except CheckpointException as error:
        raise OSError(f"{path} could not be written: {_cause(error)}") from error
    team.first(lambda: _publish(part, path))
    return path


def _publish(part: Path, path: Path) -> None:
    flushed(part)
    shutil.rmtree(path, ignore_errors=True)
    part.replace(path)
    flushed(path.parent)
    drop_pieces(path.parent, but=path)
    (path.parent / "checkpoint.pt").unlink(missing_ok=True)  # of an earlier step


def load_pieces(path: Path, like: Mapping[str, Tensor], team: Team = Team()) -> dict[str, Any]:
    """The state that ``save_pieces`` wrote, put together for this rank.

    ``like`` are the model's tensors by name: its weights are read into them, and what belongs to a weight is cut
    over ranks as the weight is. A name that is not there becomes a whole tensor on the CPU.
    """
    reader = _Reader(path)
    metadata = team.each(reader.read_metadata)
    if "format" not in metadata.state_dict_metadata:
        raise ValueError(f"{path} is not a checkpoint of prunus: it lacks the mark {FORMAT!r}")
    writers = sum(1 for place in metadata.planner_data.values() if place[0] == "rng")
    state: dict[str, Any] = {}
    for name, kind in metadata.state_dict_metadata.items():
        place = metadata.planner_data[name]
        if place[0] not in PER_RANK or place[1] == f"rank{team.rank % writers}":
            _set(state, place, _blank(place, kind, like))
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=team.kind == "none")
    except CheckpointException as error:
        raise ValueError(f"{path} is not a whole checkpoint of prunus: {_cause(error)}") from error
    state = _ordered(state, json.loads(state["places"]))
    for key in PER_RANK:
        state[key] = next(iter(state[key].values()))
    return state


def _blank(place: tuple[Any, ...], kind: Any, like: Mapping[str, Tensor]) -> Tensor | None:
    """Room for an entry; None for what is no tensor."""
    if not isinstance(kind, TensorStorageMetadata):
        return None
    dtype, weight = kind.properties.dtype, next((like[key] for key in place[1:] if key in like), None)
    if weight is None or weight.shape != kind.size:
        return torch.empty(kind.size, dtype=dtype)
    return weight if place[0] == "model" else torch.empty_like(weight, dtype=dtype)


def _places(state: Mapping[str, Any], outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Keys from the outer mapping to the inner of every value: DCP keeps no order, and leaves out empty mappings."""
    found: list[tuple[str, ...]] = []
    for key, value in state.items():
        found += _places(value, (*outer, key)) if isinstance(value, Mapping) and value else [(*outer, key)]
    return found


def _ordered(state: Mapping[str, Any], places: list[list[str]]) -> dict[str, Any]:
    """The state as it was saved, with ``places`` for its order; a place without a value is an empty mapping."""
    found: dict[str, Any] = {}
    for place in places:
        value: Any = state
        for key in place:
            value = value.get(key, {})
        if place[0] not in PER_RANK:
            _set(found, tuple(place), value)
    return found | {key: state[key] for key in PER_RANK}


def _set(state: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value


def _cause(error: CheckpointException) -> str:
    """The first rank's own words, in one line."""
    rank, (reason, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(reason).split())[:200]}"


DESCRIPTION = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)),
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


# what reading and making of a damaged description raises, torch's own types among it
DAMAGED = (ValueError, TypeError, AttributeError, EOFError, LookupError, RuntimeError, pickle.UnpicklingError)


class _Description(pickle.Unpickler):
    """Reads DCP's description, and makes nothing that a description does not need."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        if global_name not in DESCRIPTION.get(module_name, ()):
            raise ValueError(f"it names {module_name}.{global_name}, which a checkpoint's description does not need")
        return super().find_class(module_name, global_name)


def _member(enum: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """What of ``getattr`` a description needs: early releases of Python 3.11 pickle an enum's member by its name."""
    if enum is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise ValueError("it names builtins.getattr, which a checkpoint's description does not need")
    return _MEM_FORMAT_ENCODING[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            data = (Path(self.path) / ".metadata").read_bytes()
            plain(data)  # refuses what would change a class or an enum's member, which find_class cannot see
            metadata = _Description(io.BytesIO(data)).load()
            _check_files(metadata)
        except DAMAGED as error:
            raise ValueError(f"{self.path} is not a whole checkpoint of prunus: {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _check_files(metadata: Any) -> None:
    """A ValueError where a description names a file outside of its folder, or a transformation of it."""
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
            raise ValueError(f"it names {info.relative_path!r}, which is no plain file of its folder")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: BinaryIO) -> None:
        """A plain value, read without executing anything; torch's own would unpickle whatever is there."""
        _set(self.original_state_dict, self.mappings[read_item.dest_index.fqn], read_saved(value))
