"""The loss of each sample: that of a batch which holds it alone, whatever batch it is run in."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .head import entropy_in_parts, head_of
from .offload import Offload
from .samples import Tree, rows
from .session import replaced

Loss = Callable[[Any, Any], Tensor]
IN_PARTS = "next token, in parts"
IGNORED = -100  # the label that Hugging Face's losses leave out


@dataclass(frozen=True)
class Objective:
    """Losses of a model, by the ``loss(output, target)`` of a user or, without one, by the model's own."""

    model: nn.Module
    loss: Loss | None = None
    offload: Offload | None = None  # how the model is run, where it is not all on its device

    def __post_init__(self) -> None:
        if self.loss is None and not has_own_loss(self.model):
            raise ValueError(
                f"{type(self.model).__name__} computes no loss of its own; pass loss=..., a function (output, target)"
            )

    def alone(self, tree: Tree) -> Tensor:
        """Loss of a batch of one sample, by definition."""
        if self.loss is not None:
            inputs, target = _split(tree)
            return self.loss(_call(self.model, inputs), target)
        found = self.model(**_quiet(self.model, with_labels(tree))).loss
        if found is None:
            raise ValueError(
                f"{type(self.model).__name__} returned no loss; give labels in the batches, or pass loss=..."
            )
        return found

    def summed(self, tree: Tree, size: int, form: str | None = None) -> Tensor:
        """Sum of the losses of ``size`` samples, from one forward pass over all of them.

        ``form`` is the formula of the model's own loss, one of FORMS.
        """
        if self.loss is not None:
            inputs, target = _split(tree)
            found = _call(self.model, inputs)
            parts = [self.loss(rows(found, i, i + 1, size), rows(target, i, i + 1, size)) for i in range(size)]
            return torch.stack([part.reshape(()) for part in parts]).sum()
        assert form is not None
        inputs = with_labels(tree)
        labels = inputs.pop("labels")
        if form == IN_PARTS:
            head = head_of(self.model)
            with replaced({head: lambda hidden: hidden}):
                hidden = self.model(**_quiet(self.model, inputs)).logits
            return entropy_in_parts(hidden, head.weight, shifted(labels), IGNORED)
        return FORMS[form](self.model(**_quiet(self.model, inputs)).logits, labels)


def outputs(model: nn.Module, tree: Tree) -> Any:
    """What the model says to a batch, its labels aside."""
    if isinstance(tree, tuple):
        tree = tree[0]
    return _call(model, {k: v for k, v in tree.items() if k != "labels"} if isinstance(tree, Mapping) else tree)


def has_own_loss(model: nn.Module) -> bool:
    """Whether it is a model of Hugging Face's kind, which takes labels and returns a loss."""
    return hasattr(model, "config") and "labels" in inspect.signature(model.forward).parameters


def with_labels(tree: Tree) -> dict[str, Any]:
    """Arguments of a Hugging Face model; without labels the tokens themselves are, where the mask admits them."""
    if isinstance(tree, tuple):
        inputs, labels = tree
        inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        return inputs | {"labels": labels}
    found = dict(tree) if isinstance(tree, Mapping) else {"input_ids": tree}
    if "labels" not in found and "input_ids" in found:
        tokens, mask = found["input_ids"], found.get("attention_mask")
        found["labels"] = tokens if mask is None or mask.ndim != 2 else tokens.masked_fill(mask == 0, IGNORED)
    return found


def mask_of(tree: Tree) -> Tensor | None:
    """The attention mask (sample, token) of a batch, if it has one."""
    inputs = tree[0] if isinstance(tree, tuple) else tree
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def num_tokens(tree: Tree) -> int:
    """Tokens of each sample where all are admitted and counted, so that samples may be cut; 0 for all else."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim != 1]
    if any(leaf.ndim != 2 or leaf.is_floating_point() or (leaf == IGNORED).any() for leaf in leaves):
        return 0
    lengths, mask = {leaf.shape[1] for leaf in leaves}, mask_of(tree)
    return lengths.pop() if len(lengths) == 1 and (mask is None or bool(mask.all())) else 0


def shortened(tree: Tree, length: int) -> Tree:
    """The first tokens of each sample."""
    return pytree.tree_map(lambda leaf: leaf[:, :length] if isinstance(leaf, Tensor) and leaf.ndim == 2 else leaf, tree)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean cross-entropy of each next token."""
    return same_token(logits, shifted(labels))


def shifted(labels: Tensor) -> Tensor:
    """The label that each token is to predict."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def same_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean cross-entropy at each token, or of one class a sample."""
    each = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    counted = (labels != IGNORED).reshape(len(labels), -1)
    return (each.view(counted.shape).sum(1) / counted.sum(1)).sum()


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over samples of the mean squared error."""
    return (logits.reshape(len(labels), -1) - labels.reshape(len(labels), -1)).square().mean(1).sum()


FORMS = {IN_PARTS: next_token, "next token": next_token, "same token": same_token, "squared error": squared_error}


def _split(tree: Tree) -> tuple[Tree, Tree]:
    """Input and target; the target of a dict is its labels, that of a lone tensor is itself."""
    if isinstance(tree, tuple):
        return tree
    if isinstance(tree, Mapping):
        return {key: value for key, value in tree.items() if key != "labels"}, tree.get("labels", tree)
    return tree, tree


def _call(model: nn.Module, inputs: Tree) -> Any:
    if isinstance(inputs, Mapping):
        return model(**_quiet(model, inputs))
    return model(inputs, **_quiet(model, {}))


def _quiet(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Without a cache of keys and values, which a pass over whole sequences has no use for."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False} | dict(inputs) if takes_cache else dict(inputs)
