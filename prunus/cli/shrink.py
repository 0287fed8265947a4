"""``prunus shrink``: its options, and which of them go together; the work is in shrink_work."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import tyro

from .model_options import ModelCommand
from .shared_options import given

COPIES = 4  # of a model, where it is shrunk in memory
WANTED = ("size", "neurons", "heads", "layers", "experts", "multiple")


@dataclass(frozen=True, kw_only=True)
class Command(ModelCommand):
    """Make a trained model smaller; the result is an ordinary model of its class and runs without Prunus.

    Give --size, the fraction of the blocks' weights to keep, or what to remove, as a fraction (0.25) or a number (4):
    with --neurons, --heads, --layers or --experts. Calibration samples decide what is removed, block by block, and the
    weights that read the rest are solved again. If the command is killed, repeat it: it continues.
    """

    name: ClassVar[str] = "shrink"

    model: tyro.conf.Positional[str]  # Hugging Face folder, .gguf file, or module:function
    size: float | None = None  # fraction of the blocks' weights to keep; add --heads 0 to keep all heads
    neurons: int | float | None = None  # neurons to remove from each MLP, or channels from each ResNet block
    heads: int | float | None = None  # head groups (a key-value head and its query heads) to remove from each layer
    layers: int | float | None = None  # whole layers to remove
    experts: int | float | None = None  # experts to remove from each layer
    multiple: int = 1  # round the number of kept neurons down to a multiple of this
    split: Literal["even", "measured"] = "even"  # measured: try mixes of fewer and narrower layers, keep the best
    targets: Literal["own", "dense"] = "own"  # outputs to match: those of each layer by itself, or the dense model's
    samples: int | None = None  # calibration windows; default: up to 512

    @property
    def on_disk(self) -> bool:
        """Only a model that takes much of the free memory: of others the speed is measured too."""
        if not super().on_disk:
            return False
        import torch

        from ..oneshot.resources import free_bytes

        size = sum(file.stat().st_size for file in Path(self.model).glob("*.safetensors"))
        return size * COPIES > free_bytes(torch.device("cpu"))

    @property
    def needs_whole(self) -> str | None:
        for name in ("layers", "experts"):
            if getattr(self, name) is not None:
                return f"--{name}"
        return "--split measured" if self.split == "measured" else super().needs_whole

    @property
    def most_samples(self) -> int:
        return 512

    def check(self) -> None:
        from ..oneshot.units import Wanted

        super().check()
        wanted = {name: getattr(self, name) for name in WANTED}
        if all(value is None for name, value in wanted.items() if name != "multiple"):
            raise ValueError(
                "give the fraction to keep, --size 0.7, or what to remove: --neurons, --heads, --layers or --experts"
            )
        if self.split == "measured" and (self.size is None or self.layers is not None):
            raise ValueError("--split measured divides --size into depth and width; give --size and leave off --layers")
        for flag in given(self, "plot", "multiple") if not Wanted(**wanted).has_width else ():
            raise ValueError(f"without --size, --neurons or --heads nothing reads {flag}; leave it off")


def run(command: Command) -> None:
    from .model_work import on_all_ranks

    on_all_ranks(command)
