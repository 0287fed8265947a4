"""What a recovery did: figures before and after, the rate, the curve, and the way back."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..plot import Figure, notebook_html, recovery_chart
from .loss import Figures


@dataclass(frozen=True)
class Point:
    """Figures on the held-out batches after ``step`` steps and ``tokens`` tokens, or samples where there are none."""

    step: int
    tokens: int
    kl: float | None
    loss: float | None
    accuracy: float | None

    @property
    def figures(self) -> Figures:
        return Figures(self.kl, self.loss, self.accuracy)

    @property
    def perplexity(self) -> float | None:
        return self.figures.perplexity


@dataclass(repr=False)
class Recovery:
    """What recovery achieved: figures of the student before and after, and of its teacher, on the held-out batches.

    ``curve`` starts with the student as it was and leaves out the trials of learning rates, which ``steps`` and
    ``tokens`` include. The student is in the state of ``best_step``, the best one on the curve.
    """

    before: Figures
    after: Figures
    teacher: Figures
    lr: float
    lr_reason: str
    curve: list[Point]
    best_step: int
    steps: int
    tokens: int
    seconds: float
    num_zeros: int  # all of them where they were
    notes: list[str] = field(default_factory=list)
    distance: str = "KL divergence"  # what ``kl`` measures
    undo: Callable[[], None] = field(default=lambda: None)

    def undo_(self) -> None:
        """Give every weight the value that it had before the recovery, bit for bit."""
        self.undo()

    def __repr__(self) -> str:
        return f"Recovery({self.in_words()})"

    def __str__(self) -> str:
        return "\n".join([self.in_words(), f"Learning rate {self.lr:g}: {self.lr_reason}.", *self.notes])

    def in_words(self) -> str:
        parts = []
        for name, form in (("perplexity", "{:.4g}"), ("accuracy", "{:.2%}"), ("kl", "{:.4g}")):
            before, after, teacher = (getattr(each, name) for each in (self.before, self.after, self.teacher))
            if before is None or after is None or (name == "perplexity" and self.is_classifier):
                continue
            of = "" if name == "kl" or teacher is None else f", teacher {form.format(teacher)}"
            what = self.distance if name == "kl" else name
            parts.append(f"{what} {form.format(before)} -> {form.format(after)}{of}")
        took = f"{self.steps:,} steps, {self.tokens:,} tokens, {self.seconds:.1f} s"
        return "; ".join([*parts, *([f"{self.num_zeros:,} zeros kept"] if self.num_zeros else []), took])

    @property
    def is_classifier(self) -> bool:
        """Whether accuracy was measured; for text only perplexity is."""
        return self.before.accuracy is not None

    @property
    def metric(self) -> str:
        """Name of the main figure: ``accuracy`` or ``perplexity``, or without labels ``kl``."""
        return "kl" if self.before.loss is None else "accuracy" if self.is_classifier else "perplexity"

    def plot(self) -> Figure:
        """A chart of the curve, with lines for the teacher and for the student before recovery."""
        models = ({} if self.teacher.kl is None else {"teacher": self.teacher}) | {"before recovery": self.before}
        levels = {name: getattr(figures, self.metric) for name, figures in models.items()}
        return recovery_chart([(p.tokens, getattr(p, self.metric)) for p in self.curve], levels, self.metric)

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys((self.metric, "kl")))
        values = [["" if (y := getattr(p, name)) is None else f"{y:.4g}" for name in names] for p in self.curve]
        rows = [(f"{p.step:,}", f"{p.tokens:,}", *each) for p, each in zip(self.curve, values, strict=True)]
        return notebook_html(str(self), self.plot, ("step", "tokens", *names), rows)

    def figures(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        names = ("lr", "lr_reason", "best_step", "steps", "tokens", "seconds", "num_zeros", "notes", "distance")
        models = {name: asdict(getattr(self, name)) for name in ("before", "after", "teacher")}
        return models | {name: getattr(self, name) for name in names} | {"curve": [asdict(one) for one in self.curve]}
