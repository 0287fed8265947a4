"""How far the outputs of a model are from those of another: as distributions where they are logits, else as numbers.

Outputs are logits by their name, ``logits``, as in Hugging Face models. Other outputs are logits only where the
samples show it:

- labels are integers, one for each place: (sample, ...) with outputs (sample, classes, ...) or (sample, ...,
  classes); as (sample, 1, ...) they are the same labels
- labels are 0 or 1, of any dtype, as many as the outputs: every output is a logit by itself
- there are no labels, the inputs are tokens (sample, token), and the outputs (sample, token, classes) have a class for
  every token that occurs; hidden states have that shape too, but rarely so many features

All else is compared as it is: images of an autoencoder, embeddings, regressions (other labels in floating point, or a
config that says ``problem_type="regression"``), and classes of images that come without labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..ops.divergence import divergence, divergence_
from .forward import first_tensor
from .samples import Tree, named_parts


@dataclass(frozen=True)
class Distance:
    """``distance(found, expected)``: the mean over samples and places, and only over tokens that the mask admits.

    - ``classes``: KL divergence of ``softmax(found)`` from ``softmax(expected)`` over dimension ``dim``
    - ``bernoulli``: the same of ``sigmoid(found)``, each output by itself
    - ``mean square``: ``(found - expected)^2``
    """

    kind: Literal["classes", "bernoulli", "mean square"] = "mean square"
    dim: int = -1

    def __str__(self) -> str:
        return {"classes": "KL divergence", "bernoulli": "KL divergence of single logits"}.get(self.kind, self.kind)

    def __call__(self, found: Tensor, expected: Tensor, mask: Tensor | None = None) -> Tensor:
        """``found`` and ``expected`` have the same shape; ``mask`` is (sample, token)."""
        if self.kind == "classes":
            found, expected = (each.movedim(self.dim, -1) for each in (found, expected))
            rows: Tensor = _Divergence.apply(*(each.reshape(-1, each.shape[-1]) for each in (found, expected)))
            return _mean(rows.view(found.shape[:-1]), mask)
        dtype = torch.promote_types(found.dtype, torch.float32)
        found, expected = found.to(dtype), expected.to(dtype)
        if self.kind == "mean square":
            return _mean((found - expected).square(), mask)
        ways = ((expected.sigmoid(), 1), ((-expected).sigmoid(), -1))  # 1 - sigmoid(x) would round to 0
        parts = [p * (F.logsigmoid(sign * expected) - F.logsigmoid(sign * found)) for p, sign in ways]
        return _mean(parts[0] + parts[1], mask)


def output_of(found: Any) -> Tensor:
    """The tensor of a model's outputs that is compared: its logits, or the first that it returns."""
    logits = found.get("logits") if isinstance(found, Mapping) else None
    return first_tensor(found) if logits is None else logits


def distance_of(found: Any, samples: Tree, model: Any = None) -> Distance:
    """How outputs like ``found``, of some ``samples``, are compared; the model's config may say ``problem_type``."""
    named, problem = named_parts(samples), getattr(getattr(model, "config", None), "problem_type", None)
    output, inputs, labels = output_of(found), named.get("input_ids"), named["labels"]
    labels = labels if isinstance(labels, Tensor) else None
    shape, places = output.shape[1:], None if labels is None else labels.shape[1:]
    is_binary = labels is not None and bool((labels == labels.bool()).all())
    is_single = is_binary and places is not None and shape.numel() == places.numel()
    is_float = labels is not None and labels.is_floating_point() and problem is None
    if problem == "regression" or (is_float and not is_single):
        return Distance()
    if isinstance(found, Mapping) and "logits" in found:
        dim = 1 if output.ndim > 3 else -1
        is_single |= problem == "multi_label_classification" or output.ndim < 2 or output.shape[dim] == 1
        return Distance("bernoulli") if is_single else Distance("classes", dim)
    if places is not None:
        if shape.numel() == places.numel():
            return Distance("bernoulli") if is_single else Distance()
        has_channel = len(places) == len(shape) and places[0] == 1
        places = places[1:] if has_channel else places
        dims = {-1: shape[:-1], 1: shape[1:]}  # of classes, and the places that they leave
        first = 1 if has_channel or output.ndim > 3 else -1
        dim = next((dim for dim in (first, -first) if dims[dim] == places), None)
        return Distance() if dim is None else Distance("classes", dim)
    are_tokens = isinstance(inputs, Tensor) and not inputs.is_floating_point() and inputs.ndim > 1
    if are_tokens and shape[:-1] == inputs.shape[1:] and bool(((inputs >= 0) & (inputs < shape[-1])).all()):
        return Distance("classes")
    return Distance()


class _Divergence(torch.autograd.Function):
    """Of each row of logits from expected ones, which get no gradient; backward reads both again and stores nothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expected: Tensor) -> Tensor:
        ctx.save_for_backward(logits, expected)
        return divergence(logits, expected).divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        logits, expected = ctx.saved_tensors
        gradient = logits.clone()
        divergence_(gradient, expected, soft=gradients[0])
        return gradient, None


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or values.shape[:2] != mask.shape:
        return values.mean()
    return values.reshape(*mask.shape, -1).mean(2).where(mask != 0, 0).sum() / mask.sum().clamp(min=1)
