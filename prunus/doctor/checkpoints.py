"""Checkpoints: files of ``torch.save`` (ours, a Pruner's state, plain state dicts) and distributed checkpoints.

Files are mapped into memory, shards put together one tensor at a time; nothing in them is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
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
from ..schedule import SHAPES, event_period
from .contents import Contents, StoredTensor, digest_of, dtype_name

MODELS = ("model", "state_dict", "model_state_dict")  # where scripts put the model's weights
NOT_WEIGHTS = ("optimizer", "optim", "pruner", "rng", "cuda_rng")
RANK = re.compile(r"rank[-_]?\d+\.pt$")  # names of files that ranks write
DEPTH = 5  # of the mappings that digests are looked for in
REPEATED = 1 << 28  # bytes that tensors may be larger than their storage, which strides of 0 allow
ALLOCATE = {"uniform": "layer", "row": "row", "2:4": "2:4"}  # others promise the total alone


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
                contents.digests |= digests_in(values, result.name)
    return contents


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
            contents.digests[f"masks of {path.name}"] = digest_of(other.masks, contents.tensors) or "no masks"
    if not contents.tensors:
        raise ValueError(f"no file of {folder} holds tensors by name; the first is {files[0].name}")
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
    pruner = state.get("pruner", state if "masks" in state else None)
    if isinstance(pruner, Mapping):
        contents.masks |= masks_in(pruner.get("masks"), file)
        contents.state |= {key: pruner[key] for key in ("step", "due") if isinstance(pruner.get(key), int)}
    if isinstance(state.get("run"), Mapping):
        contents.run = {key: value for key, value in state["run"].items() if isinstance(key, str) and _is_option(value)}
    optimizer = state.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        rows = [dict(dense_tensors(row)) for row in optimizer["state"].values() if isinstance(row, Mapping)]
        rows = [{key: value for key, value in row.items() if not value.is_quantized} for row in rows]
        contents.moments = [row for row in rows if "mask" in row]
    contents.digests |= digests_in(state, file)


def _is_option(value: Any) -> bool:
    """Whether it is what options of a run are: text, a number, or several texts."""
    texts = value if isinstance(value, list | tuple) else ()
    return isinstance(value, str | int | float | list | tuple) and all(isinstance(text, str) for text in texts)


def masks_in(masks: Any, file: str) -> dict[str, StoredTensor]:
    found = dense_tensors(masks) if isinstance(masks, Mapping) else ()
    return {name: StoredTensor.of(name, mask, file) for name, mask in found if not mask.is_quantized}


def dense_tensors(values: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their names; ValueError for one that is not dense, or larger than the file that holds it."""
    repeated = 0
    for name, value in values.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
            raise ValueError(f"{name} is not a dense tensor of the CPU; save it as one to have it examined")
        num_bytes, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        repeated += num_bytes - stored if num_bytes > stored else 0
        if repeated > REPEATED:
            raise ValueError(
                f"{name} is {tuple(value.shape)}, which repeats {stored:,} stored bytes; save a plain tensor"
            )
        yield plain_name(name), value


def digests_in(value: Any, place: str, *, is_digest: bool = False) -> dict[str, str]:
    """Every string under a key that names a digest, by the path to it; what repeats inside is taken once."""
    found: dict[str, str] = {}
    seen: set[int] = set()

    def collect(value: Any, path: str, is_digest: bool, depth: int) -> None:
        if isinstance(value, str) and is_digest:
            found[path] = value
        if depth == DEPTH or id(value) in seen or isinstance(value, str):
            return
        seen.add(id(value))
        is_list = isinstance(value, list | tuple) and is_digest
        for key, inner in enumerate(value) if is_list else value.items() if isinstance(value, Mapping) else ():
            if isinstance(key, str | int):
                joined = f"{path}: {key}" if path == place else f"{path}.{key}"
                collect(inner, joined, is_digest or "digest" in str(key), depth + 1)

    collect(value, place, is_digest, 0)
    return found


def of_run(contents: Contents) -> dict[str, Any]:
    """Sparsity, pattern and patterns of names that a training checkpoint was made with, as far as it says."""
    run = contents.run
    found: dict[str, Any] = {
        name: tuple(run[name]) for name in ("include", "exclude") if isinstance(run.get(name), list | tuple)
    }
    if run.get("score", "none") == "none" or _number(run, "sparsity") is None:
        return found
    sparsity = sparsity_at(run, contents.state)
    if sparsity is None:
        contents.notes.append(
            "the run is on its way to its sparsity, which is not checked: an event is due or was late"
        )
        return found
    if sparsity == 0:
        return found | ({"sparsity": 0.0} if contents.masks else {})  # without masks a zero is just a value
    return found | {"sparsity": sparsity, "pattern": ALLOCATE.get(str(run.get("allocate")), "global")}


def sparsity_at(run: Mapping[str, Any], state: Mapping[str, int]) -> float | None:
    """What the last event up to the checkpoint's step asked for; None if an event was put off."""
    final, step, schedule = _number(run, "sparsity"), state.get("step"), str(run.get("schedule"))
    if final is None or state.get("due") or step is None:
        return None
    if schedule == "constant":
        return final if step >= 1 else 0.0
    begin, end = (_step(run, name) for name in ("begin", "end"))
    if begin is None or end is None:
        return None
    if schedule == "one_shot":
        return final if step >= max(begin, 1) else 0.0
    if schedule not in SHAPES or begin >= end:
        return None
    if step >= end:
        return final
    if step < max(begin, 1):
        return 0.0
    every = run.get("every")
    every = event_period(begin, end) if every is None else every
    if run.get("spam") or not isinstance(every, int) or every < 1:
        return None  # with SPAM an event waits for moments that were reset, and then asks for more
    event = begin + (step - begin) // every * every
    return final * SHAPES[schedule]((event - begin) / (end - begin))


def _step(run: Mapping[str, Any], name: str) -> int | None:
    """A moment of the run as a step: JSON keeps apart 1 and 1.0, a fraction of the run."""
    moment, steps, scale = (_number(run, key) for key in (name, "steps", "budget_scale"))
    if isinstance(moment, int) or not isinstance(moment, float) or not isinstance(steps, int):
        return moment if isinstance(moment, int) else None
    return round(moment * round(steps * (1.0 if scale is None else scale)))


def _number(run: Mapping[str, Any], name: str) -> float | int | None:
    """An option that is a number of usual size."""
    value = run.get(name)
    return value if isinstance(value, int | float) and abs(value) < 1 << 53 else None


def read_distributed(path: Path) -> Contents:
    """Weights, masks, options and digests of all ranks; a missing file or shard is a finding."""
    contents = Contents(path, "distributed checkpoint")
    try:
        entries = read_entries(path)
    except ValueError as error:
        raise ValueError(f"{path / '.metadata'} does not describe a distributed checkpoint: {error}") from error
    for entry in entries:
        if entry.path and _is_stored(contents, entry):
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
    target[name] = StoredTensor(name, entry.size, dtype_name(entry.dtype), file, load)


def _add_value(contents: Contents, entry: Entry) -> None:
    """Options, the pruner's step and the digests; other values are not read."""
    keys = entry.path
    is_digest = any("digest" in key for key in keys)
    if len(entry.shards) != 1 or not (is_digest or keys[0] in ("run", "pruner")):
        return
    value = read_shard(contents.path, entry.shards[0])
    if is_digest:
        contents.digests |= digests_in(value, f"{entry.shards[0].file}: {'.'.join(keys)}", is_digest=True)
    elif keys[0] == "run" and len(keys) == 2 and _is_option(value):
        contents.run[keys[1]] = value
    elif keys[0] == "pruner" and keys[-1] in ("step", "due") and isinstance(value, int):
        contents.state[keys[-1]] = value
