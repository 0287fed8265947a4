"""Files of ``torch.save``: our training checkpoints, a Pruner's state, plain state dicts.

They are mapped into memory and read with ``weights_only``, so that nothing in them is executed.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..eligible import plain_name
from ..files.torch_file import read_saved
from .source import Source, Stored

MODELS = ("model", "state_dict", "model_state_dict")  # where scripts put the model's weights
RANK = re.compile(r"rank[-_]?\d+\.pt$")


def read(path: Path) -> Source:
    """Weights, masks, options and digests of one file, and the digest of the run's result beside it."""
    source = Source(path, "checkpoint")
    add_state(source, load(path), path.name)
    if not source.tensors:
        raise ValueError(f"{path} holds no tensors by name; expected a training checkpoint or a state dict")
    result = path.with_name("result.json")
    if path.name == "checkpoint.pt" and result.is_file():
        _add_result(source, result)
    return source


def rank_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.pt") if RANK.search(path.name))


def read_ranks(folder: Path, files: Sequence[Path]) -> Source:
    """One rank's weights and masks; of the others the digests, stored or taken from their masks."""
    from .digests import digest_of

    source = Source(folder, "checkpoint of ranks")
    for path in files:
        state = load(path)
        if not source.tensors:
            add_state(source, state, path.name)
            continue
        other = Source(path, "")
        add_state(other, state, path.name)
        source.digests |= other.digests
        if other.masks:
            source.digests[f"masks of {path.name}"] = digest_of(other.masks, source.tensors)
    if not source.tensors:
        raise ValueError(f"no file of {folder} holds tensors by name; the first is {files[0].name}")
    return source


def load(path: Path) -> Mapping[str, Any]:
    """The mapping that a file holds; whatever else it is, it is a ValueError."""
    try:
        state = read_saved(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole file of torch.save with plain tensors: {error}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds {type(state).__name__}, expected a mapping from names to tensors")
    return state


def add_state(source: Source, state: Mapping[str, Any], place: str) -> None:
    """Take over what a state holds: ours, a script's, or the bare weights."""
    weights: Mapping[Any, Any] = next((state[key] for key in MODELS if isinstance(state.get(key), Mapping)), state)
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and seen.setdefault(key, name) != name:
            source.notes.append(f"{plain_name(name)} is {plain_name(seen[key])}: one tensor under two names")
        source.tensors[plain_name(name)] = Stored.of(plain_name(name), value, place)
    pruner = state.get("pruner", state if "masks" in state else None)
    if isinstance(pruner, Mapping):
        source.masks |= masks_of(pruner, place)
        source.state |= {key: pruner[key] for key in ("step", "due") if key in pruner}
    if isinstance(state.get("run"), Mapping):
        source.run = dict(state["run"])
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        states = optimizer["state"].values()
        source.moments = [
            dict(row) for row in states if isinstance(row, Mapping) and isinstance(row.get("mask"), Tensor)
        ]
    source.digests |= dict(digests_in(state, place))


def masks_of(pruner: Mapping[str, Any], place: str) -> dict[str, Stored]:
    masks = pruner.get("masks")
    if not isinstance(masks, Mapping):
        return {}
    tensors = {plain_name(name): mask for name, mask in masks.items() if isinstance(mask, Tensor)}
    return {name: Stored.of(name, mask, place) for name, mask in tensors.items()}


def digests_in(value: object, place: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every string under a key that names a digest, with the path to it."""
    if not isinstance(value, Mapping) or depth > 4:
        return
    for key, inner in value.items():
        path = f"{place}: {key}" if depth == 0 else f"{place}.{key}"
        if "digest" in str(key):
            yield from strings(inner, path)
        else:
            yield from digests_in(inner, path, depth + 1)


def strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from strings(inner, f"{path}.{number}")


def _add_result(source: Source, path: Path) -> None:
    """The digest at the end of the run, if the checkpoint is of that step."""
    try:
        result = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        source.notes.append(f"{path.name} is not JSON")
        return
    if isinstance(result, dict) and result.get("steps") == source.state.get("step"):
        source.digests |= dict(digests_in(result, path.name))
