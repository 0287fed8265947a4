"""Triton's interpreter, without what takes most of its time: a few private names of it that other versions may lack."""

from contextlib import suppress
from functools import cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Run kernels three times faster in the interpreter, to the same results."""
    with suppress(AttributeError):
        # a sum that would overflow 32 bits is checked by eight more operations
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        interpreter._get_np_dtype = _by_element(cache(interpreter._get_np_dtype))
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, interpreter._LangPatchScope)


def _by_element(find):
    """The type of numpy for one of Triton, which is looked up in a table that is made at each call."""

    def np_dtype(dtype):
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else find(scalar)

    return np_dtype


def _once_a_launch(original, Scope):
    """The language is patched at every call of a device function, in 2 ms, though it is while a kernel runs."""
    patched = set()

    class Outermost(Scope):
        def restore(self):
            super().restore()
            patched.clear()

    def patch(fn):
        languages = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if languages in patched:
            return Scope()
        scope = original(fn)
        if not patched:
            scope, changes = Outermost(), scope._changes
            scope._changes = changes
        patched.add(languages)
        return scope

    return patch
