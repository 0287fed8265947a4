"""A Hugging Face folder as a model whose sparse layers are never dense in memory."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..eligible import is_conv1d
from ..export import huggingface
from ..files.encode import CODES, DENSE
from ..files.reader import Tensors, open_tensors
from ..files.safetensors_header import DTYPES
from ..grids import OnGrid, put_on_grid_
from ..ops.grid import decoded
from ..ops.machine import device_of
from .choose import forms_of
from .coded_gaps import coded_gaps_of
from .coded_tiles import can_code, coded_tiles_of
from .gaps import WIDEST, gaps_of
from .linear import form_in, group_, replace_, sparsify_
from .model_layers import chosen
from .product import DTYPES as PRODUCT_DTYPES
from .product import Form, check_device
from .tiles import tiles_of
from .times import CODED_FORMS, WeightKind, kind_of, scales_of_codes


def load_packed(
    folder: str | Path, device: torch.device | str = "cpu", *, vectors: int = 1, least: float | None = None
) -> Any:
    """The model in a folder, small or plain, with sparse layers where ``sparsify_`` would put them.

    Sparse layers are built from the bits and values in the file; from a plain file one weight at a time is read dense.
    Layers keep 4-bit codes where ``sparsify_`` would; other codes become values. Models that transformers converts as
    it loads them are loaded dense first.
    """
    folder, device = Path(folder), device_of(device)
    check_device(device)
    huggingface.check_folder(folder)
    with open_tensors(folder) as tensors:
        config = huggingface.read_config(folder, tensors)
        kind, model = huggingface.class_of(config, folder), None
        with suppress(ValueError), register_module_parameter_registration_hook(_without_memory):
            model = huggingface.empty(kind, config, folder, tensors, device)
        if model is not None:
            _fill_(model, tensors, device, vectors, least)
    if model is None:  # load_model says what is wrong, if something is
        model = huggingface.load_model(folder, device)
        sparsify_(model, vectors=vectors, least=least)
        return model
    huggingface.read_generation_config_(model, folder)
    return model.eval()


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
    """The parameter on the meta device, which the module takes in its place."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _fill_(model: Any, tensors: Tensors, device: torch.device, vectors: int, least: float | None) -> None:
    stored = {inner: name for name, inner in huggingface.model_names(model, tensors)[0].items()}
    layers = {name: layer for name, layer in chosen(model).items() if f"{name}.weight" in stored}
    kinds = _kinds(layers, stored, tensors)
    ways = forms_of(kinds, vectors, device, least)
    forms: dict[str, Form] = {}
    for name, way in ways.items():
        forms[name] = _form(way, layers[name], stored[f"{name}.weight"], tensors, device)
        layers[name]._parameters["weight"] = None
    for parameter in model.parameters():
        if parameter.is_meta:  # swapped, so that tied ones stay tied
            empty = torch.empty_like(parameter, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
    taken = {stored[f"{name}.weight"] for name in ways}
    rest = {name: home for name, home in tensors.homes.items() if name not in taken}
    huggingface.fill_(model, replace(tensors, homes=rest), device)
    for name, form in forms.items():
        replace_(model, name, form)
    group_(model, {name: kinds[name] for name in ways})


def _form(way: str, layer: nn.Module, source: str, tensors: Tensors, device: torch.device) -> Form:
    """The form of a layer's weight, which is noted to be on a grid if the file has its codes."""
    record, is_transposed = tensors.records[source], is_conv1d(layer)
    if record.layout.encoding == CODES:
        kept = tensors.read_coded(source, device)
        put_on_grid_(layer, "weight", OnGrid(kept.grid, kept.scales))
        if way in CODED_FORMS and not is_transposed:
            return (coded_tiles_of if way == "coded" else coded_gaps_of)(kept, DTYPES[record.dtype])
        weight = decoded(kept, DTYPES[record.dtype])
        return form_in(way, weight.t() if is_transposed else weight, kept.scales)
    if record.layout.encoding == DENSE or is_transposed:
        weight = tensors.read(source, device)
        return form_in(way, weight.t() if is_transposed else weight)
    values, packed = tensors.read_packed(source, device)
    return (tiles_of if way == "tiles" else gaps_of)(packed, values, record.layout.shape)


def _kinds(layers: Mapping[str, nn.Module], stored: Mapping[str, str], tensors: Tensors) -> dict[str, WeightKind]:
    """The kinds of the weights, of packed ones from what the file says, of plain ones from their zeros."""
    kinds, records = {}, tensors.records
    for name, layer in layers.items():
        source = stored[f"{name}.weight"]
        record = records[source]
        num_rows, width = reversed(record.layout.shape) if is_conv1d(layer) else record.layout.shape
        dtype = DTYPES[record.dtype]
        if record.same_as is not None or dtype not in PRODUCT_DTYPES or width > WIDEST:
            continue
        if record.layout.encoding == DENSE or is_conv1d(layer):
            weight, on_grid = tensors.read_on_grid(source)
            weight = weight.t() if is_conv1d(layer) else weight
            kinds[name] = kind_of(weight, scales_of_codes(weight, on_grid))
        elif (grid := record.layout.grid) is not None:
            num_bytes = tensors.homes[source].header.entries[f"{source}.codes"].shape[0]
            sparsity = 1 - min(1, 8 * num_bytes // grid.bits / max(1, record.layout.numel))  # up to a few codes
            kinds[name] = WeightKind((num_rows, width), dtype, sparsity, is_coded=can_code(grid))
        else:
            values = tensors.homes[source].header.entries[f"{source}.values"]
            sparsity = 1 - values.shape[0] / max(1, record.layout.numel)
            kinds[name] = WeightKind((num_rows, width), dtype, sparsity, record.layout.encoding == "2:4")
    return kinds
