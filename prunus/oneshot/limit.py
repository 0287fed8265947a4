"""Options of a search: how far it may go, in which steps, and how it tunes."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .progress import Progress


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
    """One level: sparsity asked for and reached, its metric, and whether it was accepted.

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
class Tune:
    """For a level that fails, search a smaller tau in ``steps`` halvings of a common factor.

    By default this uses the stored ratios of the level: it costs evaluations and no new pass. With ``both_steps`` the
    level before is taken back and probed again too, so every halving costs two probes.
    """

    steps: int = 5
    both_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"tuning takes at least one step, got {self.steps}")


@dataclass(frozen=True)
class SearchOptions:
    """How a search steps and tunes, where it keeps its state, and how its passes run."""

    steps: Levels | Bisection = field(default_factory=Levels)
    tune: Tune | None = None
    state: str | os.PathLike[str] | None = None  # folder
    offload: str | None = None  # device to which blocks are moved one at a time
    checkpointing: bool = False  # blocks run again for the backward instead of keeping their activations
    compare: bool = True  # also evaluate the strategy without the probe at the sparsity that was found
    progress: Progress | bool | None = None  # as in prune
    on_trial: Callable[[Trial], None] | None = None
