"""Hugging Face models, to a small folder and back."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..eligible import unwrapped_model
from ..files.atomic import new_folder
from ..files.gguf_header import check_gguf
from ..files.reader import SMALL, Tensors, open_tensors
from ..files.safetensors_header import DTYPES
from ..files.sparse_file import check_masks, in_memory
from ..files.writer import MAX_SHARD_BYTES, Saved, WritePlan, write
from ..ops.bits import words_of
from ..ops.machine import device_of
from .convert import copy_beside

AnyPath = str | os.PathLike[str]
MOST_PACKED = 16  # weights in one stored number of a quantised file
MOST_LAYERS = 1000  # of a model with few tensors, whose configuration may have a default that is larger


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
        path, kind = part / "config.json", [type(inner).__name__]
        if path.is_file() and (config := json.loads(path.read_text())).get("architectures") != kind:
            config["architectures"] = kind  # a model made from a configuration may not have said
            path.write_text(json.dumps(config, indent=2) + "\n")
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


def read_config(folder: Path, num_tensors: int = 0, gguf_file: str | None = None) -> Any:
    """The configuration of a Hugging Face folder; ValueError for one that cannot be, for a model of ``num_tensors``.

    What it says of attention kernels is dropped, in inner configurations too: where the package ``kernels`` is
    installed, transformers would fetch and run what a file names.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"reading {folder} takes transformers: pip install prunus[hf]") from None
    with _in_one_line(folder / (gguf_file or "config.json")):
        options = {"gguf_file": gguf_file} if gguf_file else {}
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        for inner in _all_configs(config):
            for name in ("_attn_implementation", "_experts_implementation"):
                if hasattr(inner, name):
                    setattr(inner, name, None)
            _check_depth(inner, max(MOST_LAYERS, num_tensors))
    return config


def load_causal_model(folder: Path, dtype: str = "auto", gguf_file: str | None = None) -> Any:
    """The language model of a plain Hugging Face folder, in evaluation mode on the CPU; no code in it is run."""
    if gguf_file:
        stored, form = (folder / gguf_file).stat().st_size, {"gguf_file": gguf_file}
        num_tensors = check_gguf(folder / gguf_file)
        config = read_config(folder, gguf_file=gguf_file)
        if (num := getattr(config, "num_hidden_layers", 0)) > num_tensors:  # a field without a name has its default
            raise ValueError(f"{folder / gguf_file} cannot be read: it has {num} layers, but {num_tensors} tensors")
    else:
        with open_tensors(folder) as tensors:
            stored, form = sum(r.layout.numel for r in tensors.records.values()), {"use_safetensors": True}
            config = read_config(folder, len(tensors.records))
    from transformers import AutoModelForCausalLM

    with _in_one_line(folder), _without_load_report():
        with suppress(RuntimeError, NotImplementedError), torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
            if (num := sum(p.numel() for p in empty.parameters())) > MOST_PACKED * stored + 10**6:
                raise ValueError(f"its configuration is that of {num} parameters, but it stores {stored} numbers")
        options = {"config": config, "dtype": dtype, "local_files_only": True, "trust_remote_code": False, **form}
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        if missing := sorted(info["missing_keys"]):  # transformers draws them at random
            raise ValueError(f"it lacks {missing[0]!r}, which the model has")
    return model.eval()


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Whatever transformers raises for a file, as a ValueError of one line that names it."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers from printing a table of missing tensors before the one line that refuses the model."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in list(vars(config).values()):
        if hasattr(inner, "model_type") and hasattr(inner, "to_dict"):
            yield from _all_configs(inner)


def _check_depth(config: Any, most: int) -> None:
    """Refuse more layers than a model can have; transformers would build them one by one before it compares shapes."""
    for name, value in vars(config).items():
        if re.search(r"(layers?|experts)$", name) and isinstance(value, int) and not 0 <= value <= most:
            raise ValueError(f"{name} is {value}, negative or more than the model has tensors")


def _empty(folder: Path, tensors: Tensors, device: torch.device) -> Any:
    """The model as its configuration says, on the device, its weights not initialised."""
    config = read_config(folder, len(tensors.records))
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"{folder / 'config.json'} names the class {name!r}, which transformers does not have")
    with _in_one_line(folder / "config.json"), _without_initialisation():
        with suppress(RuntimeError, NotImplementedError), torch.device("meta"):  # few classes compute while they build
            _check_shapes(kind(deepcopy(config)), tensors)  # before memory is taken
        with _default_dtype(tensors), device:
            model = kind(config)
        model.tie_weights()
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        with _in_one_line(folder / "generation_config.json"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _check_shapes(model: nn.Module, tensors: Tensors) -> None:
    """ValueError for a tensor that the model does not have, or has in another shape."""
    own, records = model.state_dict(), tensors.records
    for name, inner in _model_names(model, tensors).items():
        shape, expected = records[name].layout.shape, own[inner].shape
        if shape != expected:
            raise ValueError(f"the shape of {name} is {list(shape)} in {tensors.path}, {list(expected)} in the model")


def _fill_(model: nn.Module, tensors: Tensors, device: torch.device) -> None:
    """Put every tensor in its place, once; ValueError for one that is missing, or tied to one that differs."""
    _check_shapes(model, tensors)
    own = model.state_dict(keep_vars=True)
    names = {id(place): name for name, place in reversed(own.items())}  # of shared ones the first
    model_names, records = _model_names(model, tensors), tensors.records
    places = {name: own[inner] for name, inner in model_names.items()}
    filled: dict[int, str] = {}
    for name, place in places.items():
        record = records[name]
        if record.same_as in places:
            if place is not places[record.same_as]:
                path, _, key = model_names[name].rpartition(".")
                setattr(model.get_submodule(path), key, places[record.same_as])
            filled[id(place)] = name
        elif id(place) not in filled:
            place.data = tensors.read(name, device)
            filled[id(place)] = name
        elif not torch.equal(words_of(place), words_of(tensors.read(name, device))):
            raise ValueError(f"the model ties {name} to {filled[id(place)]}, but {tensors.path} holds two that differ")
    if missing := [name for key, name in names.items() if key not in filled]:
        raise ValueError(f"{tensors.path} lacks {missing[0]!r}, which the model has")


def _model_names(model: nn.Module, tensors: Tensors) -> dict[str, str]:
    """The name in the model's state dict of each stored tensor.

    Files saved from the inner model lack its prefix (``transformer.``), others have it where the model does not.
    Buffers that the class lists as old are left out; any other tensor that the model lacks is a ValueError.
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
