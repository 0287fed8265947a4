"""Sparsity over time: values that map a step, counted from 1, to the sparsity asked for.

Steps may be fractions of the run (0.1, with a decimal point) where its length becomes known later: ``over`` turns them
into steps, and nothing else is answered before.
"""

from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import ClassVar, Literal, Self

SHAPES = {"linear": lambda p: p, "cubic": lambda p: p**3, "zhu_gupta": lambda p: 1 - (1 - p) ** 3}
NUM_EVENTS = 20  # of a ramp, about, however long it is, where nothing else is said


@dataclass(frozen=True)
class _Steps:
    """What schedules share: fields that are steps, which may be fractions until the length of the run is known."""

    final: float
    STEPS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_sparsity(self.final)
        for name in self.STEPS:
            check_step(name, getattr(self, name))

    def over(self, num_steps: int | None) -> Self:
        """The same in steps, for a run of ``num_steps``; None if that is not known."""
        return replace(self, **{name: self._step(getattr(self, name), num_steps) for name in self.STEPS})

    def _step(self, step: int | float, num_steps: int | None) -> int:
        """A step given as such, or as a fraction of ``num_steps``; it must lie within the run."""
        if num_steps is None:
            self._check_resolved()
        elif isinstance(step, float):
            return round(step * num_steps)
        elif step > num_steps:
            raise ValueError(f"{self} would not reach its sparsity in the run of {num_steps} steps; take earlier steps")
        return int(step)

    def _check_resolved(self) -> None:
        """Refuse fractions: taken for steps, they would leave the model dense in silence."""
        if any(isinstance(getattr(self, name), float) for name in self.STEPS):
            raise ValueError(f"{self} has fractions of a run of unknown length; use schedule.over(num_steps)")


@dataclass(frozen=True)
class Ramp(_Steps):
    """Sparsity that climbs from 0 to ``final`` between two steps, then stays.

        s(t) = final * shape(p),   p = clip((t - begin) / (end - begin), 0, 1)

    ``zhu_gupta`` climbs fast while weights are redundant, then slowly
    (2017, https://arxiv.org/abs/1710.01878); ``cubic`` does the reverse.
    """

    final: float
    begin: int | float
    end: int | float
    shape: Literal["linear", "cubic", "zhu_gupta"] = "linear"
    STEPS = ("begin", "end")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.begin, float) == isinstance(self.end, float) and self.begin >= self.end:
            raise ValueError(f"the ramp must begin before it ends, got begin {self.begin} and end {self.end}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")

    def __call__(self, step: int) -> float:
        self._check_resolved()
        progress = (step - self.begin) / (self.end - self.begin)
        return self.final * SHAPES[self.shape](min(max(progress, 0.0), 1.0))

    @property
    def period(self) -> int:
        """Default number of steps between events."""
        self._check_resolved()
        return max(1, round((self.end - self.begin) / NUM_EVENTS))

    def is_event(self, step: int, every: int | None = None) -> bool:
        """True every ``every`` steps from ``begin`` on (default ``period``), and at ``end``."""
        self._check_resolved()
        every = self.period if every is None else every
        return self.begin <= step <= self.end and ((step - self.begin) % every == 0 or step == self.end)


@dataclass(frozen=True)
class OneShot(_Steps):
    """Sparsity ``final`` from step ``at`` on, reached in one event."""

    final: float
    at: int | float
    STEPS = ("at",)

    @property
    def end(self) -> int | float:
        self._check_resolved()
        return max(self.at, 1)

    def __call__(self, step: int) -> float:
        self._check_resolved()
        return self.final if step >= self.at else 0.0

    def is_event(self, step: int, every: int | None = None) -> bool:
        """True once: at ``at``, or at step 1 if ``at`` is 0."""
        return step == self.end


@dataclass(frozen=True)
class Constant(_Steps):
    """Sparsity ``final`` from the first step on, reached in one event."""

    final: float
    end: ClassVar[int] = 1

    def __call__(self, step: int) -> float:
        return self.final

    def is_event(self, step: int, every: int | None = None) -> bool:
        """True at the first step only."""
        return step == 1


Schedule = Ramp | OneShot | Constant


def progress_text(schedule: Schedule, step: int) -> str:
    """Where a run is in its schedule, in words: ``step 20 of a ramp from 400 to 800: not begun``."""
    if isinstance(schedule, Ramp):
        what = f"step {step} of a ramp from {schedule.begin} to {schedule.end}"
    else:
        what = f"step {step} of a run that is pruned at step {schedule.end}"
    if step >= schedule.end:
        return f"{what}: ended, at {schedule.final:.2%}"
    sparsity = schedule(step) if isinstance(schedule, Ramp) else 0.0
    return f"{what}: {f'{sparsity:.2%} of {schedule.final:.2%}' if sparsity else 'not begun'}"


def check_sparsity(final: float) -> None:
    if not isinstance(final, Real) or not 0 <= final < 1:
        raise ValueError(f"final sparsity must lie in [0, 1), such as 0.5, got {final!r}")


def check_step(name: str, step: int | float) -> None:
    """Refuse what is neither a whole number of steps nor a fraction of the run."""
    if not (isinstance(step, Integral) and int(step) >= 0) and not (isinstance(step, float) and 0 <= step <= 1):
        raise ValueError(
            f"{name} must be a whole number of steps, or a fraction of the run from 0.0 to 1.0, got {step!r}"
        )
