"""The linear layers of a model that may be kept in a sparse form, and what keeps a weight from it."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.sparse import SparseSemiStructuredTensor

from ..eligible import check_patterns, is_conv1d, is_linear, matches
from .gaps import WIDEST
from .product import DTYPES


def chosen(model: nn.Module, only: str | Sequence[str] = (), exclude: str | Sequence[str] = ()) -> dict[str, nn.Module]:
    """Linear layers by name that the patterns allow, whose weight is in no other place and not semi-structured yet."""
    only, exclude = ([p] if isinstance(p, str) else list(p) for p in (only, exclude))
    check_patterns([*only, *exclude], [name for name, _ in model.named_parameters()])
    num_places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_linear(module) or is_conv1d(module))
        and not isinstance(module, NonDynamicallyQuantizableLinear)  # attention reads its weight without calling it
        and num_places[id(module.weight)] == 1
        and not isinstance(module.weight, SparseSemiStructuredTensor)
        and (not only or matches(f"{name}.weight", only))
        and not matches(f"{name}.weight", exclude)
    }


def linear_weight(module: nn.Module) -> Tensor:
    """The weight as (out, in)."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if is_conv1d(module) else weight


def check_values(name: str, weight: Tensor) -> None:
    """ValueError for a weight on the meta device."""
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load them first, as load_model does")


def why_not(weight: Tensor) -> str | None:
    """Why a weight cannot have the gap form; None if it can."""
    if weight.ndim != 2 or weight.dtype not in DTYPES:
        return f"a matrix of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)} is needed"
    if weight.shape[1] > WIDEST:
        return f"a row may have at most {WIDEST} columns"
    return None
