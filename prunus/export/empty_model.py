"""Hugging Face folders whose model is too large for memory: its blocks are read one at a time, and written so."""

import errno
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..files.one_line import in_one_line
from ..files.reader import TensorFile, Tensors, open_tensors
from ..files.safetensors_header import DTYPES, NAMES
from ..files.writer import TensorSource, TensorSpec
from .config_limits import bounded_by
from .huggingface import (
    check_shapes,
    class_of,
    default_dtype,
    is_converted,
    model_names,
    patterns_of,
    read_config,
    read_generation_config_,
    without_initialisation,
)
from .stored_form import Maker, Read, Unfit, is_known, makers

COMPUTED = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGE = 1 << 16  # elements
OLD = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")  # buffers that many families stored, which are computed now


def empty_model(folder: Path, dtype: str = "auto") -> tuple[Any, Read]:
    """The model of a folder without values, but for its buffers, and what reads a tensor of it from the folder.

    Parameters are on the meta device. Raises ``Unfit`` where not every one of them can be read by itself.
    """
    with ExitStack() as files:
        tensors = files.enter_context(open_tensors(folder))
        config = read_config(folder, tensors)
        if hasattr(config, "quantization_config"):
            raise Unfit("it is quantised")
        if any(map(tensors.is_coded, tensors.records)):
            raise Unfit("its weights are stored as codes")
        kind: Any = class_of(config, folder)
        model = _outline(kind, config, folder, tensors, _dtype_of(config, tensors, dtype))
        read = _reader(model, tensors, dtype)
        for name, buffer in model.named_buffers():
            if name in read.makers:
                buffer.copy_(read(name))
        read_generation_config_(model, folder)
        weakref.finalize(model, files.pop_all().close)
    return model.eval(), read


def reader_of(model: Any, folder: Path) -> Read:
    """What reads a tensor of a model from the folder that it was written to; weights in few bits as their values."""
    with ExitStack() as files:
        read = _reader(model, files.enter_context(open_tensors(folder)), "auto")
        weakref.finalize(model, files.pop_all().close)
    return read


@dataclass(frozen=True)
class _Reader:
    """Reads tensors of a model by name; of tied ones by any of their names."""

    model: Any  # without keeping it alive
    tensors: Tensors
    makers: dict[str, Maker]
    names: dict[str, str]  # of tied tensors that are stored under another name
    dtypes: dict[str, torch.dtype]
    sizes_and_times: list[tuple[int, int]]  # of the files, when they were opened

    def __call__(self, name: str) -> Tensor:
        name = self.names.get(name, name)
        dtype = self.dtypes[name]
        self._check_unchanged()
        made = self.makers[name].make(self.model, lambda stored: self.tensors.read(stored).to(dtype))
        self._check_unchanged()
        return made[name]

    def _check_unchanged(self) -> None:
        for file, before in zip(self.tensors.files, self.sizes_and_times, strict=True):
            if _size_and_time(file) != before:
                raise ValueError(f"{file.path} changed while it was read; restore it, and repeat the call")


def _size_and_time(file: TensorFile) -> tuple[int, int]:
    about = os.fstat(file.fd)
    return about.st_size, about.st_mtime_ns


def _reader(model: Any, tensors: Tensors, dtype: str) -> _Reader:
    """ValueError for a tensor that the model or the folder lacks, ``Unfit`` for one that is computed."""
    is_own, state = not is_converted(model, tensors), model.state_dict(keep_vars=True)
    if is_own and (tensors.is_small or not is_known()):
        check_shapes(model, tensors)
        made = {inner: Maker(inner, None, [("", name)]) for name, inner in model_names(model, tensors)[0].items()}
    else:
        made = _made(model, tensors)
    if not (is_own and tensors.is_small):
        _as_loaded_(model)
    elif dtype == "auto":
        for inner, maker in made.items():
            state[inner].data = state[inner].to(DTYPES[tensors.records[maker.stored[0][1]].dtype])
    first = {state[name]: name for name in reversed(made)}
    names = {name: first[tensor] for name, tensor in state.items() if tensor in first and name not in made}
    if missing := [name for name in state if name not in made and name not in names]:
        computed = [p for key in COMPUTED for p in patterns_of(model, key)]
        for name in missing:
            if not any(re.search(pattern, name) for pattern in computed):
                raise ValueError(f"{tensors.path} lacks {name!r}, which the model has")
            if isinstance(state[name], nn.Parameter):
                raise Unfit(f"{name} is computed, not stored")
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    read = _Reader(weakref.proxy(model), tensors, made, names, dtypes, [_size_and_time(file) for file in tensors.files])
    for name in made:
        if (other := first[state[name]]) != name and not torch.equal(read(name), read(other)):
            raise Unfit(f"it ties {name} to {other}, but they differ")
    return read


def _made(model: Any, tensors: Tensors) -> dict[str, Maker]:
    """What makes each tensor from stored ones that transformers converts."""
    if not is_known():
        raise Unfit("transformers converts its files as it reads them, and versions before 5 do not say how")
    specs = {name: TensorSpec(record.dtype, record.layout.shape) for name, record in tensors.records.items()}
    made, strange = makers(model, specs)
    old = [*patterns_of(model, "_keys_to_ignore_on_load_unexpected"), *OLD]
    if odd := [name for name in strange if not any(re.search(pattern, name) for pattern in old)]:
        raise ValueError(f"{tensors.path} holds {odd[0]!r}, which the model does not have")
    return made


def _outline(kind: Any, config: Any, folder: Path, tensors: Tensors, dtype: torch.dtype) -> Any:
    try:
        from accelerate import init_empty_weights
    except ImportError:
        raise ValueError(f"reading {folder} block by block needs accelerate: pip install prunus[hf]") from None
    with in_one_line(f"{folder / 'config.json'} cannot be read"), without_initialisation(), bounded_by(tensors):
        model, failed = None, None
        try:
            with default_dtype(dtype), init_empty_weights(), _LargeOnMeta():
                model = kind(deepcopy(config))
        except (RuntimeError, NotImplementedError) as error:
            failed = error
        if model is not None:
            inner = (getattr(model.config, key, None) for key in getattr(model.config, "sub_configs", ()))
            for one in (model.config, *(config for config in inner if config is not None)):
                one.dtype = dtype
            model.tie_weights()
    if "can't allocate memory" in str(failed):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(folder))
    if model is None:
        raise Unfit(f"{kind.__name__} computes with its weights while it is built")
    if any(hasattr(module, "layers_are_rescaled") for module in model.modules()):
        raise Unfit(f"{kind.__name__} changes its weights while it runs")
    return model


class _LargeOnMeta(TorchFunctionMode):
    """Makes large empty tensors on meta: ``init_empty_weights`` takes memory, in sum addresses for the whole model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            made = func(*args, **kwargs | {"device": "meta"})
            if made.numel() >= LARGE:
                return made
        return func(*args, **kwargs)


def _as_loaded_(model: Any) -> None:
    """Give parameters what ``from_pretrained`` gives them: gradients, and float32 to some of a 16-bit model."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    dtype = model.config.dtype
    kept = [getattr(model, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict")]
    if dtype not in (torch.float16, torch.bfloat16) or not any(kept):
        return
    if not hasattr(model, "_get_dtype_plan"):
        raise Unfit("some of its weights stay in float32")
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.float()


def _dtype_of(config: Any, tensors: Tensors, dtype: str) -> torch.dtype:
    """What transformers takes: the one that is asked for, of the configuration, or of the first weights."""
    known = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if isinstance(known, str):
        known = getattr(torch, known)
    stored = (DTYPES[record.dtype] for record in tensors.records.values())
    return known or next((kind for kind in stored if kind in FLOATS), torch.float32)


def tensors_of(model: nn.Module, value: Read) -> TensorSource:
    """The state of a model for a file, of which ``value`` gives parameters that are not in memory."""
    state = model.state_dict(keep_vars=True)
    for name in patterns_of(model, "_keys_to_ignore_on_save"):
        state.pop(name, None)
    tied = getattr(model, "all_tied_weights_keys", None) or patterns_of(model, "_tied_weights_keys")
    first: dict[Tensor, str] = {}  # the name under which transformers stores a tensor
    for name in sorted(state, key=lambda name: any(re.search(pattern, name) for pattern in tied)):
        first.setdefault(state[name], name)
    aliases = {name: first[tensor] for name, tensor in state.items() if first[tensor] != name}
    specs = {name: TensorSpec(NAMES[t.dtype], tuple(t.shape)) for name, t in state.items() if name not in aliases}
    return TensorSource(specs, aliases, value, list(state), {"format": "pt"}, lambda name: None)
