"""Results of pruning a trained model, as numbers, text, HTML and charts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..masks import Masks
from ..ops import bits
from ..plot import Figure, layers_chart, notebook_html, trials_chart
from .dense import copied, is_overlapping
from .drop_experts import DroppedExperts
from .level import Level
from .options import Limit, Trial
from .originals import sums_of_bits
from .probe.decide import Tau
from .resources import Cost
from .step import LayerRepair

SHOWN = 3  # names of weights that were not repaired for one reason


@dataclass(frozen=True)
class Layer:
    """One weight: how many of its elements are zero, and how many the score proposed to prune at this level."""

    name: str
    shape: tuple[int, ...]
    num_weights: int
    num_pruned: int  # including those that were zero before
    num_candidates: int
    num_zero_gradient: int = 0  # candidates whose gradient was zero before and after
    num_not_finite: int = 0  # candidates kept because a gradient was NaN or infinite
    tau: float | None = None
    mask_error: float | None = None  # of the outputs, relative, with the first mask and dense weights
    error: float | None = None  # after the repair
    not_repaired: str | None = None  # why, where other weights were

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_weights if self.num_weights else 0.0


@dataclass(repr=False)
class Result:
    """What pruning did to a model and what it cost; ``undo_`` restores the model as it was before.

    ``sparsity``, ``num_pruned`` and ``layers`` count the zeros that the model has now: each call reads all its prunable
    weights once. ``masks`` are those of the pruning; ``experts`` are those that were dropped as a whole.

    ``undo_``, ``apply_``, ``masks_alone``, ``retake_`` and ``dense`` refuse a model whose parameters were trained or
    cast after pruning. The model may move to another device.
    """

    level: Level
    model: nn.Module
    experts: DroppedExperts | None = None

    def __post_init__(self) -> None:
        self._note_bits()

    def __repr__(self) -> str:
        zeros, num = self.num_pruned, self.num_weights
        of = f"{zeros:,} of {num:,} weights in {len(self.level.weights)} layers are zero"
        return f"Result({zeros / num:.4%}: {of}, {self.seconds:.1f} s)"

    def __str__(self) -> str:
        return "\n".join([repr(self), str(self.cost), *self.notes])

    @property
    def cost(self) -> Cost:
        return self.level.cost

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def notes(self) -> list[str]:
        """Sentences that say what was tuned, what was not, and which layers could not be repaired."""
        level, notes = self.level, []
        if level.tuned:
            helped = sum(one.helped for one in level.tuned.values())
            notes.append(f"Tuning brought {helped} of {len(level.tuned)} blocks nearer to the dense ones.")
        if (whole := level.tuned_whole) is not None:
            took = f"from {whole.before:.4g} to {whole.after:.4g} on held-out samples"
            notes.append(f"Tuning the whole model took its {whole.loss} {took}.")
        reasons: dict[str, list[str]] = {}
        for name, repair in level.repairs.items():
            if repair.not_repaired:
                reasons.setdefault(repair.not_repaired, []).append(name)
        if reasons:
            num = sum(map(len, reasons.values()))
            which = "; ".join(f"{_listed(names)} ({reason})" for reason, names in reasons.items())
            notes.append(f"Pruned but not repaired, {num} of {len(level.weights)} layers: {which}.")
        return notes + level.not_tuned

    def plot(self) -> Figure:
        """A chart of the sparsity of each layer, and of its errors if it was repaired."""
        return layers_chart([asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers])

    def _repr_html_(self) -> str:
        rows = []
        for layer in self.layers:
            errors = ["" if error is None else f"{error:.4f}" for error in (layer.mask_error, layer.error)]
            shape = "x".join(map(str, layer.shape))
            rows.append((layer.name, shape, f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}", *errors))
        columns = ("layer", "shape", "weights pruned", "sparsity", "error, mask alone", "error")
        return notebook_html(str(self), self.plot, columns, rows)

    @property
    def masks(self) -> Masks:
        """Boolean masks by name, True where the weight stays."""
        return Masks({name: weight.parameter for name, weight in self.level.weights.items()}, self.level.packed)

    @property
    def layers(self) -> list[Layer]:
        level, layers = self.level, []
        for name, parameter in self._parameters().items():
            ratios, repair = level.ratios.get(name), level.repairs.get(name, LayerRepair())
            counts = parameter.numel(), num_zeros(parameter), int(bits.count(level.proposed(name)))
            odd = (ratios.num_zero, ratios.num_not_finite) if ratios else (0, 0)
            errors = repair.mask_error, repair.error, repair.not_repaired
            layers.append(Layer(name, tuple(parameter.shape), *counts, *odd, level.taus.get(name), *errors))
        return layers

    @property
    def errors(self) -> dict[str, float]:
        """``|W' X - W X_d|^2 / |W X_d|^2`` by repaired layer: inputs X in the pruned model, X_d in the dense one."""
        return {name: repair.error for name, repair in self.level.repairs.items() if repair.error is not None}

    @property
    def num_pruned(self) -> int:
        return sum(map(num_zeros, self._parameters().values()))

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters().values())

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights."""
        return self.num_pruned / self.num_weights

    @property
    def sparsity_before(self) -> float:
        """The same before this level."""
        sizes = [weight.parameter.numel() for weight in self.level.weights.values()]
        return 1 - sum(int(bits.count(packed)) for packed in self.level.live.values()) / sum(sizes)

    def dense(self) -> nn.Module:
        """The dense model that was pruned, as a separate module in eval mode, without gradients and without your hooks.

        Repaired weights take the memory that ``undo_`` reads, without another copy: the module then lies in main
        memory, and you must not write to it while you may still undo. Everything else is cloned, and nothing is shared
        with the pruned model. Where experts were dropped, or two tensors overlap in memory, all of it is a copy.
        """
        self._check("dense")
        originals, is_undone = self.level.originals, self._is_undone
        device = torch.device("cpu") if originals.whole or self.experts is not None else None
        if self.experts is None and not is_overlapping(self.model):
            return copied(self.model, originals.lend(), device)
        self.undo_()
        try:
            return copied(self.model, {}, device)
        finally:
            if not is_undone:
                self.apply_()

    def undo_(self) -> None:
        """Give every changed weight its old value, bit for bit, and put dropped experts back."""
        with self._changing("undo_"):
            self._undo_weights_()
            if self.experts is not None:
                self.experts.undo_()

    def apply_(self) -> None:
        """Prune again what ``undo_`` restored."""
        with self._changing("apply_"):
            self._undo_weights_()
            self.level.apply_()

    @contextmanager
    def masks_alone(self) -> Iterator[None]:
        """While this is open, the model has the dense weights under the masks, without their repair."""
        with self._changing("masks_alone"):
            self._undo_weights_()
            with self.level.masks_alone():
                yield

    def retake_(self, tau: Tau, base: float = 1.0) -> None:
        """Make masks and model those of a probe with another tau, from the stored ratios, and repair again if it was.

        For ``joint`` these are the masks of a probe with that tau. For ``sequential`` and ``block`` later ratios were
        recorded with the earlier weights pruned by the tau of the run, not by this one.
        """
        self.level.packed_at(tau, base)  # refuses what is no tau
        with self._changing("retake_"):
            self._undo_weights_()
            self.level.retake_(tau, base)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """What the modules hold now: loading weights or dropping experts may have replaced parameters."""
        weights = self.level.weights
        held = {name: weight.module._parameters.get(name.rpartition(".")[2]) for name, weight in weights.items()}
        return {name: weights[name].parameter if now is None else now for name, now in held.items()}

    def _check_parameters(self) -> None:
        for name, weight in self.level.weights.items():
            if weight.module._parameters.get("weight", weight) is None:
                raise ValueError(f"{name} is kept in a sparse layer: call unsparsify_(model) first")
            if self.experts is None and all(p is not weight.parameter for p in weight.module.parameters()):
                raise ValueError(
                    f"{name} is no longer the parameter that was pruned: something has put another in its place, as "
                    "load_state_dict(..., assign=True) does; load the weights without assign, or the dense ones"
                )

    @property
    def _is_undone(self) -> bool:
        return self.level.originals.is_empty and (self.experts is None or not self.experts.is_applied)

    def _note_bits(self) -> None:
        self._bits, self._buffers = sums_of_bits(self.model), dict(self.model.named_buffers())

    def _check(self, call: str) -> None:
        """Refuse a model that others have changed; where it was moved, its new buffers are known afterwards."""
        self._check_parameters()
        buffers = dict(self.model.named_buffers())
        self.level.follow_({old: buffers[name] for name, old in self._buffers.items() if name in buffers})
        now = sums_of_bits(self.model)
        changed = [name for name in {**self._bits, **now} if now.get(name) != self._bits.get(name)]
        if not changed or (call == "undo_" and self._is_undone):
            return
        when, so = "undo_ restored it", "is for the model that was pruned; call prune again"
        if not self._is_undone:
            when, so = "it was pruned", "would bring back only what pruning changed"
            so += "; load the dense model again, or take result.dense() before you train"
        raise ValueError(f"the model was trained or changed after {when} (first in {changed[0]}), and {call} {so}")

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Check the model before it is changed here, and know it again afterwards."""
        self._check(call)
        try:
            yield
        finally:
            self._note_bits()

    def _undo_weights_(self) -> None:
        """Undo what was done to the weights that are there, with the experts dropped."""
        self.level.undo_()
        if self.experts is not None:
            self.experts.apply_()


def _listed(names: Sequence[str]) -> str:
    """The first few of the names, and how many others there are."""
    others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + others


def num_zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.detach().count_nonzero())


@dataclass(repr=False)
class SearchResult:
    """The result of a search; ``masks`` are those of the pruned model.

    ``alone`` is the metric of the same method without the probe, pruned at once from the dense model to
    ``alone_sparsity``: the sparsity of the result, up to rounding by its selector.
    """

    masks: Masks
    sparsity: float
    metric: float
    dense: float
    trials: list[Trial]
    limit: Limit
    alone: float | None = None
    alone_sparsity: float = 0.0
    passes: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        metrics = f"metric {self.metric:.4g}, {self.limit.in_words(self.dense)}"
        return f"SearchResult({self.sparsity:.4%} zero, {metrics}, {len(self.trials)} trials, {self.seconds:.1f} s)"

    def plot(self) -> Figure:
        """A chart of the metric of each trial over its sparsity."""
        return trials_chart([(trial.sparsity, trial.metric, trial.accepted) for trial in self.trials], self.dense)

    def _repr_html_(self) -> str:
        rows = [
            (f"{one.target:.2%}", f"{one.sparsity:.2%}", f"{one.metric:.4g}", one.accepted, f"{one.seconds:.1f}")
            for one in self.trials
        ]
        return notebook_html(repr(self), self.plot, ("target", "sparsity", "metric", "accepted", "seconds"), rows)
