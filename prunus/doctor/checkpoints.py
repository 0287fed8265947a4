"""Checkpoints: files of ``torch.save`` (ours, a Pruner's state, plain state dicts) and distributed checkpoints.

Files are mapped into memory, shards put together one tensor at a time; nothing in them is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from ..eligible import plain_name
from ..files.distributed import Entry, read_entries, read_shard, read_tensor
from ..files.json_file import read_json
from ..files.torch_file import read_torch_file
from .contents import Contents, StoredTensor, digest_of, dtype_name

MODELS = ("model", "state_dict", "model_state_dict")  # where scripts put the model's weights
NOT_WEIGHTS = ("optimizer", "optim", "pruner", "rng", "cuda_rng")
RANK = re.compile(r"rank[-_]?\d+\.pt$")


def read_checkpoint(path: Path) -> Contents:
    """Weights, masks, options and digests of one file, and the digest of the run's result beside it."""
    contents = Contents(path, "checkpoint")
    add_state(contents, load_mapping(path), path.name)
    if not contents.tensors:
        raise ValueError(f"{path} holds no tensors by name; expected a training checkpoint or a state dict")
    result = path.with_name("result.json")
    if path.name == "checkpoint.pt" and result.is_file():
        try:
            values = read_json(result)
        except ValueError:
            contents.notes.append(f"{result.name} is not JSON")
        else:
            if values.get("steps") == contents.state.get("step"):
                contents.digests |= dict(_digests_in(values, result.name))
    return contents


def rank_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.pt") if RANK.search(path.name))


def read_ranks(folder: Path, files: Sequence[Path]) -> Contents:
    """One rank's weights and masks; of the others the digests, stored or taken from their masks."""
    contents = Contents(folder, "checkpoint of ranks")
    for path in files:
        state = load_mapping(path)
        if not contents.tensors:
            add_state(contents, state, path.name)
            continue
        other = Contents(path, "")
        add_state(other, state, path.name)
        contents.digests |= other.digests
        if other.masks:
            contents.digests[f"masks of {path.name}"] = digest_of(other.masks, contents.tensors)
    if not contents.tensors:
        raise ValueError(f"no file of {folder} holds tensors by name; the first is {files[0].name}")
    return contents


def load_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping that a file of ``torch.save`` holds; ValueError if it is anything else."""
    try:
        state = read_torch_file(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole file of torch.save with plain tensors: {error}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds {type(state).__name__}, expected a mapping from names to tensors")
    return state


def add_state(contents: Contents, state: Mapping[str, Any], file: str) -> None:
    """Take over what a state holds: ours, a script's, or the bare weights."""
    weights: Mapping[Any, Any] = next((state[key] for key in MODELS if isinstance(state.get(key), Mapping)), state)
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and seen.setdefault(key, name) != name:
            contents.notes.append(f"{plain_name(name)} is {plain_name(seen[key])}: one tensor under two names")
        contents.tensors[plain_name(name)] = StoredTensor.of(plain_name(name), value, file)
    pruner = state.get("pruner", state if "masks" in state else None)
    if isinstance(pruner, Mapping):
        contents.masks |= masks_in(pruner, file)
        contents.state |= {key: pruner[key] for key in ("step", "due") if key in pruner}
    if isinstance(state.get("run"), Mapping):
        contents.run = dict(state["run"])
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        rows = optimizer["state"].values()
        contents.moments = [
            dict(row) for row in rows if isinstance(row, Mapping) and isinstance(row.get("mask"), Tensor)
        ]
    contents.digests |= dict(_digests_in(state, file))


def masks_in(pruner: Mapping[str, Any], file: str) -> dict[str, StoredTensor]:
    masks = pruner.get("masks")
    if not isinstance(masks, Mapping):
        return {}
    tensors = {plain_name(name): mask for name, mask in masks.items() if isinstance(mask, Tensor)}
    return {name: StoredTensor.of(name, mask, file) for name, mask in tensors.items()}


def _digests_in(value: object, place: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every string under a key that names a digest, with the path to it."""
    if not isinstance(value, Mapping) or depth > 4:
        return
    for key, inner in value.items():
        path = f"{place}: {key}" if depth == 0 else f"{place}.{key}"
        if "digest" in str(key):
            yield from _strings_in(inner, path)
        else:
            yield from _digests_in(inner, path, depth + 1)


def _strings_in(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings_in(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _strings_in(inner, f"{path}.{number}")


def read_distributed(path: Path) -> Contents:
    """Weights, masks, options and digests of all ranks; a missing file or shard is a finding."""
    contents = Contents(path, "distributed checkpoint")
    try:
        entries = read_entries(path)
    except ValueError as error:
        raise ValueError(f"{path / '.metadata'} does not describe a distributed checkpoint: {error}") from error
    for entry in entries:
        if not _is_stored(contents, entry):
            continue
        if entry.size is None:
            _add_value(contents, entry)
        else:
            _add_tensor(contents, entry)
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
    target[name] = StoredTensor(name, entry.size, dtype_name(entry.dtype), file, load)


def _add_value(contents: Contents, entry: Entry) -> None:
    """Options, the pruner's step and the digests; other values are not read."""
    keys = entry.path
    is_digest = any("digest" in key for key in keys)
    if len(entry.shards) != 1 or not (is_digest or keys[0] in ("run", "pruner")):
        return
    value = read_shard(contents.path, entry.shards[0])
    if is_digest:
        contents.digests |= dict(_strings_in(value, f"{entry.shards[0].file}: {'.'.join(keys)}"))
    elif keys[0] == "run" and len(keys) == 2:
        contents.run[keys[1]] = value
    elif keys[0] == "pruner" and keys[-1] in ("step", "due"):
        contents.state[keys[-1]] = value
