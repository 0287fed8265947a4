"""``save_sparse`` and ``load_sparse``: tensors by name, small on the disk, bit for bit the same."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..grids import OnGrid, check_on_grid
from ..masks import packed_masks
from ..ops import bits
from ..ops.grid import Coded
from ..ops.machine import device_of
from .encode import CODED_DTYPES, check_scales, coded_if_smallest
from .reader import Tensors, open_tensors
from .safetensors_header import NAMES
from .writer import MAX_SHARD_BYTES, Saved, TensorSource, TensorSpec, WritePlan, check_layers, write

AnyPath = str | os.PathLike[str]


def save_sparse(
    tensors: Mapping[str, Tensor],
    path: AnyPath,
    *,
    masks: Mapping[str, Tensor] | None = None,
    grids: Mapping[str, OnGrid] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved:
    """Write the tensors to ``path``, a .safetensors file, and return how each was stored.

    A tensor is stored sparse if its zeros make that smaller. More than ``max_shard_bytes`` are split into several
    files with an index. With ``masks``, a weight that is not zero where its mask prunes is refused. Weights
    with ``grids``, as ``on_grids(model)`` returns them, are stored as codes; a weight off its grid is refused.
    """
    if not isinstance(tensors, Mapping):
        problem = f"save_sparse takes tensors by name, then a path; got {type(tensors).__name__}"
        raise ValueError(f"{problem}; for a model, call save_sparse(model.state_dict(), path)")
    if masks is not None:
        check_masks(tensors, masks)
    return write(in_memory(tensors, metadata, grids), WritePlan(Path(path), max_shard_bytes=max_shard_bytes))


def load_sparse(path: AnyPath, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors that ``save_sparse`` wrote to a file, or those in a folder, bit for bit.

    Raises ValueError or OSError if anything is missing or damaged.
    """
    device = device_of(device)
    with open_tensors(Path(path)) as tensors:
        if not tensors.is_small:
            raise ValueError(f"{path} is plain safetensors, not written by save_sparse; safetensors.torch loads it")
        return loaded(tensors, device)


def loaded(tensors: Tensors, device: torch.device | str) -> dict[str, Tensor]:
    """All tensors; those with several names once."""
    records = tensors.records
    stored = {name: tensors.read(name, device) for name, record in records.items() if record.same_as is None}
    return {name: stored[record.same_as or name] for name, record in records.items()}


def in_memory(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, grids: Mapping[str, OnGrid] | None = None
) -> TensorSource:
    """The tensors of a mapping; those that share all their memory are stored once, and a grid of one name is theirs."""
    first: dict[tuple, str] = {}
    specs: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        specs[name] = TensorSpec(NAMES[tensor.dtype], tuple(tensor.shape))

    for name, on_grid in (grids or {}).items():
        check_grid(name, tensors, on_grid)
    stored_grids = {aliases.get(name, name): on_grid for name, on_grid in (grids or {}).items()}

    def fetch(name: str) -> Tensor:
        return tensors[name].detach().resolve_conj().resolve_neg()

    def fetch_coded(name: str) -> Coded | None:
        return coded_if_smallest(fetch(name), stored_grids[name]) if name in stored_grids else None

    return TensorSource(specs, aliases, fetch, list(tensors), dict(metadata or {}), fetch_coded)


def from_files(tensors: Tensors) -> TensorSource:
    """The tensors of open files, read when they are fetched."""
    records = tensors.records
    specs = {name: TensorSpec(r.dtype, r.layout.shape) for name, r in records.items() if r.same_as is None}
    aliases = {name: record.same_as for name, record in records.items() if record.same_as is not None}

    def fetch_coded(name: str) -> Coded | None:
        return tensors.read_coded(name) if tensors.is_coded(name) else None

    return TensorSource(specs, aliases, tensors.read, list(records), tensors.metadata, fetch_coded)


def check_masks(tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Refuse a weight that is not zero where its boolean mask says pruned; a zero that is kept is legal."""
    check_layers(tensors)  # whose weights the masks would not find
    for name, packed in packed_masks(masks, tensors).items():
        check_pruned(name, tensors[name], packed)


def check_pruned(name: str, tensor: Tensor, packed: Tensor) -> None:
    wrong = (tensor.detach() != 0) & ~bits.unpack(packed.to(tensor.device), tensor.shape)
    if count := int(wrong.sum()):
        raise ValueError(f"{name} has {count} non-zero weights where its mask prunes; apply the mask, or leave it out")


def check_grid(name: str, tensors: Mapping[str, Tensor], on_grid: OnGrid) -> None:
    """ValueError that names a weight unless it is on its grid, whose scales a file can hold."""
    if name not in tensors:
        raise ValueError(f"there is a grid for {name!r}, but no tensor of that name")
    weight, wanted = tensors[name], on_grid.grid.scales_shape(tensors[name].shape)
    if weight.dtype not in CODED_DTYPES or on_grid.scales.shape != wanted:
        what = f"{name} of {weight.dtype} {tuple(weight.shape)} with scales {tuple(on_grid.scales.shape)}"
        raise ValueError(f"{what} cannot be on a grid: expected floating-point weights and scales {wanted}")
    scales = on_grid.scales.to(torch.bfloat16)
    try:
        check_scales(scales)
    except ValueError as error:
        raise ValueError(f"{name} cannot be stored as codes: {error}; call quantize(model, batches) again") from None
    check_on_grid(name, weight, OnGrid(on_grid.grid, scales))


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(name, str) or name == "__metadata__":
        raise ValueError(f"a tensor's name must be a string other than __metadata__, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {name!r} cannot be written as UTF-8") from None
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the weights first")
    if tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
        raise ValueError(f"{name} is not an ordinary tensor in memory; gather it or make it dense first")
    if tensor.dtype not in NAMES:
        raise ValueError(f"{name} has the type {tensor.dtype}, which safetensors cannot hold; cast it first")
