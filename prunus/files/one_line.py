"""Errors of other libraries in one line, as users read them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_one_line(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds, or of any, as a ValueError: ``what``, a colon and at most 200 letters of the reason."""
    kinds = kinds or (Exception,)
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{what}: {reason}") from error
