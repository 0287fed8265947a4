"""A GGUF file is parsed once while transformers loads a model from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside, transformers parses a GGUF file once; otherwise that takes longer than to dequantise the weights.

    It parses the file for the configuration and again for the weights, and makes the table of names for every module.
    """
    try:
        import gguf
    except ImportError:  # transformers says so
        yield
        return
    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, made in before.items():
            setattr(gguf, name, cache(made))
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)
