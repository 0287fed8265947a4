"""Compiled models run as they were written while their layers are listened to."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_open: list[Any] = []  # one for each that is open


@contextmanager
def eagerly() -> Iterator[None]:
    """Nothing runs compiled while one of these is open: a graph calls none of the hooks that came after it.

    What was compiled is not lost, and is run again afterwards.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to import it takes seconds
        yield
        return
    _open.append(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        _open.pop().__exit__(None, None, None)  # the last one's, whoever closes: the first knows what was before
