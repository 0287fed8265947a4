"""Devices that are really there, and what they have under way."""

import torch


def device_of(name: torch.device | str) -> torch.device:
    """The device of that name; a ValueError if this machine has none that holds values."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):  # torch says it in either way
        raise ValueError(f"there is no device {str(name)!r} here; the CPU is always there: cpu") from None
    return device


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
