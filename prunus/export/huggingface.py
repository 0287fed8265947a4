"""Hugging Face models, to a small folder and back."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import unwrapped_model
from ..files.atomic import new_folder
from ..files.reader import SMALL, Tensors, open_tensors
from ..files.safetensors_header import DTYPES
from ..files.sparse_file import check_masks, in_memory
from ..files.writer import MAX_SHARD_BYTES, Saved, WritePlan, write
from ..ops.bits import words_of
from ..ops.machine import device_of
from .convert import copy_beside

AnyPath = str | os.PathLike[str]


def save_model(
    model: nn.Module,
    folder: AnyPath,
    *,
    masks: Mapping[str, Tensor] | None = None,
    source: AnyPath | None = None,
    replace: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved:
    """Write a model to a new folder in the small form; what became of each tensor is returned.

    ``source`` is a folder whose tokenizer and other small files are copied. With ``masks``, a model that has
    a non-zero weight where its mask says pruned is refused. The folder appears when it is whole; one that is
    there and not empty is refused, or swapped for the new one with ``replace``.
    """
    inner = unwrapped_model(model)
    tensors = inner.state_dict()
    if masks is not None:
        check_masks(tensors, masks)
    with new_folder(Path(folder), replace) as part:
        for name in ("config", "generation_config"):
            if hasattr(getattr(inner, name, None), "save_pretrained"):
                getattr(inner, name).save_pretrained(part)
        _name_the_class(part / "config.json", type(inner).__name__)
        if source is not None:
            copy_beside(Path(source), part)
        saved = write(in_memory(tensors, {"format": "pt"}), WritePlan(part / SMALL, max_shard_bytes=max_shard_bytes))
    return Saved([Path(folder) / path.name for path in saved.files], saved.rows)


def load_model(folder: AnyPath, device: torch.device | str = "cpu") -> Any:
    """The transformers model of a folder, in evaluation mode, on ``device``.

    Its tensors travel there packed, one at a time; no code that lies in the folder is run.
    """
    folder, device = Path(folder), device_of(device)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder of a Hugging Face model: it has no config.json")
    with open_tensors(folder) as tensors:
        model = _empty(folder, tensors, device)
        _fill_(model, tensors, device)
    return model.eval()


def _name_the_class(path: Path, name: str) -> None:
    """Say in config.json which class is saved: a model made from a configuration may not have said."""
    if path.is_file() and (config := json.loads(path.read_text())).get("architectures") != [name]:
        path.write_text(json.dumps(config | {"architectures": [name]}, indent=2) + "\n")


def _empty(folder: Path, tensors: Tensors, device: torch.device) -> Any:
    """The model as its configuration says, on the device, its weights not initialised."""
    try:
        import transformers
    except ImportError:
        raise ValueError("load_model needs transformers: pip install prunus[hf]") from None

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    name = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"{folder / 'config.json'} names the class {name!r}, which transformers does not have")
    with _without_initialisation(), _default_dtype(tensors), device:
        model = kind(config)
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _fill_(model: nn.Module, tensors: Tensors, device: torch.device) -> None:
    """Put every tensor in its place, once; one that is missing, too many or of another shape is a ValueError."""
    own = model.state_dict(keep_vars=True)
    names = {id(place): name for name, place in reversed(own.items())}  # of shared ones the first
    inside, records = _names_inside(model, tensors), tensors.records
    places = {name: own[inner] for name, inner in inside.items()}
    filled: dict[int, str] = {}
    for name, place in places.items():
        record = records[name]
        if place.shape != record.layout.shape:
            shapes = f"{list(record.layout.shape)} in {tensors.path}, {list(place.shape)} in the model"
            raise ValueError(f"the shape of {name} is {shapes}")
        if record.same_as in places:
            if place is not places[record.same_as]:
                path, _, key = inside[name].rpartition(".")
                setattr(model.get_submodule(path), key, places[record.same_as])
            filled[id(place)] = name
        elif id(place) not in filled:
            place.data = tensors.read(name, device)
            filled[id(place)] = name
        elif not torch.equal(words_of(place), words_of(tensors.read(name, device))):
            raise ValueError(f"the model ties {name} to {filled[id(place)]}, but {tensors.path} holds two that differ")
    if missing := [name for key, name in names.items() if key not in filled]:
        raise ValueError(f"{tensors.path} lacks {missing[0]!r}, which the model has")


def _names_inside(model: nn.Module, tensors: Tensors) -> dict[str, str]:
    """The model's name for each stored one.

    Files saved from the inner model lack its prefix, or have one too many; old files hold buffers that the
    class says are none of its own any more.
    """
    known, prefix = model.state_dict(), f"{getattr(model, 'base_model_prefix', '')}."
    old = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found = {}
    for name in tensors.records:
        inner = next((one for one in (name, prefix + name, name.removeprefix(prefix)) if one in known), None)
        if inner is not None:
            found[name] = inner
        elif not any(pattern.search(name) for pattern in old):
            raise ValueError(f"{tensors.path} holds {name!r}, which the model does not have")
    return found


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """Leave out the drawing of weights that are overwritten; ties, which it makes too, are left out with it."""
    try:
        place = import_module("transformers.initialization")
    except ImportError:  # before version 5
        place = import_module("transformers.modeling_utils")
    if not hasattr(place, "no_init_weights"):
        yield
        return
    with place.no_init_weights():
        yield


@contextmanager
def _default_dtype(tensors: Tensors) -> Iterator[None]:
    """Make the model in the type of its largest tensor, so that it is not held twice over."""
    kinds = {DTYPES[r.dtype]: r.layout.numel for r in sorted(tensors.records.values(), key=lambda r: r.layout.numel)}
    wide = [dtype for dtype in kinds if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(max(wide, key=lambda dtype: kinds[dtype], default=before))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
