"""How far a search may go, and by which steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Progress = Callable[[int, int, str], None]  # how many of how many weights are done, and the last one's name


@dataclass(frozen=True)
class Limit:
    """How much worse a metric may get: by a fraction of the dense model's (``relative``) or by a number (``absolute``).

    ``better`` says which way the metric is good: ``lower`` for perplexity, ``higher`` for accuracy. What is not
    finite is beyond every limit.
    """

    relative: float | None = None
    absolute: float | None = None
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        given = [value for value in (self.relative, self.absolute) if value is not None]
        if len(given) != 1 or not (math.isfinite(given[0]) and given[0] >= 0):
            raise ValueError(f"a limit is either relative or absolute, 0 or more, got {self.relative}, {self.absolute}")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better must be lower or higher, got {self.better!r}")

    def allows(self, dense: float, value: float) -> bool:
        worse = value - dense if self.better == "lower" else dense - value
        room = self.absolute if self.relative is None else self.relative * abs(dense)
        return math.isfinite(value) and room is not None and worse <= room


@dataclass(frozen=True)
class Trial:
    """One level that was tried: sparsity asked for and reached, its metric, and whether it was kept.

    ``scale`` is what tuning multiplied tau by; ``passes`` are forward and backward passes of one sample.
    """

    asked: float
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
        """The sparsity to try after these, if any."""
        asked = round(self.initial + len(trials) * self.step, 9)
        failed = bool(trials) and not trials[-1].accepted
        return None if failed or asked > self.final else asked


@dataclass(frozen=True)
class Bisection:
    """Halves the gap between what was kept and what failed until it is at most ``gap``; begins at ``final``."""

    final: float = 0.9
    gap: float = 0.01

    def __post_init__(self) -> None:
        if not (0 < self.final < 1 and self.gap > 0):
            raise ValueError(f"bisection needs 0 < final < 1 and a gap above 0, got {self}")

    def next(self, trials: Sequence[Trial]) -> float | None:
        low = max((trial.asked for trial in trials if trial.accepted), default=0.0)
        high = min((trial.asked for trial in trials if not trial.accepted), default=None)
        if high is None:
            return None if trials else self.final
        return (low + high) / 2 if high - low > self.gap else None


@dataclass(frozen=True)
class Tune:
    """What to do with a level that fails: search a smaller tau for it, by ``steps`` halvings of a common factor.

    By default from the stored ratios of the level, which takes evaluations and no new pass. With ``both_steps`` the
    level before it is taken back and probed again too, so that every halving costs two probes.
    """

    steps: int = 5
    both_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"tuning takes at least one step, got {self.steps}")


@dataclass(frozen=True)
class SearchOptions:
    """What a search does beside its limit: how it steps and tunes, and where it keeps its state."""

    steps: Levels | Bisection = field(default_factory=Levels)
    tune: Tune | None = None
    state: Path | None = None
    offload: str | None = None  # device on which the model is run block by block
    checkpointing: bool = False  # blocks are run again for the backward instead of kept
    compare: bool = True  # evaluate the strategy without the probe at the sparsity that was found
    progress: Progress | None = None
    on_trial: Callable[[Trial], None] | None = None
