"""Where the time of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..ops.machine import wait_for


@dataclass
class Clock:
    """Seconds by part; time within a part of a part counts for the inner one alone."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, float] = field(default_factory=dict)
    _parts: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._parts.append(name)
        try:
            yield
        finally:
            self._switch()
            self._parts.pop()

    def _switch(self) -> None:
        """Book the time since the last switch on the part that is open."""
        wait_for(self.device)
        now = time.perf_counter()
        if self._parts:
            self.seconds[self._parts[-1]] = self.seconds.get(self._parts[-1], 0.0) + now - self._since
        self._since = now
