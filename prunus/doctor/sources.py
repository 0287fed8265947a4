"""What a path holds, names and shapes first, values one tensor at a time; nothing in its files is executed.

A path is a Hugging Face folder, a safetensors file, plain or small, a file of torch.save, or a distributed checkpoint.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..eligible import plain_name
from ..files.distributed import read_entries, read_shard, read_tensor
from ..files.json_file import read_json
from ..files.reader import PLAIN, SMALL, Tensors, located, open_tensors
from ..files.safetensors_header import DTYPES
from ..files.torch_file import read_torch_file
from .pattern import plain_dtype, widened

INDEX = ".safetensors.index.json"
SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
MODELS = ("model", "state_dict", "model_state_dict")  # where scripts put the model's weights
NOT_WEIGHTS = ("optimizer", "optim", "pruner", "rng", "cuda_rng")
REPEATED = 1 << 28  # bytes that tensors may be larger than their storage, which strides of 0 allow


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when ``load`` is called, and the file it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    load: Callable[[], Tensor]

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers, not pairs of them as in float4."""
        return self.dtype.startswith(("float", "bfloat")) and not self.dtype.startswith("float4")

    @classmethod
    def of(cls, name: str, tensor: Tensor, file: str) -> "StoredTensor":
        """A tensor that is in memory, or mapped into it."""
        return cls(name, tuple(tensor.shape), plain_dtype(tensor.dtype), file, lambda: tensor.detach())


@dataclass
class Contents:
    """What a path holds; ``notes`` are those of reading it."""

    path: Path
    kind: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    masks: dict[str, StoredTensor] = field(default_factory=dict)  # boolean, or packed bits
    config: dict[str, Any] = field(default_factory=dict)  # config.json of Hugging Face
    pruned: dict[str, Any] = field(default_factory=dict)  # result.json of ``prunus prune``
    model: str = ""  # of ``prunus train``
    moments: list[dict[str, Tensor]] = field(default_factory=list)  # optimizer state of weights that have a mask
    digests: dict[str, str] = field(default_factory=dict)  # by the place that stores them
    notes: list[str] = field(default_factory=list)


def read_contents(path: Path, stack: ExitStack) -> Contents:
    """The model, checkpoint or file at ``path``, whose files ``stack`` closes; ValueError for anything else."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return _read_distributed(path)
        if (path / "checkpoint.pt").is_file():
            return _read_checkpoint(path / "checkpoint.pt")
        if sharded := [p.parent for p in path.glob("checkpoint-*/.metadata") if p.parent.name[11:].isdecimal()]:
            return _read_distributed(max(sharded, key=lambda p: int(p.name[11:])))
        return _read_folder(path, stack)
    path = located(path)
    is_safetensors = path.name.endswith((".safetensors", INDEX))
    return _read_safetensors(path, path, stack) if is_safetensors else _read_checkpoint(path)


def read_masks(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """Masks from a safetensors file, from a checkpoint, or from a Pruner's state."""
    if not path.is_file():
        raise ValueError(f"there is no mask file {path}")
    if path.name.endswith(".safetensors"):
        masks = _stored_tensors(stack.enter_context(open_tensors(path)))
    else:
        state, contents = _load_mapping(path), Contents(path, "")
        _add_state(contents, state, path.name)
        masks = contents.masks or _masks_in(state, path.name)
    if not masks:
        raise ValueError(f"{path} holds no masks; expected booleans or packed bits by the names of the weights")
    for stored in masks.values():
        if stored.is_float and not ((values := widened(stored.load())).eq(0) | values.eq(1)).all():
            raise ValueError(f"{stored.name} in {path} is no mask: expected booleans, packed bits, or zeros and ones")
    return masks


def _read_folder(folder: Path, stack: ExitStack) -> Contents:
    """The one model of a folder; what its index and its files disagree about is a ValueError."""
    files, indexes = sorted(folder.glob("*.safetensors")), sorted(folder.glob(f"*{INDEX}"))
    models = [path for path in (*files, *indexes) if path.name.startswith((PLAIN, SMALL))] or indexes or files
    if not models:
        others = "; expected a Hugging Face folder, a run folder or a distributed checkpoint"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            others = "; pickled weights (.bin, .pth) are not read: save the model with safe_serialization=True"
        raise ValueError(f"{folder} has no safetensors file{others}")
    if len(models) > 1:
        what = "delete the outdated one, or name the one that you mean"
        if SHARD.search(models[0].name):
            what = f"shards need their index, model{INDEX}: copy it, or save the model again"
        raise ValueError(f"{folder} holds {models[0].name} and {models[1].name}; {what}")
    contents = _read_safetensors(folder, models[0], stack)
    with suppress(ValueError):
        values = _json_beside(models[0], "result.json")
        if isinstance(values.get("settings"), dict) and isinstance(values.get("layers"), list):
            contents.pruned = values
    return contents


def _read_safetensors(path: Path, file: Path, stack: ExitStack) -> Contents:
    tensors = stack.enter_context(open_tensors(file))
    is_folder = path.is_dir() or (path.name.endswith(INDEX) and not tensors.is_small)
    kind = ("small " if tensors.is_small else "") + ("folder" if is_folder else "file")
    contents = Contents(path, kind, _stored_tensors(tensors))
    if is_folder:
        contents.notes += _other_files(file, {one.path.name for one in tensors.files})
    if is_folder or tensors.is_small:
        contents.config = _json_beside(file, "config.json")
    if tensors.is_small:
        records = tensors.records
        aliases = {name: record.same_as for name, record in records.items() if record.same_as is not None}
        contents.notes += [f"{name} is {other}: one tensor under two names" for name, other in aliases.items()]
        dense, stored = sum(one.dense_bytes for one in records.values()), sum(map(tensors.stored_bytes, records))
        note = f"it takes {stored:,} bytes where plain tensors take {dense:,}: {stored / max(1, dense):.3f}"
        contents.notes.append(note)
        grids = [one.layout.grid for one in records.values() if one.layout.grid is not None]
        for num_bits in sorted({grid.bits for grid in grids}):
            number = sum(grid.bits == num_bits for grid in grids)
            contents.notes.append(f"kept weights of {number} tensor{'s' if number > 1 else ''} are in {num_bits} bits")
    return contents


def _other_files(file: Path, read: set[str]) -> list[str]:
    """A note on the files beside those of a model; ValueError for a shard of its name, which some tools load too."""
    others = sorted({other.name for other in file.parent.glob("*.safetensors")} - read)
    stems = {SHARD.sub("", name).removesuffix(".safetensors") for name in read}
    if old := [name for name in others if SHARD.search(name) and SHARD.sub("", name) in stems]:
        raise ValueError(f"{file.parent} holds {old[0]}, which {file.name} does not list; delete it if it is outdated")
    return [f"not read, since {file.name} does not name them: {', '.join(others)}"] if others else []


def _stored_tensors(tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors that are not read yet; those of plain files with layer 2 before layer 10."""
    stored: dict[str, StoredTensor] = {}
    for name, record in tensors.records.items():
        file, dtype, plain = tensors.homes[name].path.name, plain_dtype(DTYPES[record.dtype]), plain_name(name)
        if plain in stored:
            raise ValueError(f"{tensors.path} holds {plain!r} twice, with and without a wrapper's prefix")
        stored[plain] = StoredTensor(plain, record.layout.shape, dtype, file, partial(tensors.read, name))
    if tensors.is_small:
        return stored
    return dict(sorted(stored.items(), key=lambda item: [(len(p) * p.isdecimal(), p) for p in item[0].split(".")]))


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    beside = path.with_name(name)
    return read_json(beside) if beside.is_file() else {}


def _read_checkpoint(path: Path) -> Contents:
    """Weights, masks, optimizer state and digests of one file, and the digest of the run's result beside it."""
    contents, state = Contents(path, "checkpoint"), _load_mapping(path)
    _add_state(contents, state, path.name)
    if not contents.tensors:
        raise ValueError(f"{path} holds no tensors by name; expected a training checkpoint or a state dict")
    if path.name == "checkpoint.pt":
        try:
            result, pruner = _json_beside(path, "result.json"), state.get("pruner")
            if isinstance(pruner, Mapping) and result.get("steps") == pruner.get("step"):
                contents.digests |= _digests_in(result, "result.json")
        except ValueError:
            contents.notes.append("result.json is not JSON")
    return contents


def _load_mapping(path: Path) -> Mapping[Any, Any]:
    try:
        state = read_torch_file(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{path} is not a complete torch.save file of plain tensors: {error}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds {type(state).__name__}, expected a mapping from names to tensors")
    return state


def _add_state(contents: Contents, state: Mapping[Any, Any], file: str) -> None:
    """Take over what a state holds: ours, a script's, or the bare weights."""
    weights = next((state[key] for key in MODELS if isinstance(state.get(key), Mapping)), state)
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in _dense_tensors(weights):
        first = seen.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
        if value.numel() and first != name:
            contents.notes.append(f"{name} is {first}: one tensor under two names")
        contents.tensors[name] = StoredTensor.of(name, value, file)
    contents.digests |= _digests_in(state, file)
    pruner = state.get("pruner", state if "masks" in state else None)
    if isinstance(pruner, Mapping):
        contents.masks |= _masks_in(pruner.get("masks"), file)
        contents.digests |= _digests_in(pruner, file)
    if isinstance(run := state.get("run"), Mapping) and isinstance(run.get("model"), str):
        contents.model = run["model"]
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        rows = [dict(_dense_tensors(row)) for row in optimizer["state"].values() if isinstance(row, Mapping)]
        rows = [{key: value for key, value in row.items() if not value.is_quantized} for row in rows]
        contents.moments = [row for row in rows if "mask" in row]


def _masks_in(masks: Any, file: str) -> dict[str, StoredTensor]:
    tensors = _dense_tensors(masks) if isinstance(masks, Mapping) else ()
    return {name: StoredTensor.of(name, mask, file) for name, mask in tensors if not mask.is_quantized}


def _dense_tensors(values: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names; ValueError for one that is not dense, or larger than the file that holds it."""
    repeated = 0
    for name, value in values.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            raise ValueError(f"{name} is not a dense CPU tensor; save it as one")
        num_bytes, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        repeated += max(0, num_bytes - stored)
        if repeated > REPEATED:
            raise ValueError(
                f"{name} is {tuple(value.shape)}, but only {stored:,} bytes are stored for it; save a plain tensor"
            )
        yield plain_name(name), value


def _digests_in(values: Mapping[Any, Any], place: str) -> dict[str, str]:
    """The strings under keys that name a digest, one or one for each rank, by the place that stores them."""
    digests: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(key, str) and "digest" in key:
            digests |= _strings(value, f"{place}: {key}")
    return digests


def _strings(value: Any, place: str) -> dict[str, str]:
    if isinstance(value, str):
        return {place: value}
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {f"{place}.{key}": one for key, one in inner if isinstance(key, str | int) and isinstance(one, str)}


def _read_distributed(path: Path) -> Contents:
    contents = Contents(path, "distributed checkpoint")
    try:
        entries = read_entries(path)
    except ValueError as error:
        raise ValueError(f"{path / '.metadata'} does not describe a distributed checkpoint: {error}") from error
    for entry in entries:
        keys, file = entry.path, entry.shards[0].file if entry.shards else ".metadata"
        if entry.size is not None and entry.dtype is not None:
            if "masks" in keys[:-1]:
                keys, target = keys[keys.index("masks") + 1 :], contents.masks
            elif keys[0] in NOT_WEIGHTS:
                continue
            else:
                keys, target = keys[1:] if keys[0] in MODELS and len(keys) > 1 else keys, contents.tensors
            name, load = plain_name(".".join(keys)), partial(read_tensor, path, entry)
            target[name] = StoredTensor(name, entry.size, plain_dtype(entry.dtype), file, load)
        elif len(entry.shards) == 1 and any("digest" in key for key in keys):
            contents.digests |= _strings(read_shard(path, entry.shards[0]), f"{file}: {'.'.join(keys)}")
        elif len(entry.shards) == 1 and keys == ("run", "model"):
            value = read_shard(path, entry.shards[0])
            contents.model = value if isinstance(value, str) else ""
    if not contents.tensors:
        raise ValueError(f"{path} holds no model tensors")
    return contents
