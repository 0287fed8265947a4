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
    """Make a trained model smaller: an ordinary model of its class, which runs without Prunus.

    Give --size, the share of the blocks' weights that stays, or say what goes: --neurons, --heads, --layers, --experts,
    each a fraction (0.25) or a number (4). What goes is chosen on calibration samples, block after block, and the
    weights that read the rest are solved anew. Killed, the same command goes on with the next layers.
    """

    name: ClassVar[str] = "shrink"

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a .gguf file, or module:function
    size: float | None = None  # share of the blocks' weights that stays; with --heads 0 all heads stay
    neurons: int | float | None = None  # to remove from each MLP, or channels from each block of a ResNet
    heads: int | float | None = None  # groups to remove from each attention: a key and value head with its query heads
    layers: int | float | None = None  # whole layers to remove
    experts: int | float | None = None  # to remove from each layer
    multiple: int = 1  # round the neurons that stay down to a multiple, as 64
    split: Literal["even", "measured"] = "even"  # measured: try mixtures of depth and width for --size, keep the best
    targets: Literal["own", "dense"] = "own"  # reproduce the outputs of each layer by itself, or the dense model's
    samples: int | None = None  # calibration windows; by default up to 512

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
        from ..oneshot.widths import Wanted

        wanted = {name: getattr(self, name) for name in WANTED}
        if all(value is None for name, value in wanted.items() if name != "multiple"):
            raise ValueError("say how much stays, --size 0.7, or what goes: --neurons, --heads, --layers or --experts")
        if self.split == "measured" and (self.size is None or self.layers is not None):
            raise ValueError("--split measured divides a size into depth and width; give --size and no --layers")
        for flag in given(self, "plot", "multiple") if not Wanted(**wanted).has_width else ():
            raise ValueError(f"without --size, --neurons or --heads nothing reads {flag}; leave it off")


def run(command: Command) -> None:
    from .model_work import on_all_ranks

    on_all_ranks(command)
