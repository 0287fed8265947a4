"""Results of pruning a trained model, as numbers, text, HTML and charts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..masks import Masks
from ..ops import bits
from ..plot import Figure, layers_chart, notebook_html, trials_chart
from .changed import ChangedModel
from .disk_offload import disk_offload_of
from .level import Level, num_zeros
from .options import Limit, Trial
from .probe.prober import Tau
from .step import LayerRepair

SHOWN = 3  # names of weights that were not repaired for one reason


@dataclass(frozen=True)
class Layer:
    """One weight: how many of its elements are zero, and how many of them the score proposed to prune."""

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
    bits: int | None = None  # of its kept weights, where they are on a grid
    bits_error: float | None = None  # of the outputs, after the weights were put onto it

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_weights if self.num_weights else 0.0


@dataclass(repr=False)
class Result(ChangedModel):
    """What pruning did to a model and what it cost; ``undo_`` restores the model.

    ``sparsity``, ``num_pruned`` and ``layers`` count the zeros that the model has now: each call reads all prunable
    weights once. ``masks`` are those found by pruning.

    ``undo_``, ``apply_``, ``masks_alone``, ``retake_`` and ``dense`` raise if parameters were trained or cast after
    pruning. The model may move to another device.
    """

    def __repr__(self) -> str:
        zeros, num = self.num_pruned, self.num_weights
        of = f"{zeros:,} of {num:,} weights in {len(self.level.weights)} layers are zero"
        return f"Result({zeros / num:.4%}: {of}{_in_bits(self.level)}, {self.seconds:.1f} s)"

    @property
    def notes(self) -> list[str]:
        """Sentences that say what was tuned, what was not, and which layers could not be repaired or quantised."""
        level, notes = self.level, self.level.tuning_notes()
        reasons: dict[str, dict[str, list[str]]] = {}
        for name in level.weights:
            repair = level.repairs.get(name, LayerRepair())
            is_left_out = level.grids and name not in level.grids and level.weights[name].parameter.numel()
            for what, reason in {
                "Pruned but not repaired": repair.not_repaired,
                "Rounded to the nearest values": repair.only_rounded,
                "Not in few bits": "its shape does not tell its rows" if is_left_out else None,
            }.items():
                if reason:
                    reasons.setdefault(what, {}).setdefault(reason, []).append(name)
        for what, by_reason in reasons.items():
            num = sum(map(len, by_reason.values()))
            which = "; ".join(f"{_listed(names)} ({reason})" for reason, names in by_reason.items())
            notes.append(f"{what}, {num} of {len(level.weights)} layers: {which}.")
        return notes + level.not_tuned

    def plot(self) -> Figure:
        """A chart of each layer's sparsity, and of its errors if it was repaired."""
        return layers_chart([asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers])

    def _repr_html_(self) -> str:
        rows = []
        for layer in self.layers:
            errors = (layer.mask_error, layer.error, *([layer.bits_error] if self.level.grids else []))
            errors = ["" if error is None else f"{error:.4f}" for error in errors]
            shape = "x".join(map(str, layer.shape))
            rows.append((layer.name, shape, f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}", *errors))
        columns = ("layer", "shape", "weights pruned", "sparsity", "error, mask alone", "error")
        columns += ("error, few bits",) if self.level.grids else ()
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
            counts = parameter.numel(), self._num_zeros(name, parameter), int(bits.count(level.proposed(name)))
            odd = (ratios.num_zero, ratios.num_not_finite) if ratios else (0, 0)
            errors = repair.mask_error, repair.error, repair.not_repaired
            bits_of = level.grids[name].grid.bits if name in level.grids else None
            errors += (bits_of, repair.bits_error)
            layers.append(Layer(name, tuple(parameter.shape), *counts, *odd, level.taus.get(name), *errors))
        return layers

    @property
    def num_pruned(self) -> int:
        return sum(self._num_zeros(name, parameter) for name, parameter in self._parameters().items())

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters().values())

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in the prunable weights."""
        return self.num_pruned / self.num_weights

    @property
    def sparsity_before(self) -> float:
        """Fraction of zeros in the prunable weights before the call."""
        sizes = [weight.parameter.numel() for weight in self.level.weights.values()]
        return 1 - sum(int(bits.count(packed)) for packed in self.level.live.values()) / sum(sizes)

    @contextmanager
    def masks_alone(self) -> Iterator[None]:
        """Inside this context, the model has the dense weights under the masks, without their repair."""
        if disk := disk_offload_of(self.model):
            with self.level.masks_alone(), disk.reading(self.level.masked):
                yield
            return
        with self._changing("masks_alone"):
            self._undo_()
            with self.level.masks_alone():
                yield

    def retake_(self, tau: Tau, base: float = 1.0) -> None:
        """Change masks and model to another tau, from the ratios that the probe stored; repair again if it did before.

        For ``joint`` these are the masks of a probe with that tau. For ``sequential`` and ``block`` later ratios were
        recorded with the earlier weights pruned by the old tau.
        """
        self.level.packed_at(tau, base)  # refuses what is no tau
        with self._changing("retake_"):
            self._undo_()
            self.level.retake_(tau, base)

    def _num_zeros(self, name: str, parameter: Tensor) -> int:
        known = self.level.num_zeros.get(name)
        return num_zeros(parameter) if known is None else known

    def _parameters(self) -> dict[str, nn.Parameter]:
        """What the modules hold now: loading weights may have replaced parameters."""
        weights = self.level.weights
        held = {name: weight.module._parameters.get(name.rpartition(".")[2]) for name, weight in weights.items()}
        return {name: weights[name].parameter if now is None else now for name, now in held.items()}

    def _check_parameters(self) -> None:
        for name, weight in self.level.weights.items():
            if weight.module._parameters.get("weight", weight) is None:
                raise ValueError(f"{name} is in a sparse layer: call unsparsify_(model) first")
            if all(p is not weight.parameter for p in weight.module.parameters()):
                problem = f"{name} is no longer the parameter that was pruned: it was replaced, as by"
                advice = "load the weights without assign, or the dense ones"
                raise ValueError(f"{problem} load_state_dict(..., assign=True); {advice}")


@dataclass(repr=False)
class QuantizeResult(Result):
    """What quantising did to a model; ``undo_`` restores the old value of every weight."""

    done: ClassVar[str] = "quantised"
    doing: ClassVar[str] = "quantising"
    call: ClassVar[str] = "quantize"

    def __repr__(self) -> str:
        level = self.level
        num = sum(level.weights[name].parameter.numel() for name in level.grids)
        of = f"{num:,} weights in {len(level.grids)} of {len(level.weights)} layers"
        return f"QuantizeResult({of}{_in_bits(level)}, {self.sparsity:.4%} zero, {self.seconds:.1f} s)"


def _in_bits(level: Level) -> str:
    if not level.grids:
        return ""
    bits_of = next(iter(level.grids.values())).grid.bits
    return f", kept weights in {bits_of} bits, with masks and scales {level.bits_a_weight:.2f} bits a weight"


def _listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + others


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
