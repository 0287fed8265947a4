"""What pruning a model block by block will take: memory before it starts, and time from its first block."""

import time

from torch import Tensor
from torch.utils import _pytree as pytree

from ..input_statistics import eagerly
from .blocks import Stream
from .calibration import Calibration
from .disk_offload import DiskOffload
from .forward import outputs
from .samples import Chunk

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
