"""``save_sparse`` and ``load_sparse``: tensors by name, small on the disk, bit for bit the same."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..ops.machine import device_of
from .read import Tensors, open_tensors
from .source import check_masks, in_memory
from .write import MAX_SHARD_BYTES, Plan, Saved, write

AnyPath = str | os.PathLike[str]


def save_sparse(
    tensors: Mapping[str, Tensor],
    path: AnyPath,
    *,
    masks: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Saved:
    """Write the tensors to ``path``, a .safetensors file; what became of each is returned.

    The zeros of a tensor say whether it is stored sparse. More than ``max_shard_bytes`` go into several
    files with an index beside them. With ``masks``, a non-zero weight that a mask says is pruned is refused.
    """
    if masks is not None:
        check_masks(tensors, masks)
    return write(in_memory(tensors, metadata), Plan(Path(path), max_shard_bytes=max_shard_bytes))


def load_sparse(path: AnyPath, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors that ``save_sparse`` wrote to a file, or that a folder holds, bit for bit.

    ValueError or OSError if anything of them is missing or damaged.
    """
    device = device_of(device)
    with open_tensors(Path(path)) as tensors:
        if not tensors.is_small:
            raise ValueError(f"{path} is plain safetensors, not written by save_sparse; safetensors.torch loads it")
        return loaded(tensors, device)


def loaded(tensors: Tensors, device: torch.device | str) -> dict[str, Tensor]:
    """All tensors; those with several names once."""
    records = tensors.records
    found = {name: tensors.read(name, device) for name, record in records.items() if record.same_as is None}
    return {name: found[record.same_as or name] for name, record in records.items()}
