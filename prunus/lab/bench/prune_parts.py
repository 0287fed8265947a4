"""Where the time of a probe goes: the head, the blocks forward and backward, and the gradients of each sample."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...oneshot.probe import objective
from ...oneshot.probe.engine import Engine
from ...oneshot.probe.objective import Objective
from ...oneshot.probe.taps import Taps

CLOCKED = {  # what is timed, and where it is found
    "head": (objective, "entropy_in_parts"),
    "forward": (Objective, "summed"),
    "backward": (Taps, "gradients"),
    "pass": (Engine, "_add_chunk"),
}


@dataclass
class _Clock:
    """Seconds by part, counted within passes alone: the inspection of the model runs the same functions."""

    synchronize: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLOCKED, 0.0))
    passing: bool = False

    @contextmanager
    def on(self, owner: Any, name: str, part: str) -> Iterator[None]:
        own = getattr(owner, name)

        def clocked(*args: Any, **kwargs: Any) -> Any:
            if part != "pass" and not self.passing:
                return own(*args, **kwargs)
            self.passing = True
            began = self._now()
            try:
                return own(*args, **kwargs)
            finally:
                self.seconds[part] += self._now() - began
                self.passing = part != "pass"

        setattr(owner, name, clocked)
        try:
            yield
        finally:
            setattr(owner, name, own)

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()


def parts_of(way: Callable[[], object], synchronize: Callable[[], None]) -> list[dict[str, Any]]:
    """A row for each part of a probe: its seconds and its share."""
    clock = _Clock(synchronize)
    with ExitStack() as stack:
        for part, (owner, name) in CLOCKED.items():
            stack.enter_context(clock.on(owner, name, part))
        began = time.perf_counter()
        way()
        synchronize()
        total = time.perf_counter() - began
    seconds = clock.seconds
    found = {
        "head, forward and backward": seconds["head"],
        "blocks, forward": seconds["forward"] - seconds["head"],
        "blocks, backward": seconds["backward"],
        "gradients of each sample and their maximum": seconds["pass"] - seconds["forward"] - seconds["backward"],
        "strategy, inspection, what blocks return, decisions": total - seconds["pass"],
    }
    return [{"part": part, "seconds": value, "share": value / total} for part, value in found.items()]
