"""Sparsity over time: values that map a step, counted from 1, to the sparsity asked for."""

from dataclasses import dataclass
from typing import Literal

SHAPES = {
    "linear": lambda p: p,
    "cubic": lambda p: p**3,
    "zhu_gupta": lambda p: 1 - (1 - p) ** 3,
}


@dataclass(frozen=True)
class Ramp:
    """Sparsity that climbs from 0 to ``final`` between two steps, then stays.

        s(t) = final * shape(p),   p = clip((t - begin) / (end - begin), 0, 1)

    ``zhu_gupta`` is fast while weights are redundant and slow near the end
    (2017, https://arxiv.org/abs/1710.01878); ``cubic`` is the other way round.
    """

    final: float
    begin: int
    end: int
    shape: Literal["zhu_gupta", "cubic", "linear"] = "zhu_gupta"

    def __post_init__(self) -> None:
        check_sparsity(self.final)
        check_step("begin", self.begin)
        check_step("end", self.end)
        if self.begin >= self.end:
            raise ValueError(f"the ramp must begin before it ends, got begin {self.begin} and end {self.end}")
        if self.shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {self.shape!r}")

    def __call__(self, step: int) -> float:
        progress = (step - self.begin) / (self.end - self.begin)
        return self.final * SHAPES[self.shape](min(max(progress, 0.0), 1.0))

    def is_event(self, step: int, every: int) -> bool:
        """Every ``every`` steps from ``begin`` on, and once at ``end``."""
        return self.begin <= step <= self.end and ((step - self.begin) % every == 0 or step == self.end)


@dataclass(frozen=True)
class OneShot:
    """``final`` from step ``at`` on, reached in one event."""

    final: float
    at: int

    def __post_init__(self) -> None:
        check_sparsity(self.final)
        check_step("at", self.at)

    @property
    def end(self) -> int:
        return max(self.at, 1)

    def __call__(self, step: int) -> float:
        return self.final if step >= self.at else 0.0

    def is_event(self, step: int, every: int) -> bool:
        """Once."""
        return step == self.end


@dataclass(frozen=True)
class Constant:
    """``final`` from the first step on."""

    final: float

    def __post_init__(self) -> None:
        check_sparsity(self.final)

    @property
    def end(self) -> int:
        return 1

    def __call__(self, step: int) -> float:
        return self.final

    def is_event(self, step: int, every: int) -> bool:
        """Once, at the first step."""
        return step == 1


Schedule = Ramp | OneShot | Constant


def check_sparsity(final: float) -> None:
    if not 0 <= final < 1:
        raise ValueError(f"final sparsity must lie in [0, 1), got {final}")


def check_step(name: str, step: int) -> None:
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"{name} is a whole number of steps, counted from 1, got {step}")
