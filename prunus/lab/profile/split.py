"""Seconds by part, from a trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from .trace import Entry, on_device, on_host


@dataclass(frozen=True)
class Split:
    """Seconds of one step or event by part, on the host and on the device; each adds up to ``seconds``."""

    seconds: float
    host: dict[str, float]
    device: dict[str, float] | None

    @property
    def parts(self) -> dict[str, float]:
        """The device's where there is one, else the host's."""
        return self.device or self.host

    def share(self, part: str) -> float:
        return self.parts.get(part, 0.0) / self.seconds if self.seconds else 0.0


def split_of(entries: Sequence[Entry], num: int) -> Split:
    host, device = on_host(entries), on_device(entries)
    each = {name: seconds / num for name, seconds in host.items()}
    return Split(sum(each.values()), each, device and {name: seconds / num for name, seconds in device.items()})


def only_event(entries: Sequence[Entry]) -> Split:
    inside = ("score and select", "apply")
    host = {name: value for name, value in on_host(entries).items() if name in inside}
    device, total = on_device(entries), sum(host.values())
    if device is not None:
        device = {name: device.get(name, 0.0) for name in inside}
        device["idle"] = total - sum(device.values())
    return Split(total, host, device)
