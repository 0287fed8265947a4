"""Options: how a repair makes up for the pruned weights, and how far a search goes, in which steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class BlockTuning:
    """How kept weights, biases and norms learn the outputs of the dense model, by Adam over the calibration samples.

    First each block learns by itself, for ``epochs`` passes over the samples: it reads what the pruned model gives it,
    and its targets are the outputs of the dense block in the dense model. Then the whole model learns for
    ``whole_epochs``: the loss is the KL divergence of its distribution from the dense model's, over tokens or classes,
    or of each single logit; if the model does not return logits, it is the mean squared difference of its outputs
    (``result.notes`` says which). Learning rates fall to zero. A tenth of the samples is held out: the epoch that is
    best on it is kept, or none if none improves.
    """

    epochs: int = 8
    lr: float = 3e-4
    whole_epochs: int = 16
    whole_lr: float = 1e-4
    batch: int = 8  # samples of a step

    def __post_init__(self) -> None:
        _check_counts(self, "epochs", "whole_epochs", "batch")
        if self.batch < 1:
            raise ValueError(f"batch is a number of samples, at least 1, got {self.batch}")
        for name in ("lr", "whole_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")


def _check_counts(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a whole number and not negative, got {value!r}")


@dataclass(frozen=True)
class Repair:
    """How the weights that stay make up for the pruned ones.

    ``targets``: reproduce the outputs of the dense model (``"dense"``), or those of the dense weights on the inputs
    that the pruned model gives them (``"own"``). A larger ``damping`` holds weights nearer to their dense values; None
    chooses it by the number of tokens. At most ``iterations`` of ADMM find which weights stay, at
    most ``refine`` steps of conjugate gradients their values. With ``tune``, True or ``BlockTuning(...)``, each block
    then learns the outputs of the dense one, and the whole model those of the dense model. ``batch_norm`` changes the
    running statistics of batch norms at the end as those of the samples changed. ``tf32`` lets the products of ADMM use
    TF32 on CUDA; factorisation, refinement and errors never do.
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
            raise ValueError(f"damping must be a finite number and not negative, got {self.damping}")
        if not isinstance(self.tune, bool | BlockTuning):
            raise ValueError(f"tune is True, False or BlockTuning(...), got {self.tune!r}")
        if self.tune and self.targets != "dense":
            raise ValueError("tune learns the outputs of the dense model; it needs targets='dense'")
        _check_counts(self, "iterations", "refine")

    @property
    def tuning(self) -> BlockTuning | None:
        return BlockTuning() if self.tune is True else self.tune or None

    def damping_for(self, num_tokens: int, num_inputs: int) -> float:
        """``0.8 / sqrt(tokens per input)``: with fewer tokens, weights should stay nearer to their dense values.

        This is a compromise: of two models with about as many tokens per input, one did better with less damping and
        one with more (docs/evidence/repair.md).
        """
        if self.damping is not None:
            return self.damping
        return min(max(0.8 * math.sqrt(num_inputs / max(1, num_tokens)), 0.01), 1.0)


@dataclass(frozen=True)
class Limit:
    """How much worse a metric may get: by a fraction of the dense model's (``relative``) or by a number (``absolute``).

    ``better`` must be given: ``lower`` for perplexity and losses, ``higher`` for accuracy. A metric that is not finite
    fails every limit.
    """

    relative: float | None = None
    absolute: float | None = None
    better: Literal["lower", "higher"] | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.relative, self.absolute) if value is not None]
        if len(given) != 1 or not (math.isfinite(given[0]) and given[0] >= 0):
            raise ValueError(f"a limit is either relative or absolute, 0 or more, got {self.relative}, {self.absolute}")
        if self.better not in ("lower", "higher"):
            raise ValueError(
                f"better must be 'lower' (perplexity, loss) or 'higher' (accuracy), got {self.better!r}; "
                "give it: Limit(relative=0.05, better='lower')"
            )

    def allows(self, dense: float, value: float) -> bool:
        worse = value - dense if self.better == "lower" else dense - value
        return math.isfinite(value) and worse <= self._room(dense)

    def in_words(self, dense: float) -> str:
        """The metric of the dense model, and the worst that is allowed."""
        sign, words = (1, "at most") if self.better == "lower" else (-1, "at least")
        return f"dense {dense:.4g}, {words} {dense + sign * self._room(dense):.4g} allowed"

    def _room(self, dense: float) -> float:
        return self.relative * abs(dense) if self.relative is not None else self.absolute or 0.0


@dataclass(frozen=True)
class Trial:
    """One level: its target sparsity and the one it reached, its metric, and whether it was accepted.

    ``scale`` is what tuning multiplied tau by; ``passes`` counts forward and backward passes of one sample.
    """

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
    """Sparsities ``initial``, ``initial + step``, ... up to ``final``, until one fails."""

    initial: float = 0.1
    step: float = 0.1
    final: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.initial <= self.final < 1 and self.step > 0):
            raise ValueError(f"levels need 0 < initial <= final < 1 and a step above 0, got {self}")

    def next(self, trials: Sequence[Trial]) -> float | None:
        """The sparsity to try next, if any."""
        target = round(self.initial + len(trials) * self.step, 9)
        failed = bool(trials) and not trials[-1].accepted
        return None if failed or target > self.final else target


@dataclass(frozen=True)
class Bisection:
    """Starts at ``final``, then halves the gap between what passed and what failed until it is at most ``gap``."""

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
    """How a level that fails searches for a smaller tau, in ``steps`` halvings of a common factor.

    By default this uses the stored ratios of the level: it costs evaluations and no new pass. With ``both_steps`` the
    level before is taken back and probed again too, so every halving costs two probes.
    """

    steps: int = 5
    both_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"tuning takes at least one step, got {self.steps}")
