"""The arithmetic of other machines on this one, for tests that hold two implementations of a formula together.

Machines differ in the last place of a root, a power or an exponential: MKL's root is not rounded correctly, vector
libraries differ from scalar ones. ``other_roots`` replaces torch's own functions by such ones.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

EXACT = (0.0, 1.0, 2.0, 3.0, -1.0, -2.0)  # powers that torch computes by products and quotients on every machine


def moved(x: Tensor, y: Tensor) -> Tensor:
    """``y``, one unit in the last place larger or smaller where a hash of the values of ``x`` says so.

    Every fourth value or so moves, always by the same step; 0, 1 and what is not finite never do.
    """
    word = x.detach().double().contiguous().view(torch.int64)
    draw = (word ^ (word >> 29)) * 0x9E3779B97F4A7C1 >> 40
    next_to = torch.nextafter(y, torch.where(draw & 4 > 0, torch.inf, -torch.inf).to(y.dtype))
    return torch.where((draw & 3 == 0) & y.isfinite() & (y != 0) & (y != 1), next_to, y)


def _of(function: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
    """A function of numpy as one of torch whose results are sometimes wrong by one unit."""

    def compute(x: Tensor, *exponent: float) -> Tensor:
        dtype = torch.result_type(x, *exponent) if exponent else x.dtype
        is_real = dtype.is_floating_point or not exponent
        dtype = dtype if dtype.is_floating_point or not is_real else torch.get_default_dtype()
        wide = torch.promote_types(dtype, torch.float32)
        with np.errstate(all="ignore"):
            values = function(x.detach().to(wide).contiguous().numpy(), *exponent)
        y = torch.from_numpy(np.asarray(values)).to(wide)
        is_exact = bool(exponent) and float(exponent[0]) in EXACT
        return (y if is_exact else moved(x, y)).to(dtype)

    return compute


FUNCTIONS = {
    ("sqrt", ""): np.sqrt,
    ("rsqrt", ""): lambda x: 1 / np.sqrt(x),
    ("exp", ""): np.exp,
    ("pow", ".Tensor_Scalar"): lambda x, exponent: x**exponent,
}


@contextmanager
def other_roots() -> Iterator[None]:
    """Roots, powers and exponentials on the CPU as another machine may round them, in all threads."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is what is wanted
        for (name, overload), function in FUNCTIONS.items():
            of = _of(function)

            def in_place(x: Tensor, *exponent: float, of: Callable[..., Tensor] = of) -> Tensor:
                return x.copy_(of(x, *exponent))

            def into(x: Tensor, *exponent: float, out: Tensor, of: Callable[..., Tensor] = of) -> Tensor:
                y = of(x, *exponent)
                return out.resize_(y.shape).copy_(y)

            library.impl(name + overload, of, "CPU")
            library.impl(f"{name}_" + overload.replace("Tensor_", ""), in_place, "CPU")
            library.impl(f"{name}.out" if not overload else f"{name}{overload}_out", into, "CPU")
    try:
        yield
    finally:
        library._destroy()


MACHINES = {"other-roots": other_roots, "no-onednn": partial(torch.backends.mkldnn.flags, enabled=False)}
