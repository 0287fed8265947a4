"""Checkpoints: files of ``torch.save`` (ours, a Pruner's state, plain state dicts) and distributed checkpoints.

Files are mapped into memory, shards put together one tensor at a time; nothing in them is executed.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..eligible import plain_name
from ..files.distributed import Entry, read_entries, read_shard, read_tensor
from ..files.json_file import read_json
from ..files.torch_file import read_torch_file
from .contents import Contents, StoredTensor, plain_dtype

MODELS = ("model", "state_dict", "model_state_dict")  # where scripts put the model's weights
NOT_WEIGHTS = ("optimizer", "optim", "pruner", "rng", "cuda_rng")
REPEATED = 1 << 28  # bytes that tensors may be larger than their storage, which strides of 0 allow


def read_checkpoint(path: Path) -> Contents:
    """Weights, masks, optimizer state and digests of one file, and the digest of the run's result beside it."""
    contents, state = Contents(path, "checkpoint"), load_mapping(path)
    add_state(contents, state, path.name)
    if not contents.tensors:
        raise ValueError(f"{path} holds no tensors by name; expected a training checkpoint or a state dict")
    result = path.with_name("result.json")
    if path.name == "checkpoint.pt" and result.is_file():
        try:
            values = read_json(result)
        except ValueError:
            contents.notes.append(f"{result.name} is not JSON")
        else:
            pruner = state.get("pruner")
            if isinstance(pruner, Mapping) and values.get("steps") == pruner.get("step"):
                contents.digests |= digests_in(values, result.name)
    return contents


def load_mapping(path: Path) -> Mapping[Any, Any]:
    """The mapping that a file of ``torch.save`` holds; ValueError if it is anything else."""
    try:
        state = read_torch_file(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole file of torch.save with plain tensors: {error}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds {type(state).__name__}, expected a mapping from names to tensors")
    return state


def add_state(contents: Contents, state: Mapping[Any, Any], file: str) -> None:
    """Take over what a state holds: ours, a script's, or the bare weights."""
    weights = next((state[key] for key in MODELS if isinstance(state.get(key), Mapping)), state)
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in dense_tensors(weights):
        first = seen.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
        if value.numel() and first != name:
            contents.notes.append(f"{name} is {first}: one tensor under two names")
        contents.tensors[name] = StoredTensor.of(name, value, file)
    contents.digests |= digests_in(state, file)
    pruner = state.get("pruner", state if "masks" in state else None)
    if isinstance(pruner, Mapping):
        contents.masks |= masks_in(pruner.get("masks"), file)
        contents.digests |= digests_in(pruner, file) if pruner is not state else {}
    if isinstance(run := state.get("run"), Mapping) and isinstance(run.get("model"), str):
        contents.model = run["model"]
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        rows = [dict(dense_tensors(row)) for row in optimizer["state"].values() if isinstance(row, Mapping)]
        rows = [{key: value for key, value in row.items() if not value.is_quantized} for row in rows]
        contents.moments = [row for row in rows if "mask" in row]


def masks_in(masks: Any, file: str) -> dict[str, StoredTensor]:
    tensors = dense_tensors(masks) if isinstance(masks, Mapping) else ()
    return {name: StoredTensor.of(name, mask, file) for name, mask in tensors if not mask.is_quantized}


def dense_tensors(values: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names; ValueError for one that is not dense, or larger than the file that holds it."""
    repeated = 0
    for name, value in values.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            raise ValueError(f"{name} is not a dense tensor of the CPU; save it as one to have it examined")
        num_bytes, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        repeated += max(0, num_bytes - stored)
        if repeated > REPEATED:
            raise ValueError(
                f"{name} is {tuple(value.shape)}, which repeats {stored:,} stored bytes; save a plain tensor"
            )
        yield plain_name(name), value


def digests_in(values: Mapping[Any, Any], place: str) -> dict[str, str]:
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


def read_distributed(path: Path) -> Contents:
    """Weights, masks and digests of all ranks; a missing file or shard is a finding."""
    contents = Contents(path, "distributed checkpoint")
    try:
        entries = read_entries(path)
    except ValueError as error:
        raise ValueError(f"{path / '.metadata'} does not describe a distributed checkpoint: {error}") from error
    for entry in entries:
        if _is_stored(contents, entry):
            (_add_value if entry.size is None else _add_tensor)(contents, entry)
    if not contents.tensors:
        raise ValueError(f"{path} holds no tensors of a model")
    return contents


def _is_stored(contents: Contents, entry: Entry) -> bool:
    """Whether the files have all bytes of an entry; what is missing is a finding."""
    name, before = ".".join(entry.path), len(contents.findings)
    if not entry.shards and (entry.size is None or prod(entry.size)):
        contents.find("missing", name, "no rank wrote it", "save the checkpoint anew, with all ranks")
    for file in dict.fromkeys(shard.file for shard in entry.shards):
        path = contents.path / file
        size = path.stat().st_size if path.is_file() else -1
        if any(shard.start + shard.length > size for shard in entry.shards if shard.file == file):
            what = "is not there" if size < 0 else "is cut short"
            contents.find("missing", name, f"{file}, which holds a part of it, {what}", "copy the file again")
    return len(contents.findings) == before


def _add_tensor(contents: Contents, entry: Entry) -> None:
    assert entry.size is not None and entry.dtype is not None
    keys, target = entry.path, contents.tensors
    if "masks" in keys[:-1]:
        keys, target = keys[keys.index("masks") + 1 :], contents.masks
    elif keys[0] in MODELS and len(keys) > 1:
        keys = keys[1:]
    elif keys[0] in NOT_WEIGHTS:
        return
    name, file = plain_name(".".join(keys)), entry.shards[0].file if entry.shards else ".metadata"
    load = partial(read_tensor, contents.path, entry)
    target[name] = StoredTensor(name, entry.size, plain_dtype(entry.dtype), file, load)


def _add_value(contents: Contents, entry: Entry) -> None:
    """The digests and the name of the model; other values are not read."""
    is_digest, is_model = any("digest" in key for key in entry.path), entry.path == ("run", "model")
    if len(entry.shards) == 1 and (is_digest or is_model):
        value = read_shard(contents.path, entry.shards[0])
        if is_digest:
            contents.digests |= _strings(value, f"{entry.shards[0].file}: {'.'.join(entry.path)}")
        elif isinstance(value, str):
            contents.model = value
