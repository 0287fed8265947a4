"""What a student learns: the outputs of its teacher, and where that is asked for the labels.

The loss of a language model is computed from hidden states, a few tokens at a time, inside the call of its head: no
logits of a whole batch exist, and weights that are sharded over ranks are whole there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..oneshot.distance import Distance, distance_of, output_of
from ..oneshot.forward import is_encoder_decoder, outputs, replaced
from ..oneshot.head import Head, head_divergence, head_qualities
from ..oneshot.samples import IGNORED, Tree, mask_of, rows
from .teacher import Teacher

MANY = 1024  # classes: with fewer, whole logits are no larger than the hidden states
Call = Callable[..., Any]  # of the model, which a trainer may have wrapped


@dataclass(frozen=True)
class Figures:
    """Means over the held-out batches: KL divergence from the teacher, cross-entropy in nats, and right predictions.

    Where outputs are not logits, ``kl`` is the mean square by which they differ. None: there was nothing to compare
    with.
    """

    kl: float | None
    loss: float | None = None
    accuracy: float | None = None

    @property
    def perplexity(self) -> float | None:
        return None if self.loss is None else float(torch.tensor(self.loss, dtype=torch.float64).exp())


class Distillation:
    """The loss of ``student`` on batches: ``KL(teacher || student) + hard * cross-entropy``, mean over places.

    Without a teacher it is the cross-entropy alone.
    """

    def __init__(self, student: nn.Module, teacher: Teacher | None, hard: float = 0.0) -> None:
        self.student, self.teacher = student, teacher
        self.hard = hard
        self.heads: tuple[nn.Linear, nn.Linear] | None = None
        self.distance = Distance()
        self.note: str | None = None

    def rank(self, figures: Figures) -> float:
        """What states are ranked by, the least being the best: what is learned, on held-out batches."""
        terms = [each for each in (figures.kl, figures.loss and self.hard * figures.loss) if each is not None]
        return sum(terms) if terms else math.nan

    @torch.no_grad()
    def prepare(self, batch: Tree) -> None:
        """Look at the outputs of the first sample: how they are compared, and whether the heads can be called alone."""
        batch = rows(batch, slice(0, 1), num_samples(batch))
        found, head, reason = with_head(self.student, batch)
        expected, teacher_head = found, head
        if self.teacher is not None:
            expected, teacher_head, reason_of_teacher = with_head(self.teacher.model, batch)
            reason = reason or reason_of_teacher
        mine, theirs = output_of(found), output_of(expected)
        if mine.shape != theirs.shape:
            raise ValueError(
                f"student and teacher return outputs of different shapes, {tuple(mine.shape)} and "
                f"{tuple(theirs.shape)}: they need the same vocabulary or classes; give the model that was pruned"
            )
        config = getattr(self.student, "config", None)
        self.distance = distance_of(expected, batch, getattr(config, "problem_type", None))
        if self.distance.kind == "classes" and mine.shape[-1] >= MANY and self.distance.dim in (-1, mine.ndim - 1):
            if head is None or teacher_head is None:
                self.note = f"Logits of whole batches are computed: {reason}."
            else:
                self.heads = head, teacher_head
        labels = labels_of(self.student, batch, self.distance, mine.shape)
        if self.hard and labels is None:
            raise ValueError(
                "hard > 0 and recovery without a teacher learn from labels, and the batches have none; give pairs "
                "(input, labels) or dicts with labels"
            )

    def __call__(self, call: Call, batch: Tree, num_places: Tensor | float) -> Tensor:
        """The loss on a batch, summed over its places and divided by ``num_places``."""
        if self.heads is not None:
            soft = 0.0 if self.teacher is None else 1.0
            return self._in_head(call, batch, head_divergence, hard=self.hard, soft=soft, total=num_places)
        found = output_of(outputs(self.student, batch, call))
        total = torch.zeros((), device=found.device)
        if self.teacher is not None:
            expected = output_of(self.teacher.outputs(batch))
            mean = self.distance(found, expected, token_mask(self.student, batch))
            total = total + mean * places(self.student, batch)
        if self.hard:
            labels = labels_of(self.student, batch, self.distance, found.shape)
            assert labels is not None
            total = total + self.hard * label_loss(found, labels, self.distance)
        return total / num_places

    @torch.no_grad()
    def sums(self, call: Call, batch: Tree) -> Tensor:
        """Sums over a held-out batch: distance, places, the student's loss, the teacher's, labels, right predictions.

        The last two count both models' labels and the student's and teacher's right predictions.
        """
        if self.heads is not None:
            kl, loss, teacher_loss, num, num_labels = self._in_head(call, batch, head_qualities)
            unknown = torch.full_like(kl, math.nan)
            return torch.stack([kl, num, loss, teacher_loss, num_labels, unknown, unknown])
        found = output_of(outputs(self.student, batch, call))
        expected = found
        if self.teacher is not None:
            expected = output_of(self.teacher.outputs(batch))
        num = places(self.student, batch)
        values = [float(self.distance(found, expected, token_mask(self.student, batch))) * num, num]
        labels = labels_of(self.student, batch, self.distance, found.shape)
        if labels is None:
            return torch.tensor([*values, 0, 0, 0, 0, 0], dtype=torch.float64, device=found.device)
        values += [float(label_loss(each, labels, self.distance)) for each in (found, expected)]
        values += [int((labels != IGNORED).sum())]
        is_text = found.ndim == 3 and self.distance.kind == "classes"  # whose perplexity says more
        values += [math.nan if is_text else num_right(each, labels, self.distance) for each in (found, expected)]
        return torch.tensor(values, dtype=torch.float64, device=found.device)

    def _in_head(self, call: Call, batch: Tree, measure: Callable[..., Any], **options: Any) -> Any:
        """``measure`` of the hidden states of both models, inside the call of the student's head."""
        assert self.heads is not None
        head, teacher_head = self.heads
        seen: list[Any] = []
        expected = None if self.teacher is None else self.teacher.hidden(batch, teacher_head)

        def compute(hidden: Tensor) -> Tensor:
            own, mask = Head(head.weight, head.bias), token_mask(self.student, batch)
            labels = labels_of(self.student, batch, self.distance, (*hidden.shape[:-1], head.out_features))
            measured = measure(hidden, own, *(expected or (hidden, own)), mask=mask, labels=labels, **options)
            seen.append(measured)
            # outputs that hold the loss, for wrappers that look for what was used
            return hidden.new_zeros(*hidden.shape[:-1], 1) + (measured if isinstance(measured, Tensor) else 0)

        with replaced({head: compute}):
            outputs(self.student, batch, call)
        return seen[0]


def with_head(model: nn.Module, batch: Tree) -> tuple[Any, nn.Linear | None, str]:
    """Outputs, and the linear layer whose output they are to the bit; None and why where there is no such layer."""
    linear = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    calls: list[tuple[nn.Linear, Tensor]] = []
    handles = [each.register_forward_hook(lambda module, _, output: calls.append((module, output))) for each in linear]
    try:
        found = outputs(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    logits, name = output_of(found), type(model).__name__
    fitting = [(module, output) for module, output in calls if output.shape == logits.shape]
    for module, output in fitting[-1:]:
        if sum(each is module for each, _ in calls) == 1 and torch.equal(output.to(logits.dtype), logits):
            return found, module, ""
    changed = "changes what its head returns" if fitting else "has no plain linear head"
    return found, None, f"{name} {changed}"


def token_mask(model: nn.Module, batch: Tree) -> Tensor | None:
    """Which tokens count, (sample, token), of those that the outputs stand for; None where all do."""
    if not is_encoder_decoder(model):
        return None if (mask := mask_of(batch)) is None else mask.bool()
    inputs, labels = batch if isinstance(batch, tuple) else (batch, None)
    named = inputs if isinstance(inputs, Mapping) else {}
    if isinstance(mask := named.get("decoder_attention_mask"), Tensor):
        return mask.bool()
    labels = named.get("labels", labels)
    return labels != IGNORED if isinstance(labels, Tensor) and labels.ndim == 2 else None


def places(model: nn.Module, batch: Tree) -> int:
    """Tokens that count, or samples where there are no tokens: what a batch weighs in a mean."""
    if (mask := token_mask(model, batch)) is not None:
        return int(mask.sum())
    inputs = batch[0] if isinstance(batch, tuple) else batch
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point():
        return tokens.numel()
    return num_samples(batch)


def num_samples(batch: Tree) -> int:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def labels_of(model: nn.Module, batch: Tree, distance: Distance, shape: torch.Size | tuple[int, ...]) -> Tensor | None:
    """Labels of the outputs' places; IGNORED where there is none. Of text, each token's label is the next token."""
    inputs, labels = batch if isinstance(batch, tuple) else (batch, None)
    if isinstance(inputs, Mapping):
        labels = inputs.get("labels", labels)
    if distance.kind != "classes":
        return labels if isinstance(labels, Tensor) and labels.shape[0] == shape[0] else None
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    predicts_next = labels is None
    if hasattr(model, "config"):
        predicts_next = not is_encoder_decoder(model) and bool(getattr(model, "can_generate", bool)())
    if predicts_next and isinstance(tokens, Tensor) and tokens.shape == shape[:-1] and not tokens.is_floating_point():
        labels = tokens if labels is None else labels
        mask = token_mask(model, batch)
        labels = labels if mask is None else labels.masked_fill(~mask, IGNORED)
        return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    where = list(shape)
    del where[distance.dim]
    return labels.reshape(where) if labels.numel() == torch.Size(where).numel() else None


def label_loss(found: Tensor, labels: Tensor, distance: Distance) -> Tensor:
    """The sum over labels of the cross-entropy, or of the mean square where outputs are not logits."""
    dtype = torch.promote_types(found.dtype, torch.float32)
    if distance.kind == "classes":
        logits = found.to(dtype).movedim(distance.dim, -1).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = F.binary_cross_entropy_with_logits if distance.kind == "bernoulli" else F.mse_loss
    return loss(found.to(dtype), labels.to(dtype).view_as(found), reduction="sum") / max(1, found[0].numel())


def num_right(found: Tensor, labels: Tensor, distance: Distance) -> float:
    """Labels that the model predicts; NaN where they are no classes."""
    if distance.kind == "mean square":
        return math.nan
    guess = (found > 0).view_as(labels) if distance.kind == "bernoulli" else found.argmax(distance.dim)
    return int((guess == labels).sum())


def figures_of(sums: Tensor, has_teacher: bool) -> tuple[Figures, Figures]:
    """Figures of the student and of the teacher, from sums over all held-out batches."""
    distance, num, loss, teacher_loss, num_labels, right, teacher_right = sums.tolist()
    models = Figures(distance / max(num, 1) if has_teacher else None), Figures(0.0 if has_teacher else None)
    if not num_labels:
        return models
    losses, rights = (loss / num_labels, teacher_loss / num_labels), (right / num_labels, teacher_right / num_labels)
    accuracies = (None if math.isnan(each) else each for each in rights)
    student, teacher = (Figures(m.kl, loss, share) for m, loss, share in zip(models, losses, accuracies, strict=True))
    return student, teacher if has_teacher else Figures(None)
