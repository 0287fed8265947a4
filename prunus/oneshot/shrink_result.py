"""Results of shrinking a trained model, as numbers, text, HTML and a chart."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from ..plot import Figure, layers_chart, notebook_html
from .changed import ChangedModel
from .cuts import Cuts
from .drop_experts import ExpertLayer
from .drop_layers import DroppedLayers
from .units import Kind


@dataclass(frozen=True)
class ShrunkLayer:
    """The units that one weight reads: how many there were, which stay, and the error of the layer's outputs."""

    name: str  # of the weight
    kind: Kind
    num: int  # units before
    kept: tuple[int, ...]  # by their numbers in the dense model
    mask_error: float | None = None  # of the outputs, relative, with the old values of what stays
    error: float | None = None  # after they were solved anew


@dataclass(frozen=True)
class Size:
    """Of a model: weights of its blocks (matrices that can be pruned), all parameters, and their bytes."""

    weights: int
    parameters: int
    num_bytes: int


@dataclass(frozen=True)
class Mixture:
    """One mixture of depth and width: layers removed, and the distance of its outputs from the dense model's."""

    layers: int
    distance: float


@dataclass(repr=False)
class ShrinkResult(ChangedModel):
    """What shrinking did to a model and what it cost; ``undo_`` restores the model bit for bit."""

    layers: list[ShrunkLayer] = field(default_factory=list)
    dropped: DroppedLayers | None = None  # whole layers
    experts: list[ExpertLayer] = field(default_factory=list)
    before: Size = field(default_factory=lambda: Size(0, 0, 0))
    after: Size = field(default_factory=lambda: Size(0, 0, 0))
    mixtures: list[Mixture] = field(default_factory=list)
    removals: Sequence[Cuts] = ()  # before the weights of the level were changed
    cuts: Cuts = field(default_factory=Cuts)  # after it

    done: ClassVar[str] = "shrunk"
    doing: ClassVar[str] = "shrinking"
    call: ClassVar[str] = "shrink"

    def __repr__(self) -> str:
        before, after = self.before.weights, self.after.weights
        share = f"{after / before:.1%} of the blocks' weights stay, {after:,} of {before:,}"
        return f"ShrinkResult({share}; {', '.join(self.removed)}; {self.seconds:.1f} s)"

    @property
    def removed(self) -> list[str]:
        """What was removed, in words."""
        words = []
        for kind, one in (("neurons", "neurons"), ("heads", "head groups")):
            if nums := {(layer.num - len(layer.kept), layer.num) for layer in self.layers if layer.kind == kind}:
                gone, num = min(nums)
                differ = " and more" if len(nums) > 1 else ""
                words.append(f"{gone:,} of {num:,} {one} a layer{differ}")
        if self.dropped is not None:
            words.append(f"{self.dropped.num_dropped} of {self.dropped.num_layers} layers")
        if self.experts:
            gone, num = len(self.experts[0].dropped), len(self.experts[0].importance)
            words.append(f"{gone} of {num} experts a layer")
        return words or ["nothing"]

    @property
    def notes(self) -> list[str]:
        """Sentences that say which layers went, what was tuned, and what was not tuned or solved."""
        notes = [] if self.dropped is None else [f"Layers removed: {', '.join(self.dropped.names)}."]
        notes += self.level.tuning_notes()
        if self.mixtures:
            tried = ", ".join(f"{one.distance:.4g} with {one.layers} layers removed" for one in self.mixtures)
            notes.append(f"Mixtures tried, by their distance from the dense model after a short tuning: {tried}.")
        if unsolved := [name for name, repair in self.level.repairs.items() if repair.not_repaired]:
            notes.append(f"Not solved, as no sample reached them: {len(unsolved)} layers, {unsolved[0]} first.")
        return notes + self.level.not_tuned

    def plot(self) -> Figure:
        """A chart of the units that each layer keeps, and of the error of its outputs."""
        rows = [asdict(layer) | {"sparsity": 1 - len(layer.kept) / layer.num} for layer in self.layers]
        return layers_chart(rows)

    def _repr_html_(self) -> str:
        rows = []
        for layer in self.layers:
            errors = ["" if error is None else f"{error:.4f}" for error in (layer.mask_error, layer.error)]
            rows.append((layer.name, layer.kind, f"{len(layer.kept):,} of {layer.num:,}", *errors))
        columns = ("layer", "units", "stay", "error, old values", "error")
        return notebook_html(str(self), self.plot, columns, rows)

    def _undo_(self) -> None:
        self.cuts.undo_()
        self.level.undo_()
        for removal in reversed(self.removals):
            removal.undo_()

    def _apply_(self) -> None:
        for removal in self.removals:
            removal.apply_()
        self.level.apply_()
        self.cuts.apply_()

    @property
    def _is_cut(self) -> bool:
        return self.cuts.is_applied or any(removal.is_applied for removal in self.removals)
