"""Hugging Face models, to a small folder and back."""

import json
import os
import re
import sys
import warnings
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
from ..files.json_file import read_json
from ..files.one_line import in_one_line
from ..files.reader import SMALL, Tensors, open_tensors
from ..files.regular import check_regular_files
from ..files.safetensors_header import DTYPES
from ..files.sparse_file import check_masks, in_memory, loaded
from ..files.writer import MAX_SHARD_BYTES, Saved, TensorSource, WritePlan, write
from ..grids import on_grids, put_on_grid_
from ..ops.bits import words_of
from ..ops.machine import device_of
from .card import CardFacts, facts_of_files, hub_name, write_card
from .config_limits import bounded, bounded_by, check_counts, num_stored
from .convert import copy_beside
from .gguf_parsing import parsed_once

AnyPath = str | os.PathLike[str]
OWN_NAMES = "of the model"  # says a file whose tensors have the model's names, of families that are stored differently
LOAD_STATE = 'model.load_state_dict(load_sparse("{folder}"))'


def save_model(
    model: nn.Module,
    folder: AnyPath,
    *,
    masks: Mapping[str, Tensor] | None = None,
    source: AnyPath | None = None,
    replace: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved:
    """Write a model to a new folder in the small form, with a model card, and return how each tensor was stored.

    ``source`` is a folder whose tokenizer, licence and other small files are copied, by default the one that the model
    was loaded from. With ``masks``, a weight that is not zero where its mask prunes is refused. The folder appears
    only when it is complete; an existing one that is not empty is refused, or replaced with ``replace``.
    Quantised weights are stored as codes; a weight off its grid is refused.
    ``load_model`` loads transformers models only; for other models, a warning says what loads them.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"save_model takes a model, then a folder; got {type(model).__name__} as the model")
    inner = unwrapped_model(model)
    tensors = inner.state_dict()
    loaded_from = str(getattr(inner, "name_or_path", "") or "")
    if source is None and (Path(loaded_from) / "config.json").is_file():
        source = loaded_from
    if masks is not None:
        check_masks(tensors, masks)
    in_files = small_source(inner)
    with new_folder(Path(folder), replace) as part:
        save_config(inner, part)
        if source is not None:
            copy_beside(Path(source), part)
        saved = write(in_files, WritePlan(part / SMALL, max_shard_bytes=max_shard_bytes))
        facts = facts_of_files(part, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, saved.rows)
        origin = loaded_from if hub_name(loaded_from) or source is None else os.fspath(source)
        write_card(part, CardFacts(name=Path(folder).resolve().name, source=origin, **facts))
    _warn_if_not_loaded(inner, Path(folder))
    return Saved([Path(folder) / path.name for path in saved.files], saved.rows)


def small_source(model: nn.Module) -> TensorSource:
    """The tensors of a model as a small file holds them; ValueError for a weight that left its grid."""
    return in_memory(model.state_dict(), {"format": "pt"} | stored_names_of(model), on_grids(model))


def save_config(model: nn.Module, part: Path) -> None:
    for name in ("config", "generation_config"):
        if hasattr(getattr(model, name, None), "save_pretrained"):
            getattr(model, name).save_pretrained(part)
    path, kind = part / "config.json", [type(model).__name__]
    if path.is_file() and (config := json.loads(path.read_text())).get("architectures") != kind:
        config["architectures"] = kind  # a model made from a configuration may not have said
        path.write_text(json.dumps(config, indent=2) + "\n")


def _warn_if_not_loaded(model: nn.Module, folder: Path) -> None:
    """Say what loads a folder that ``load_model`` refuses, while whoever wrote it still knows how the model is made."""
    kind = type(model)
    has_own_config = hasattr(getattr(model, "config", None), "save_pretrained")
    is_known = getattr(sys.modules.get("transformers"), kind.__name__, None) is kind
    if not (is_known if has_own_config else (folder / "config.json").is_file()):
        warnings.warn(
            f"load_model only loads transformers models, and {kind.__name__} is not one; make the model, then "
            f"{LOAD_STATE.format(folder=folder)}",
            stacklevel=3,
        )


def load_model(folder: AnyPath, device: torch.device | str = "cpu") -> Any:
    """The transformers model in a folder, in evaluation mode, on ``device``.

    Its tensors move there packed, one at a time, unless transformers converts them. No code in the folder is run.
    """
    folder, device = Path(folder), device_of(device)
    check_folder(folder)
    with open_tensors(folder) as tensors:
        config = read_config(folder, tensors)
        kind = class_of(config, folder)
        model = empty(kind, config, folder, tensors, device)
        if model is None:
            model = _converted(kind, config, folder, tensors)
        else:
            fill_(model, tensors, device)
    read_generation_config_(model, folder)
    return model.eval().to(device)


def check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        is_small = any(folder.glob("sparse*.safetensors"))
        advice = f"; make the model yourself, then {LOAD_STATE.format(folder=folder)}" if is_small else ""
        raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json{advice}")


def read_generation_config_(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        with in_one_line(f"{folder / 'generation_config.json'} cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def check_loads(source: Path, folder: Path) -> str:
    """ValueError unless the model of ``folder`` is that of ``source``, loaded as users do; returns what to say."""
    try:
        wanted = load_any_model(source)
    except ValueError as error:
        return f"not loaded as a model, as its source is not ({str(error)[:200]})"
    copied, expected = load_any_model(folder).state_dict(), wanted.state_dict()
    if odd := sorted(set(copied) ^ set(expected)):
        raise ValueError(f"the models of {source} and {folder} do not both have {odd[0]!r}")
    for name, tensor in expected.items():
        if not torch.equal(copied[name].to(tensor.dtype), tensor):
            raise ValueError(f"{name!r} differs between the models of {folder} and {source}")
    return f"loaded as {type(wanted).__name__}"


def load_any_model(folder: Path, dtype: str = "auto", gguf_file: str | None = None) -> Any:
    if gguf_file:
        with parsed_once():
            return load_plain_model(folder, dtype, gguf_file)
    with open_tensors(folder) as tensors:
        is_small = tensors.is_small
    if is_small:
        model = load_model(folder)
        return model if dtype == "auto" else model.to(getattr(torch, dtype))
    return load_plain_model(folder, dtype)


def read_config(folder: Path, tensors: Tensors | None = None, gguf_file: str | None = None) -> Any:
    """The configuration of a Hugging Face folder; ValueError for one that cannot be that of these ``tensors``.

    What it says of attention kernels is dropped, in inner configurations too: where the package ``kernels`` is
    installed, transformers would fetch and run what a file names.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"reading {folder} needs transformers: pip install prunus[hf]") from None
    check_regular_files(folder)
    with in_one_line(f"{folder / (gguf_file or 'config.json')} cannot be read"):
        if not gguf_file and (folder / "config.json").is_file():
            check_counts(read_json(folder / "config.json"), tensors)
        options = {"gguf_file": gguf_file} if gguf_file else {}
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        for inner in _all_configs(config):
            for name in ("_attn_implementation", "_experts_implementation"):
                if hasattr(inner, name):
                    setattr(inner, name, None)
            check_counts(vars(inner), tensors)
    return config


def load_plain_model(folder: Path, dtype: str = "auto", gguf_file: str | None = None) -> Any:
    """The model of a plain folder as the class that its configuration names, in evaluation mode on the CPU.

    Without a class, and from GGUF, it is a causal language model. No code in the folder is run. A tensor that the model
    lacks, or one that it has and the folder does not, is a ValueError: nothing is drawn at random, nothing dropped.
    """
    if gguf_file:
        stored, form = (folder / gguf_file).stat().st_size, {"gguf_file": gguf_file, **_dequantised()}
        num_tensors = check_gguf(folder / gguf_file)
        config = read_config(folder, gguf_file=gguf_file)
        if (num := getattr(config, "num_hidden_layers", 0)) > num_tensors:  # a field without a name has its default
            raise ValueError(f"{folder / gguf_file} cannot be read: it has {num} layers, but {num_tensors} tensors")
    else:
        with open_tensors(folder) as tensors:
            stored, num_tensors, form = num_stored(tensors), len(tensors.records), {"use_safetensors": True}
            config = read_config(folder, tensors)
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM if gguf_file or not config.architectures else class_of(config, folder)
    is_quantised = hasattr(config, "quantization_config")
    hint = ": it is quantised; take the unquantised model. transformers" if is_quantised else ""
    with in_one_line(f"{folder} cannot be read{hint}"), quiet_transformers():
        with suppress(RuntimeError, NotImplementedError), torch.device("meta"), bounded(stored, num_tensors, folder):
            of_config = kind._from_config if hasattr(kind, "_from_config") else kind.from_config
            of_config(deepcopy(config))
        options = {"config": config, "dtype": dtype, "local_files_only": True, "trust_remote_code": False, **form}
        model, info = kind.from_pretrained(folder, output_loading_info=True, **options)
        _refuse_strangers(type(model), info, may_have_more=bool(gguf_file))
    return model.eval()


def _dequantised() -> dict[str, Any]:
    """Options for plain weights from GGUF: of some families transformers 5.23 keeps packed what it has kernels for."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older versions always dequantise
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _refuse_strangers(kind: type, info: Mapping[str, Any], *, may_have_more: bool = False) -> None:
    """ValueError for tensors that transformers would draw at random or drop; GGUF files hold some that it computes."""
    for keys, said in {"missing_keys": "it lacks", "unexpected_keys": "it holds"}.items():
        names = sorted(info[keys])
        if names and not (may_have_more and keys == "unexpected_keys"):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            which = "has" if keys == "missing_keys" else "does not have"
            raise ValueError(f"{said} {names[0]!r}{more}, which the model {which}; its class is {kind.__name__}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars, and no table of missing tensors before the one line that refuses the model."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in list(vars(config).values()):
        if hasattr(inner, "model_type") and hasattr(inner, "to_dict"):
            yield from _all_configs(inner)


def empty(kind: Any, config: Any, folder: Path, tensors: Tensors, device: torch.device) -> Any | None:
    """The model as its configuration says, its weights not initialised; None where transformers converts its files."""
    with in_one_line(f"{folder / 'config.json'} cannot be read"), without_initialisation(), bounded_by(tensors):
        outline = None
        with suppress(RuntimeError, NotImplementedError), torch.device("meta"):  # few classes compute while they build
            outline = kind(deepcopy(config))
        if outline is not None:
            if is_converted(outline, tensors):
                return None
            check_shapes(outline, tensors)  # before memory is taken
        with default_dtype(largest_dtype(tensors)), device:
            model = kind(config)
        model.tie_weights()
    return model


def _converted(kind: Any, config: Any, folder: Path, tensors: Tensors) -> Any:
    """The model of files whose names or shapes transformers converts, loaded by transformers on the CPU."""
    options = {"config": config, "state_dict": loaded(tensors, "cpu"), "dtype": largest_dtype(tensors)}
    with in_one_line(f"{folder} cannot be read"), quiet_transformers():
        model, info = kind.from_pretrained(None, output_loading_info=True, **options)
        _refuse_strangers(kind, info)
    return model


def is_converted(model: Any, tensors: Tensors) -> bool:
    """Whether tensors lie in the files under other names or in other shapes than in the model."""
    if "names" in tensors.metadata:
        return False
    names, strange = model_names(model, tensors)
    computed = [*patterns_of(model, "_keys_to_ignore_on_save"), *patterns_of(model, "_keys_to_ignore_on_load_missing")]
    left = set(model.state_dict()) - set(names.values())
    is_computed = any(re.search(pattern, name) for pattern in computed for name in left)  # not stored: positions
    return bool(stored_names_of(model)) or bool(strange) or is_computed


def stored_names_of(model: nn.Module) -> dict[str, str]:
    """What a file says whose tensors are the model's own, if transformers stores those of this family otherwise."""
    if "transformers" not in sys.modules or not hasattr(model, "config"):
        return {}
    try:
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:  # before version 5 names alone were converted
        return {}
    return {"names": OWN_NAMES} if any(hasattr(one, "operations") for one in mapping(model)) else {}


def class_of(config: Any, folder: Path) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or [""]
    name = names[0] if isinstance(names, list | tuple) else names
    is_name = isinstance(names, list | tuple) and isinstance(name, str) and name.isidentifier()
    kind = getattr(transformers, name, None) if is_name else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        said = repr(name)[:80]
        raise ValueError(f"{folder / 'config.json'} names the class {said}, which transformers does not have")
    return kind


def check_shapes(model: nn.Module, tensors: Tensors) -> None:
    own, records = model.state_dict(), tensors.records
    names, strange = model_names(model, tensors)
    if strange:
        raise ValueError(f"{tensors.path} holds {strange[0]!r}, which the model does not have")
    for name, inner in names.items():
        shape, expected = records[name].layout.shape, own[inner].shape
        if shape != expected:
            raise ValueError(f"the shape of {name} is {list(shape)} in {tensors.path}, {list(expected)} in the model")


def fill_(model: nn.Module, tensors: Tensors, device: torch.device) -> None:
    """Put every tensor in its place, once, and grids beside weights; ValueError for a tensor that is missing, or tied
    to one that differs.
    """
    check_shapes(model, tensors)
    own = model.state_dict(keep_vars=True)
    names = {id(place): name for name, place in reversed(own.items())}  # of shared ones the first
    inner_names, records = model_names(model, tensors)[0], tensors.records
    places = {name: own[inner] for name, inner in inner_names.items()}
    filled: dict[int, str] = {}
    for name, place in places.items():
        record, (path, _, key) = records[name], inner_names[name].rpartition(".")
        if record.same_as in places:
            if place is not places[record.same_as]:
                setattr(model.get_submodule(path), key, places[record.same_as])
            filled[id(place)] = name
        elif id(place) not in filled:
            place.data, on_grid = tensors.read_on_grid(name, device)
            if on_grid is not None and key in (module := model.get_submodule(path))._parameters:
                put_on_grid_(module, key, on_grid)
            filled[id(place)] = name
        elif not torch.equal(words_of(place), words_of(tensors.read(name, device))):
            raise ValueError(f"the model ties {name} to {filled[id(place)]}, but they differ in {tensors.path}")
    if missing := [name for key, name in names.items() if key not in filled]:
        raise ValueError(f"{tensors.path} lacks {missing[0]!r}, which the model has")


def patterns_of(model: nn.Module, attribute: str) -> list[str]:
    """Patterns of names that a model lists; of few classes it is a single one, which transformers splits to letters."""
    single = getattr(type(model), attribute, None)
    return [single] if isinstance(single, str) else list(getattr(model, attribute, None) or ())


def model_names(model: nn.Module, tensors: Tensors) -> tuple[dict[str, str], list[str]]:
    """The name in the model's state dict of each stored tensor, and the stored names that it does not have.

    Files saved from the inner model lack its prefix (``transformer.``), others have it where the model does not.
    Buffers that the class lists as old are left out.
    """
    known, prefix = model.state_dict(), f"{getattr(model, 'base_model_prefix', '')}."
    old = [re.compile(pattern) for pattern in patterns_of(model, "_keys_to_ignore_on_load_unexpected")]
    names, strange = {}, []
    for name in tensors.records:
        inner = next((one for one in (name, prefix + name, name.removeprefix(prefix)) if one in known), None)
        if inner is not None:
            names[name] = inner
        elif not any(pattern.search(name) for pattern in old):
            strange.append(name)
    return names, strange


@contextmanager
def without_initialisation() -> Iterator[None]:
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


def largest_dtype(tensors: Tensors) -> torch.dtype:
    """The type of the largest tensor: a model that is made in it is not held twice over."""
    kinds = {DTYPES[r.dtype]: r.layout.numel for r in sorted(tensors.records.values(), key=lambda r: r.layout.numel)}
    wide = [dtype for dtype in kinds if dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    return max(wide, key=lambda dtype: kinds[dtype], default=torch.get_default_dtype())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
