"""Hugging Face folders that are changed block by block, one block in memory at a time; and what that will take."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ..eligible import eligible
from ..export.card import CardFacts, facts_of_files, write_card
from ..export.convert import copy_beside
from ..export.empty_model import empty_model, reader_of, tensors_of
from ..export.huggingface import check_folder, load_model, save_config, stored_names_of
from ..export.stored_form import Unfit, as_stored
from ..files.atomic import new_folder
from ..files.encode import coded_if_smallest
from ..files.lock import lock_folder
from ..files.reader import PLAIN, SMALL
from ..files.sparse_file import check_grid
from ..files.writer import MAX_SHARD_BYTES, Saved, WritePlan, write
from ..grids import on_grids
from ..input_statistics import eagerly
from ..ops.grid import Coded
from ..ranks import Ranks
from .blocks import Stream, blocks_of
from .calibration import Calibration
from .disk_offload import BY_BLOCK, DiskOffload, disk_offload_of, nothing_like
from .forward import outputs
from .samples import Chunk
from .shared_work import agreed, of_first


def model_on_disk(folder: Path, dtype: str = "auto") -> Any:
    """The model, on the CPU, with the values of what is outside its blocks; ``Unfit`` where that cannot be."""
    model, read = empty_model(folder, dtype)
    blocks = blocks_of(model, eligible(model).weights)
    if not blocks:
        raise Unfit("it has no list of blocks")
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise Unfit("the statistics of its batch norms need the dense model beside it")
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                value, is_trained = nothing_like(parameter), parameter.requires_grad
                module._parameters[key] = made.setdefault(parameter, nn.Parameter(value, requires_grad=is_trained))
    offload = DiskOffload(model, blocks, read)
    for name, parameter in model.named_parameters():
        if name not in offload.names:
            parameter.data = read(name)
    BY_BLOCK.add(model)
    return model


def opened_folder(folder: Path, device: torch.device | str) -> Any:
    """The model of a folder to run: with its blocks on disk where that can be, on the CPU; else on ``device``."""
    if torch.device(device).type == "cpu":
        with suppress(Unfit):
            return model_on_disk(folder)
    return load_model(folder, device)


@contextmanager
def changed_folder(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | None, ranks: Ranks | None, *, small: bool = False
) -> Iterator[tuple[Any, Path]]:
    """The model of a folder to change, and a folder for what is done, from which the same call goes on if killed."""
    if out is None:
        raise ValueError(f"{folder} is pruned block by block into a new folder: give out=")
    source, target = Path(folder), Path(out)
    unfinished = target.with_name(f".{target.name}.unfinished")
    with ExitStack() as stack:

        def begin() -> Any:
            check_folder(source)
            if target.exists():
                raise ValueError(f"{target} is there already; choose another out")
            if ranks is None or ranks.rank == 0:
                stack.enter_context(lock_folder(unfinished))
            try:
                return model_on_disk(source)
            except Unfit as reason:
                said = f"{source} cannot be read block by block: {reason}"
                raise ValueError(f"{said}; load the model, and pass it instead") from None

        model = agreed(ranks, begin)
        yield model, unfinished
        of_first(ranks, lambda: _write(model, source, target, unfinished, small=small))
        disk = disk_offload_of(model)
        assert disk is not None
        disk.read = reader_of(model, target)
        disk.stored.clear()


def _write(model: nn.Module, source: Path, out: Path, unfinished: Path, *, small: bool) -> None:
    """Write a changed model to a new folder with a card, and remove the folder for what was done."""
    with new_folder(out, inside=unfinished) as part:
        saved = save_from_disk(model, source, part, small=small)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        facts = facts_of_files(part, shapes, saved.rows)
        write_card(part, CardFacts(name=out.resolve().name, source=str(source), **facts))
    shutil.rmtree(unfinished, ignore_errors=True)


def save_from_disk(
    model: nn.Module, folder: Path, out: Path, *, small: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Saved:
    """Write a model whose blocks are on disk, one tensor at a time, with what lies beside it in its folder."""
    disk, state, grids = disk_offload_of(model), model.state_dict(), on_grids(model)
    assert disk is not None

    def value(name: str) -> Tensor:
        return disk.value(name) if name in disk.names else state[name]

    def coded(name: str) -> Coded | None:
        if name not in grids:
            return None
        check_grid(name, {name: (tensor := value(name))}, grids[name])
        return coded_if_smallest(tensor, grids[name])

    save_config(model, out)
    source = tensors_of(model, value)
    if small:
        source = replace(source, fetch_coded=coded, metadata=source.metadata | stored_names_of(model))
    else:
        source = as_stored(model, source)
    saved = write(source, WritePlan(out / (SMALL if small else PLAIN), small, max_shard_bytes))
    copy_beside(folder, out)
    return saved


PROGRAM = {"cpu": 600_000_000, "cuda": 2_500_000_000}  # bytes of main memory that Python and torch take
SQUARES = 5  # matrices (in, in) of a solve: the Gram matrix, its factor and inverse, and what products need
VALUES = 7  # matrices (out, in) of it, in float32
LOGITS = 200_000_000  # bytes of an evaluation


def needs_of(calibration: Calibration, disk: DiskOffload, *, repairs: bool) -> tuple[str, dict[str, int]]:
    """The memory that a model on disk will need, in words and in bytes; its first block runs on one sample."""
    outside = [t for name, t in calibration.model.named_parameters() if name not in disk.names]
    shapes = (sorted(weight.parameter.shape[-2:]) for weight in calibration.weights.values())  # inputs may be more
    solving = max(4 * (SQUARES * columns * columns + VALUES * rows * columns) for rows, columns in shapes)
    parts = {
        "outside the blocks": sum(t.nbytes for t in dict.fromkeys([*outside, *calibration.model.buffers()])),
        "blocks": 2 * max(map(disk.num_bytes, disk.blocks)) if repairs else max(map(disk.num_bytes, disk.blocks)),
        "activations": (2 if repairs else 1) * _stream_bytes(calibration) if calibration.has_batches else 0,
        "solving": solving if repairs else 0,
        "evaluation": LOGITS,
    }
    if calibration.memory is not None:
        parts["activations"] = min(parts["activations"], calibration.memory)
    total = sum(parts.values())
    if calibration.offload is None:
        return f"needs about {in_units(PROGRAM['cpu'] + total)} of main memory", parts
    main = PROGRAM["cuda"] + parts["outside the blocks"] + parts["blocks"] + parts["activations"]
    return f"needs about {in_units(main)} of main memory and {in_units(total)} of GPU memory", parts


def _stream_bytes(calibration: Calibration) -> int:
    """Of the activations between two blocks, for all samples."""
    samples, model = calibration.samples, calibration.model
    stream = Stream(calibration.blocks, samples)
    with calibration.open(), eagerly():
        one = stream.run(0, 1, lambda chunk: outputs(model, calibration.batch(chunk)), Chunk(0, 0, 1)).get(1)
    return len(samples) * sum(leaf.nbytes for leaf in pytree.tree_leaves(one) if isinstance(leaf, Tensor))


class FirstBlockDone(BaseException):
    """Ends a trial run."""


class FirstBlock:
    """A progress function that measures the first block, and ends the call when the second one begins."""

    def __init__(self) -> None:
        self.began, self.before, self.seconds = time.perf_counter(), 0.0, 0.0
        self._passed = False

    def __call__(self, num_done: int, total: int, phase: str) -> None:
        if phase.startswith("repair of") and not self.before:
            self.before = time.perf_counter() - self.began
        if phase.startswith("passes through block 1 of"):
            self._passed = True
        elif self._passed and phase.startswith("repair of"):
            self.seconds = time.perf_counter() - self.began - self.before
            raise FirstBlockDone


def in_units(num_bytes: int) -> str:
    """A size as one reads it, in powers of a thousand."""
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"
