"""What Linux says of main memory."""

from pathlib import Path


def said_by_linux(file: str, key: str) -> int | None:
    """Bytes that ``/proc/meminfo`` or ``/proc/self/status`` gives for ``key``; None where it does not."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), None)
