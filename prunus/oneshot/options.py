"""Options: how a repair makes up for pruned weights, how far a search goes, and the method that a call stands for."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..ops.grid import Grid
from ..select import Global, PerLayer, PerRow, Selector
from .probe.objective import Loss
from .probe.prober import Probe
from .samples import digest, is_empty


@dataclass(frozen=True)
class BlockTuning:
    """Trains kept weights, biases and norms to give the dense model's outputs, by Adam over the calibration samples.

    First each block learns alone, for ``epochs`` passes over the samples: it reads what the pruned model gives it, and
    its targets are the outputs of the dense block in the dense model. Then the whole model learns for ``whole_epochs``:
    the loss is its KL divergence from the dense model, over tokens or classes, or logit by logit; if the model does not
    return logits, it is the mean squared difference of the outputs (``result.notes`` says which). Learning rates fall
    to zero. A tenth of the samples is held out: the epoch that is best on it is kept, or none if none improves.
    """

    epochs: int = 8
    lr: float = 3e-4
    whole_epochs: int = 16
    whole_lr: float = 1e-4
    batch: int = 8  # samples of a step

    def __post_init__(self) -> None:
        _check_counts(self, "epochs", "whole_epochs", "batch")
        if self.batch < 1:
            raise ValueError(f"batch must be a number of samples, at least 1, got {self.batch}")
        for name in ("lr", "whole_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")


def _check_counts(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")


@dataclass(frozen=True)
class Repair:
    """How the weights that stay make up for the pruned ones.

    ``targets``: reproduce the outputs of the dense model (``"dense"``), or those of the dense weights on the inputs
    that the pruned model gives them (``"own"``). A larger ``damping`` holds weights nearer to their dense values; None
    chooses it by the number of tokens. At most ``iterations`` of ADMM find which weights stay, and at most ``refine``
    steps of conjugate gradients find their values. With ``tune``, True or ``BlockTuning(...)``, each block then learns
    the outputs of the dense one, and the whole model those of the dense model. ``batch_norm`` changes the running
    statistics of batch norms at the end as those of the samples changed. ``tf32`` allows TF32 on CUDA in the
    products of ADMM, never in factorisation, refinement and errors.
    """

    targets: Literal["dense", "own"] = "dense"
    damping: float | None = None
    iterations: int = 300
    refine: int = 10
    tune: bool | BlockTuning = False
    batch_norm: bool = True
    tf32: bool = True

    def __post_init__(self) -> None:
        if self.targets not in ("dense", "own"):
            raise ValueError(f"targets must be dense or own, got {self.targets!r}")
        if self.damping is not None and not 0 <= self.damping < math.inf:
            raise ValueError(f"damping must be a finite number of at least 0, got {self.damping}")
        if not isinstance(self.tune, bool | BlockTuning):
            raise ValueError(f"tune must be True, False or BlockTuning(...), got {self.tune!r}")
        if self.tune and self.targets != "dense":
            raise ValueError("tune learns the dense model's outputs, so it needs targets='dense'")
        _check_counts(self, "iterations", "refine")

    @property
    def tuning(self) -> BlockTuning | None:
        return BlockTuning() if self.tune is True else self.tune or None

    def damping_for(self, num_tokens: int, num_inputs: int) -> float:
        """``damping``, or by default ``0.8 / sqrt(tokens per input)`` within [0.01, 1]: few tokens call for more."""
        if self.damping is not None:
            return self.damping
        return min(max(0.8 * math.sqrt(num_inputs / max(1, num_tokens)), 0.01), 1.0)


@dataclass(frozen=True)
class Limit:
    """How much worse a metric may get: by a fraction of the dense model's (``relative``) or by a number (``absolute``).

    ``better`` is required: ``lower`` for perplexity and losses, ``higher`` for accuracy. A metric that is not finite
    fails every limit.
    """

    relative: float | None = None
    absolute: float | None = None
    better: Literal["lower", "higher"] | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.relative, self.absolute) if value is not None]
        if len(given) != 1 or not (math.isfinite(given[0]) and given[0] >= 0):
            raise ValueError(f"a limit is either relative or absolute, from 0 on, got {self.relative}, {self.absolute}")
        if self.better not in ("lower", "higher"):
            problem = f"better must be 'lower' (perplexity, loss) or 'higher' (accuracy), got {self.better!r}"
            raise ValueError(f"{problem}; for example Limit(relative=0.05, better='lower')")

    def allows(self, dense: float, value: float) -> bool:
        worse = value - dense if self.better == "lower" else dense - value
        return math.isfinite(value) and worse <= self._room(dense)

    def in_words(self, dense: float) -> str:
        """The metric of the dense model, and the worst value allowed."""
        sign, words = (1, "at most") if self.better == "lower" else (-1, "at least")
        return f"dense {dense:.4g}, {words} {dense + sign * self._room(dense):.4g} allowed"

    def _room(self, dense: float) -> float:
        return self.relative * abs(dense) if self.relative is not None else self.absolute or 0.0


@dataclass(frozen=True)
class Trial:
    """One level: sparsity aimed at and reached, metric, whether it passed; tuning multiplied tau by ``scale``."""

    target: float
    sparsity: float
    metric: float
    accepted: bool
    scale: float = 1.0
    passes: int = 0
    evaluations: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Levels:
    """Tries sparsities ``initial``, ``initial + step``, ... up to ``final``, until one fails."""

    initial: float = 0.1
    step: float = 0.1
    final: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.initial <= self.final < 1 and self.step > 0):
            raise ValueError(f"levels need 0 < initial <= final < 1 and a step above 0, got {self}")

    def next(self, trials: Sequence[Trial]) -> float | None:
        """The next sparsity to try, or None."""
        target = round(self.initial + len(trials) * self.step, 9)
        failed = bool(trials) and not trials[-1].accepted
        return None if failed or target > self.final else target


@dataclass(frozen=True)
class Bisection:
    """Tries ``final``, then bisects between what passed and what failed until they are at most ``gap`` apart."""

    final: float = 0.9
    gap: float = 0.01

    def __post_init__(self) -> None:
        if not (0 < self.final < 1 and self.gap > 0):
            raise ValueError(f"bisection needs 0 < final < 1 and a gap above 0, got {self}")

    def next(self, trials: Sequence[Trial]) -> float | None:
        low = max((trial.target for trial in trials if trial.accepted), default=0.0)
        high = min((trial.target for trial in trials if not trial.accepted), default=None)
        if high is None:
            return None if trials else self.final
        return (low + high) / 2 if high - low > self.gap else None


@dataclass(frozen=True)
class TauTuning:
    """Tries a level that fails again with smaller taus: ``steps`` steps of bisection on their common factor.

    By default this uses the stored ratios of the level: it costs evaluations but no new pass. With ``both_steps`` the
    level before is also undone and probed again, so every step costs two probes.
    """

    steps: int = 5
    both_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"tuning needs at least one step, got {self.steps}")


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
