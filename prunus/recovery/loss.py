"""What a student learns: the outputs of its teacher, and where that is asked for the labels.

The loss of a language model is computed from hidden states, a few tokens at a time, inside the call of its head: no
logits of a whole batch exist, and weights that are sharded over ranks are whole there.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..oneshot.distance import Distance, distance_of, output_of
from ..oneshot.forward import is_encoder_decoder, outputs, replaced
from ..oneshot.head import Head, head_divergence, head_qualities
from ..oneshot.samples import IGNORED, Tree, mask_of, moved, named_parts, rows
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


class Counts(NamedTuple):
    """What means are over: places of outputs, which are tokens or samples, and labels; and the tokens of the budget."""

    num_places: float
    num_labels: float
    num_tokens: float  # samples, where there are no tokens


class Distillation:
    """The loss of ``student`` on batches: ``KL(teacher || student) + hard * cross-entropy``.

    The first is a mean over places, the second over labels. Without a teacher it is the cross-entropy alone.
    """

    def __init__(self, student: nn.Module, teacher: Teacher | None, hard: float = 0.0) -> None:
        self.student, self.teacher = student, teacher
        self.hard = hard
        self.heads: tuple[nn.Linear, nn.Linear] | None = None
        self.distance = Distance()
        self.is_by_token = self.has_labels = False  # outputs stand for tokens; and there are labels for them
        self.note: str | None = None

    def rank(self, figures: Figures) -> float:
        """What states are ranked by, the least being the best: what is learned, on held-out batches."""
        terms = [each for each in (figures.kl, figures.loss and self.hard * figures.loss) if each is not None]
        return sum(terms) if terms else math.nan

    @torch.no_grad()
    def prepare(self, batches: Sequence[Tree], device: torch.device) -> None:
        """Look at the outputs of the first sample: how they are compared, and whether the heads can be called alone."""
        batch = moved(rows(batches[0], slice(0, 1), num_samples(batches[0])), device)
        found, head, reason = with_head(self.student, batch)
        expected, teacher_head = found, head
        if self.teacher is not None:
            expected, teacher_head, reason_of_teacher = with_head(self.teacher.model, batch)
            reason = reason or reason_of_teacher
        mine, theirs = output_of(found), output_of(expected)
        if mine.shape != theirs.shape:
            raise ValueError(
                f"student and teacher return outputs of different shapes, {tuple(mine.shape)} and "
                f"{tuple(theirs.shape)}: they need the same vocabulary or classes; give the dense model that was pruned"
            )
        distances = [distance_of(expected, each, self.student) for each in batches]
        # labels of some batches may be 0 and 1 alone, though they are numbers
        self.distance = next((each for each in distances if each == Distance()), distances[0])
        tokens = tokens_of(self.student, batch)
        self.is_by_token = mine.ndim == 3 and tokens is not None and tokens.shape == mine.shape[:2]
        if mine.ndim == 3 and self.distance == Distance("classes") and mine.shape[-1] >= MANY:
            if head is None or teacher_head is None:
                self.note = f"Logits of whole batches are computed: {reason}."
            else:
                self.heads = head, teacher_head
        labels = labels_of(self.student, batch, self.distance, self.is_by_token)
        num_classes = mine.shape[self.distance.dim] if self.distance.kind == "classes" else 1
        self.has_labels = labels is not None and labels.numel() * num_classes == mine.numel()
        if self.hard and not self.has_labels:
            raise ValueError(
                "hard > 0, or no teacher, needs labels, but the batches have none; give pairs (input, labels) or dicts "
                "with labels"
            )

    def labels(self, batch: Tree) -> Tensor | None:
        return labels_of(self.student, batch, self.distance, self.is_by_token) if self.has_labels else None

    def mask(self, batch: Tree) -> Tensor | None:
        return token_mask(self.student, batch) if self.is_by_token else None

    def counts(self, batch: Tree) -> Counts:
        labels, num_tokens = self.labels(batch) if self.hard else None, num_samples(batch)
        if (tokens := tokens_of(self.student, batch)) is not None:
            num_tokens = int(tokens.sum()) if tokens.dtype == torch.bool else tokens.numel()
        num_labels = 0 if labels is None else int((labels != IGNORED).sum())
        return Counts(num_tokens if self.is_by_token else num_samples(batch), num_labels, num_tokens)

    def __call__(self, call: Call, batch: Tree, counts: Counts) -> Tensor:
        """The loss on a batch, as its part in that of all batches of a step, whose ``counts`` are given."""
        num_places, num_labels = max(counts.num_places, 1.0), max(counts.num_labels, 1.0)
        if self.heads is not None:
            weights = {"soft": 0.0 if self.teacher is None else 1.0, "hard": self.hard * num_places / num_labels}
            return self._in_head(call, batch, head_divergence, total=num_places, **weights)
        found = output_of(outputs(self.student, batch, call))
        total = torch.zeros((), device=found.device)
        if self.teacher is not None:
            mean = self.distance(found, output_of(self.teacher.outputs(batch)), self.mask(batch))
            total = total + mean * (self.counts(batch).num_places / num_places)
        if self.hard and (labels := self.labels(batch)) is not None:
            total = total + self.hard / num_labels * label_loss(found, labels, self.distance)
        return total

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
        num = self.counts(batch).num_places
        values = [float(self.distance(found, expected, self.mask(batch))) * num, num]
        if (labels := self.labels(batch)) is None:
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
            own, labels = Head(head.weight, head.bias), self.labels(batch)
            known = {"mask": self.mask(batch), "labels": labels if labels is None else labels.view(hidden.shape[:-1])}
            measured = measure(hidden, own, *(expected or (hidden, own)), **known, **options)
            seen.append(measured)
            # outputs that hold the loss, for wrappers that look for what was used
            return hidden.new_zeros(*hidden.shape[:-1], 1) + (measured if isinstance(measured, Tensor) else 0)

        with replaced({head: compute}):
            outputs(self.student, batch, call)
        return seen[0]


def with_head(model: nn.Module, batch: Tree) -> tuple[Any, nn.Linear | None, str]:
    """Outputs, and the linear layer whose output they are to the bit; None and why where there is no such layer."""
    linear = [each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each)]
    linear = [each for each in linear if not each._forward_hooks]  # which may change what it returns
    calls: list[tuple[nn.Linear, Tensor]] = []
    with ExitStack() as stack:
        for each in linear:
            stack.enter_context(each.register_forward_hook(lambda module, _, output: calls.append((module, output))))
        found = outputs(model, batch)
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
    named = named_parts(batch)
    if isinstance(mask := named.get("decoder_attention_mask"), Tensor):
        return mask.bool()
    labels = named["labels"]
    return labels != IGNORED if isinstance(labels, Tensor) and labels.ndim == 2 else None


def tokens_of(model: nn.Module, batch: Tree) -> Tensor | None:
    """The tokens that outputs may stand for, (sample, token), or their mask if there is one; None without tokens."""
    if (mask := token_mask(model, batch)) is not None:
        return mask
    named = named_parts(batch)
    tokens = named.get("decoder_input_ids", named.get("input_ids"))
    is_right = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    return tokens if is_right else None


def num_samples(batch: Tree) -> int:
    leaves = torch.utils._pytree.tree_leaves(batch)
    num = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
    if not num:
        raise ValueError(
            "a batch must be a tensor, a pair (input, target) or a dict of tensors with one sample per row, got "
            f"{type(batch).__name__} without rows"
        )
    return num


def labels_of(model: nn.Module, batch: Tree, distance: Distance, is_by_token: bool) -> Tensor | None:
    """Labels of the outputs' places; IGNORED where there is none. Of text, each token's label is the next token."""
    named = named_parts(batch)
    labels = named["labels"]
    if distance.kind != "classes":
        return labels if isinstance(labels, Tensor) else None
    predicts_next, mask = labels is None, token_mask(model, batch) if is_by_token else None
    if hasattr(model, "config"):
        predicts_next = not is_encoder_decoder(model) and bool(getattr(model, "can_generate", bool)())
    predicts_next = predicts_next and is_by_token
    if predicts_next and labels is None:
        labels = named.get("input_ids")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    for shifts in (False, predicts_next):  # neither padding nor what follows on padding is learned
        labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if shifts else labels
        if mask is not None and labels.shape == mask.shape:
            labels = labels.masked_fill(~mask, IGNORED)
    return labels


def label_loss(found: Tensor, labels: Tensor, distance: Distance) -> Tensor:
    """The sum over labels of the cross-entropy, or of the mean square where outputs are not logits."""
    dtype = torch.promote_types(found.dtype, torch.float32)
    if distance.kind == "classes":
        logits = found.to(dtype).movedim(distance.dim, -1).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = F.binary_cross_entropy_with_logits if distance.kind == "bernoulli" else F.mse_loss
    return loss(found.to(dtype), labels.to(dtype).view_as(found), reduction="sum")


def num_right(found: Tensor, labels: Tensor, distance: Distance) -> float:
    """Labels that the model predicts; NaN where they are no classes."""
    if distance.kind == "mean square":
        return math.nan
    guess = found > 0 if distance.kind == "bernoulli" else found.argmax(distance.dim)
    return int((guess == labels.view_as(guess)).sum())


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
