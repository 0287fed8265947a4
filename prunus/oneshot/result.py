"""Results of pruning a trained model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from ..eligible import Weight
from ..masks import Masks
from ..ops import bits
from ..plot import Figure, layers_chart, notebook_html, trials_chart
from .drop_experts import DroppedExperts
from .limit import Limit, Trial
from .probe.decide import Ratios, Tau, check_tau, is_allowed, taus
from .repair import LayerRepair
from .tune import Tuned
from .walk import Originals

SHOWN = 3  # names of weights that were not repaired for one reason


@dataclass(frozen=True)
class Layer:
    """One weight: how many of its elements are zero, and how many the strategy proposed at this level."""

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
    """Masks, figures of each layer, and the cost. ``undo_`` restores the model as it was before.

    ``sparsity``, ``num_pruned`` and ``layers`` count the zeros of the model as it is now: each time that costs one read
    of all its prunable weights. ``masks`` are those of the pruning.
    """

    weights: Mapping[str, Weight]
    packed: dict[str, Tensor]
    candidates: dict[str, Tensor]  # packed bits of what the strategy proposed at this level
    ratios: dict[str, Ratios] = field(default_factory=dict)
    taus: dict[str, float] = field(default_factory=dict)
    passes: int = 0  # forward and backward passes of one sample
    forwards: int = 0  # forward passes of one sample without a backward
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # seconds by part of the run
    peak_bytes: int = 0
    rows: int = 0  # per pass, at the end: samples times variants of the weights
    halved: int = 0  # how often memory ran out
    checkpointing: bool = False  # whether blocks ran again for the backward
    originals: Originals = field(default_factory=Originals)
    repairs: dict[str, LayerRepair] = field(default_factory=dict)
    tuned: dict[int, Tuned] = field(default_factory=dict)  # by block
    tuned_whole: Tuned | None = None
    not_tuned: list[str] = field(default_factory=list)  # sentences: what was to be tuned and was not, and why
    experts: DroppedExperts | None = None  # that are gone as a whole
    repair_again: "Callable[[Result], None] | None" = None  # repairs the dense model by other masks of the probe
    _repaired: dict[Tensor, Tensor] = field(default_factory=dict)  # values that ``undo_`` took back

    def __repr__(self) -> str:
        zeros, num = self.num_pruned, self.num_weights
        of = f"{zeros:,} of {num:,} weights in {len(self.weights)} layers are zero"
        return f"Result({zeros / num:.4%}: {of}, {self.seconds:.1f} s)"

    def __str__(self) -> str:
        return "\n".join([repr(self), self.cost, *self.notes])

    @property
    def cost(self) -> str:
        """Seconds, what most of them went into, and passes of one sample if there were any."""
        longest = sorted(self.parts, key=lambda part: -self.parts[part])[:3]
        parts = ", ".join(f"{part} {self.parts[part]:.1f}" for part in longest)
        passes = {"with gradients": self.passes, "without gradients": self.forwards}
        said = " and ".join(f"{num:,} {which}" for which, num in passes.items() if num)
        return f"{self.seconds:.1f} s{f': {parts}' if parts else ''}{f'; passes of one sample: {said}' if said else ''}"

    @property
    def notes(self) -> list[str]:
        """Sentences on what was tuned, what was not, and which layers could not be repaired."""
        found = []
        if self.tuned:
            helped = sum(one.helped for one in self.tuned.values())
            found.append(f"Tuning brought {helped} of {len(self.tuned)} blocks nearer to the dense ones.")
        if (whole := self.tuned_whole) is not None:
            took = f"from {whole.before:.4g} to {whole.after:.4g} on held-out samples"
            found.append(f"Tuning the whole model took its {whole.loss} {took}.")
        reasons: dict[str, list[str]] = {}
        for name, repair in self.repairs.items():
            if repair.not_repaired:
                reasons.setdefault(repair.not_repaired, []).append(name)
        if reasons:
            num = sum(map(len, reasons.values()))
            which = "; ".join(f"{_listed(names)} ({reason})" for reason, names in reasons.items())
            found.append(f"Pruned but not repaired, {num} of {len(self.weights)} layers: {which}.")
        return found + self.not_tuned

    def plot(self) -> Figure:
        """Sparsity of each layer, and its errors where it was repaired."""
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
        return Masks({name: weight.parameter for name, weight in self.weights.items()}, self.packed)

    @property
    def layers(self) -> list[Layer]:
        return [self._layer(name, self._parameter(name)) for name in self.weights]

    @property
    def num_pruned(self) -> int:
        return sum(num_zeros(self._parameter(name)) for name in self.weights)

    @property
    def num_weights(self) -> int:
        return sum(self._parameter(name).numel() for name in self.weights)

    def _parameter(self, name: str) -> nn.Parameter:
        """What the module holds now: loading and dropped experts may have put another parameter in place."""
        weight = self.weights[name]
        held = weight.module._parameters.get(name.rpartition(".")[2])
        return weight.parameter if held is None else held

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights."""
        return self.num_pruned / self.num_weights

    @property
    def sparsity_before(self) -> float:
        """The same before this level."""
        num = sum(weight.parameter.numel() for weight in self.weights.values())
        return 1 - sum(int(bits.count(self._live(name))) for name in self.weights) / num

    def undo_(self) -> None:
        """Give every changed weight its old value, bit for bit, and put dropped experts back."""
        self._undo_weights_()
        if self.experts is not None:
            self.experts.undo_()

    def _undo_weights_(self) -> None:
        """The same for the weights that are there, with the experts dropped."""
        for name, weight in self.weights.items():
            if weight.module._parameters.get("weight", weight) is None:
                raise ValueError(f"{name} is kept in a sparse layer: call unsparsify_(model) first")
            if self.experts is None and all(p is not weight.parameter for p in weight.module.parameters()):
                raise ValueError(
                    f"{name} is no longer the parameter that was pruned: something has put another in its place, as "
                    "load_state_dict(..., assign=True) does; load the weights without assign, or the dense ones"
                )
        self._repaired = self.originals.restore_() or self._repaired
        if self.experts is not None:
            self.experts.apply_()

    @torch.no_grad()
    def apply_(self) -> None:
        """Prune again what ``undo_`` restored."""
        self._undo_weights_()
        if self._repaired:
            while self._repaired:  # of each weight one value beside the model: the dense or the repaired one
                tensor, values = self._repaired.popitem()
                self.originals.save_all(tensor)
                tensor.detach().copy_(values)
            return
        for name, weight in self.weights.items():
            where = bits.unpack(self._live(name) & ~self.packed[name], weight.parameter.shape)
            self.originals.prune_(weight.parameter, where)

    @contextmanager
    def masks_alone(self) -> Iterator[None]:
        """The dense weights under the masks, without their repair, while this is open."""
        self._undo_weights_()
        masks = Originals()
        try:
            for name, weight in self.weights.items():
                masks.prune_(weight.parameter, ~bits.unpack(self.packed[name], weight.parameter.shape))
            yield
        finally:
            masks.restore_()
            self.apply_()

    def packed_at(self, tau: Tau, base: float = 1.0) -> dict[str, Tensor]:
        """Packed masks that another tau gives from the stored ratios, without a new pass.

        For ``joint`` these are the masks of a probe with that tau. For ``sequential`` and ``block`` later ratios were
        recorded with the earlier weights pruned by the tau of the run, not by this one.
        """
        if tau == "target":
            raise ValueError("target is a rule for a whole probe; give a number, a mapping, a list or 'adaptive'")
        check_tau(tau)
        if not self.ratios:
            raise ValueError("there are no ratios to read: the model was pruned without a probe")
        return {name: self._with_tau(name, value) for name, value in self._taus(tau, base).items()}

    def retake_(self, tau: Tau, base: float = 1.0) -> None:
        """Make masks, model and ``taus`` those of another tau, from the stored ratios; a repair is done anew."""
        self.packed = self.packed_at(tau, base)
        if self.repair_again is None:
            self.apply_()
        else:
            self._undo_weights_()
            self.repair_again(self)
        self.taus = self._taus(tau, base)

    def _taus(self, tau: Tau, base: float) -> dict[str, float]:
        return taus(tau, {name: weight.parameter.numel() for name, weight in self.weights.items()}, base)

    def _with_tau(self, name: str, tau: float) -> Tensor:
        shape = self.weights[name].parameter.shape
        where = bits.unpack(self.candidates[name], shape)
        where[where.clone()] = is_allowed(self.ratios[name].q, tau)
        return self._live(name) & ~bits.pack(where)

    def _live(self, name: str) -> Tensor:
        """Packed bits of what was not pruned before this level: what is kept now, and the candidates."""
        return self.packed[name] | self.candidates[name]

    def _layer(self, name: str, parameter: nn.Parameter) -> Layer:
        ratios, repair = self.ratios.get(name), self.repairs.get(name, LayerRepair())
        return Layer(
            name,
            tuple(parameter.shape),
            parameter.numel(),
            num_zeros(parameter),
            int(bits.count(self.candidates[name])),
            ratios.num_zero if ratios else 0,
            ratios.num_not_finite if ratios else 0,
            self.taus.get(name),
            repair.mask_error,
            repair.error,
            repair.not_repaired,
        )


def _listed(names: Sequence[str]) -> str:
    """The first few of the names, and how many others there are."""
    others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + others


def num_zeros(tensor: Tensor) -> int:
    return tensor.numel() - int(tensor.detach().count_nonzero())


@dataclass(repr=False)
class Found:
    """The result of a search; the model is pruned by ``masks``.

    ``alone`` is the metric of the same strategy without the probe, in one shot from the dense model, at sparsity
    ``alone_sparsity``: that of the result, up to the rounding of its scope.
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
        return f"Found({self.sparsity:.4%} zero, {metrics}, {len(self.trials)} trials, {self.seconds:.1f} s)"

    def plot(self) -> Figure:
        """The metric of each trial over its sparsity."""
        return trials_chart([(trial.sparsity, trial.metric, trial.accepted) for trial in self.trials], self.dense)

    def _repr_html_(self) -> str:
        rows = [
            (f"{one.target:.2%}", f"{one.sparsity:.2%}", f"{one.metric:.4g}", one.accepted, f"{one.seconds:.1f}")
            for one in self.trials
        ]
        return notebook_html(repr(self), self.plot, ("target", "sparsity", "metric", "accepted", "seconds"), rows)
