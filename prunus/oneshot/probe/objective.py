"""The loss of each sample: that of a batch of one, whatever batch the sample is run in.

The logits of a language model are by far the largest tensor of a pass. Where its head is plain, they are computed for
a few tokens at a time, together with the gradient that goes back to the hidden state.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..forward import head_of, outputs, replaced, without_cache
from ..resources import FAILURES, is_out_of_memory
from ..samples import IGNORED, Tree, in_words, rows

Loss = Callable[[Any, Any], Tensor]
IN_PARTS = "next token, in parts"
ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}  # of logits that exist at a time


@dataclass(frozen=True)
class Objective:
    """Losses of a model: by a user's ``loss(output, target)``, or else by the model's own."""

    model: nn.Module
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if self.loss is not None:
            return
        # Hugging Face models take labels and return a loss
        if not hasattr(self.model, "config") or "labels" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(f"{type(self.model).__name__} has no loss of its own; pass loss=, of (output, target)")

    @torch.no_grad()
    def check(self, tree: Tree) -> None:
        """Compute the loss of one sample; where that fails, one line says what the loss was given."""
        try:
            self.alone(tree)
        except FAILURES as error:
            if is_out_of_memory(error) or (self.loss is None and isinstance(error, ValueError)):
                raise
            target, reason = _target(tree), " ".join(str(error).split())[:200]
            given = f"the target {in_words(target)}"
            if target is tree:
                given = f"no target but the input, {in_words(tree)}; give pairs (input, target), or dicts with labels"
            raise ValueError(f"the loss fails on the first sample: {reason}; it got {given}") from error

    def alone(self, tree: Tree) -> Tensor:
        """Loss of a batch of one sample, by definition."""
        if self.loss is not None:
            return self.loss(outputs(self.model, tree), _target(tree))
        loss = self.model(**without_cache(self.model, self._arguments(tree))).loss
        if loss is None:
            raise ValueError(f"{type(self.model).__name__} returned no loss; give labels in the batches, or pass loss=")
        return loss

    def summed(self, tree: Tree, size: int, form: str | None = None) -> Tensor:
        """Sum of the losses of ``size`` samples from one pass; ``form``, one of FORMS, is that of the model's own."""
        if self.loss is not None:
            found, target = outputs(self.model, tree), _target(tree)
            ones = [slice(i, i + 1) for i in range(size)]
            parts = [self.loss(rows(found, one, size), rows(target, one, size)) for one in ones]
            return torch.stack([part.reshape(()) for part in parts]).sum()
        assert form is not None
        inputs = self._arguments(tree)
        labels = inputs.pop("labels")
        if form == IN_PARTS:
            head = head_of(self.model)
            with replaced({head: lambda hidden: hidden}):
                hidden = self.model(**without_cache(self.model, inputs)).logits
            return entropy_in_parts(hidden, head.weight, shifted(labels))
        return FORMS[form](self.model(**without_cache(self.model, inputs)).logits, labels)

    def _arguments(self, tree: Tree) -> dict[str, Any]:
        return with_labels(tree, getattr(self.model, "main_input_name", "input_ids"))


def with_labels(tree: Tree, name: str = "input_ids") -> dict[str, Any]:
    """Arguments of a Hugging Face model, a tensor by this name; labels default to the tokens that the mask admits."""
    if isinstance(tree, tuple):
        inputs, labels = tree
        inputs = dict(inputs) if isinstance(inputs, Mapping) else {name: inputs}
        return inputs | {"labels": labels}
    arguments = dict(tree) if isinstance(tree, Mapping) else {name: tree}
    if "labels" not in arguments and "input_ids" in arguments:
        tokens, mask = arguments["input_ids"], arguments.get("attention_mask")
        arguments["labels"] = tokens if mask is None or mask.ndim != 2 else tokens.masked_fill(mask == 0, IGNORED)
    return arguments


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean cross-entropy of each next token."""
    return same_token(logits, shifted(labels))


def shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def same_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean cross-entropy at each token, or of one class per sample."""
    each = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).reshape(len(labels), -1)
    return (each.view(counted.shape).sum(1) / counted.sum(1)).sum()


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.reshape(len(labels), -1) - labels.reshape(len(labels), -1)).square().mean(1).sum()


FORMS = {IN_PARTS: next_token, "next token": next_token, "same token": same_token, "squared error": squared_error}


def _target(tree: Tree) -> Tree:
    """What a user's loss compares with: of a dict its labels, of a single tensor the tensor itself."""
    if isinstance(tree, tuple):
        return tree[1]
    return tree.get("labels", tree) if isinstance(tree, Mapping) else tree


def entropy_in_parts(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean cross-entropy of labels (sample, token) under ``softmax(hidden weight^T)``."""
    counted = labels != IGNORED
    share = (counted / counted.sum(1, keepdim=True)).float()[counted]
    return _Entropy.apply(hidden[counted], weight.detach(), labels[counted], share)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        back = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = max(1, ELEMENTS.get(hidden.device.type, 1 << 24) // len(weight))
        for start in range(0, len(hidden), size):
            here = slice(start, start + size)
            logits = torch.mm(hidden[here], weight.t()).float()
            target, shares = labels[here, None], share[here]
            top = logits.amax(1, keepdim=True)
            right = logits.gather(1, target)
            odds = logits.sub_(top).exp_()
            norm = odds.sum(1, keepdim=True)
            total += ((norm.log() + top - right).squeeze(1) * shares).sum()
            if back is not None:
                odds.mul_(shares[:, None] / norm).scatter_add_(1, target, -shares[:, None])
                torch.mm(odds.to(weight.dtype), weight, out=back[here])
        ctx.save_for_backward(*([] if back is None else [back]))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return back * gradients[0].to(back.dtype), None, None, None
