"""The method of a call: what its options stand for, the same for every level of a search."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..ops.grid import Grid
from ..select import Global, PerLayer, PerRow, Selector
from .options import Repair
from .probe.objective import Loss
from .probe.prober import Probe
from .samples import digest, is_empty

ScoreLike = str | Callable[..., Tensor]


@dataclass(frozen=True)
class Method:
    score: ScoreLike | None = "magnitude"  # None: the solver of the repair finds which weights stay
    select: Selector = field(default_factory=Global)
    repair: Repair | None = None
    loss: Loss | None = None
    checkpointing: bool = False
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # Adam's second ones, by weight
    grid: Grid | None = None  # of few bits, that kept weights are put onto

    @staticmethod
    def of(
        batches: Any,
        score: ScoreLike | None,
        select: Selector | None,
        probe: Probe | None,
        repair: Repair | Literal["auto"] | None,
        **more: Any,
    ) -> "Method":
        """What is left open is filled in: score, selector and repair."""
        has_batches = not is_empty(batches)
        if not has_batches and batches != ():
            raise ValueError("no calibration samples were given: batches is empty; leave it out to prune by magnitude")
        if repair == "auto":
            repair = Repair() if has_batches and probe is None else None
        if repair is not None and not isinstance(repair, Repair):
            raise ValueError(f"repair must be Repair(...), or None for masks alone, got {repair!r}")
        if repair is not None and not has_batches:
            raise ValueError("a repair needs calibration samples: give batches, or leave out repair")
        if score is None and (repair is None or probe is not None):
            score = "magnitude"
        if isinstance(select, type):
            raise ValueError(f"select must be a selector, {select.__name__}(), got the class itself")
        if select is None:
            select = PerLayer() if score is None else PerRow() if score == "wanda" else Global()
        if not isinstance(select, Selector):
            raise ValueError(f"select must be a selector such as PerRow(), got {select!r}")
        return Method(score, select, repair, **more)

    @property
    def allocate(self) -> object:
        """How layers share the sparsity, where the selector says so."""
        return self.select.allocate if isinstance(self.select, PerLayer) else None

    def settings(self, names: Iterable[str]) -> dict[str, Any]:
        """What a resumed call must share, beside the model with these weights, the samples and the sparsity."""
        settings: dict[str, Any] = {"score": self.score, "select": self.select, "repair": self.repair}
        settings |= {"grid": self.grid} if self.grid else {}
        if self.allocate == "moments":
            settings["moments"] = digest([(name, self.moments.get(name)) for name in names])
        if self.loss is not None and (self.allocate == "fisher" or self.score in ("fisher", "path")):
            settings["loss"] = self.loss
        return settings
