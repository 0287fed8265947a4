"""Numbers as a reader wants them."""

import math
import re
from typing import Any

from ..schema import is_number


def number(value: Any) -> float | None:
    """A finite float, or None: charts show a gap where a run diverged or a file holds something else."""
    return value if is_number(value) else None


def plain(value: float | None, digits: int = 4) -> str:
    """``digits`` significant digits, thousands set apart, no exponent within the usual range."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -5 <= size <= 12:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def fixed(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}"


def signed(value: float | None, decimals: int = 2) -> str:
    return "–" if value is None else f"{value:+,.{decimals}f}".replace("-", "−")


def with_minus(text: str) -> str:
    return re.sub(r"-(?=\d)", "−", text)


def percent(value: float | None, decimals: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{decimals}f} %"


def short_percent(value: float) -> str:
    """A sparsity as one says it: 50 %, 87.5 %."""
    return f"{100 * value:.6g} %"


def count(value: float | None) -> str:
    """Large counts with a letter: 59.0 M."""
    if value is None:
        return "–"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{plain(value / (1e3 if letter == 'k' else size), 3)} {letter}"
    return f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{plain(seconds, 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def memory(size: float | None) -> str:
    if not size:
        return "–"
    return f"{plain(size / 2**30, 3)} GiB" if size >= 2**30 else f"{plain(size / 2**20, 3)} MiB"
