"""LoRA on a pruned model: merge adapters into its weights and keep every zero."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

try:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
except ImportError as error:
    raise ImportError("prunus.integrations.peft needs peft: pip install prunus[peft]") from error

import torch
from torch import Tensor, nn

WRAPPERS = ("base_layer", "original_module")  # parts of a name that PEFT adds and removes


@dataclass(frozen=True)
class MergedWeight:
    """One weight: its zeros, and the squared norms of its update and of what its mask dropped."""

    name: str
    num_weights: int
    num_before: int  # zeros before the merge
    num_plain: int  # zeros that a plain merge would have left
    num_zeros: int
    update: float
    dropped: float


@dataclass(frozen=True)
class Merged:
    """The merged model, and how much of the update its masks dropped."""

    model: nn.Module
    weights: list[MergedWeight]

    @property
    def sparsity_before(self) -> float:
        return self._share("num_before", "num_weights")

    @property
    def sparsity_of_plain_merge(self) -> float:
        return self._share("num_plain", "num_weights")

    @property
    def sparsity(self) -> float:
        return self._share("num_zeros", "num_weights")

    @property
    def dropped(self) -> float:
        """Share of the update that fell on pruned weights: ``||dW * ~mask||^2 / ||dW||^2``."""
        return self._share("dropped", "update")

    def _share(self, part: str, whole: str) -> float:
        total = sum(getattr(weight, whole) for weight in self.weights)
        return sum(getattr(weight, part) for weight in self.weights) / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self.weights)} weights merged: sparsity {self.sparsity_before:.4%} before and {self.sparsity:.4%} "
            f"after ({self.sparsity_of_plain_merge:.4%} without masks); masks dropped {self.dropped:.2%} of the update"
        )


@torch.no_grad()
def merge(
    model: PeftModel, *, adapters: Sequence[str] | None = None, masks: Mapping[str, Tensor] | None = None
) -> Merged:
    """Merge ``adapters`` (default: the active ones) into the base model, and keep its zeros.

    Every weight matrix that the merge changes keeps its zeros, or those of its mask in ``masks``: True where a weight
    stays, by name in the base model. Embeddings keep zeros only by a mask. Like PEFT's own merge, this changes
    ``model``; meanwhile it holds a copy of those weights.
    """
    base, masks = model.get_base_model(), masks or {}
    names = None if adapters is None else list(adapters)
    adapted = {}  # weight matrices that the merge changes; embeddings only if they have a mask
    for path, parameter in _base_parameters(base):
        name = _plain(path)
        is_embedding = isinstance(base.get_submodule(path.rpartition(".")[0]), nn.Embedding)
        if name != path and parameter.ndim > 1 and (name in masks or not is_embedding):
            adapted[name] = parameter
    _check(model, adapted, names)
    shapes = {_plain(path): parameter.shape for path, parameter in _base_parameters(base)}
    for name, mask in masks.items():
        if name not in shapes:
            raise ValueError(f"there is a mask for {name!r}, which is not a weight of the base model")
        if mask.shape != shapes[name]:
            raise ValueError(f"the mask of {name} must have shape {tuple(shapes[name])}, got {tuple(mask.shape)}")
    before = {name: weight.detach().clone() for name, weight in adapted.items()}
    merged: Any = model.merge_and_unload(adapter_names=names)
    after = dict(merged.named_parameters(remove_duplicate=False))
    return Merged(
        merged, [_mask(name, after[name].data, old, masks.get(name, old != 0)) for name, old in before.items()]
    )


def _mask(name: str, weight: Tensor, old: Tensor, keep: Tensor) -> MergedWeight:
    keep = keep.to(weight.device, torch.bool)
    plain, update = _num_zeros(weight), weight.float() - old.float()
    if not bool(update.isfinite().all()):
        raise ValueError(f"{name} overflowed {weight.dtype} in the merge; load the base model in a wider dtype")
    dropped = update.masked_fill(keep, 0)
    weight.masked_fill_(~keep, 0)
    squares = [float(part.square().sum(dtype=torch.float64)) for part in (update, dropped)]
    return MergedWeight(name, weight.numel(), _num_zeros(old), plain, _num_zeros(weight), *squares)


def _num_zeros(weight: Tensor) -> int:
    return weight.numel() - int(weight.count_nonzero())


def _base_parameters(base: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    tuners = [module for module in base.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    adapters = {name for module in tuners for name in module.adapter_layer_names}
    for path, parameter in base.named_parameters(remove_duplicate=False):
        if not adapters.intersection(path.split(".")):
            yield path, parameter


def _plain(path: str) -> str:
    """A parameter's name without PEFT's wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _check(model: PeftModel, adapted: Mapping[str, nn.Parameter], adapters: list[str] | None) -> None:
    """Refuse what cannot be merged under masks, before anything changes."""
    if unknown := set(adapters or ()) - set(model.peft_config):
        raise ValueError(f"there is no adapter {min(unknown)!r}; the adapters are: {', '.join(model.peft_config)}")
    if any(module.merged for module in model.modules() if isinstance(module, BaseTunerLayer)):
        raise ValueError("an adapter is merged already, and its zeros are gone; call model.unmerge_adapter() first")
    for name, weight in adapted.items():
        if not weight.is_floating_point():
            raise ValueError(f"{name} is quantized ({weight.dtype}); load the base model in a floating-point type")
    for name, weight in model.named_parameters():
        if weight.requires_grad and not bool(weight.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite; nothing was merged")
