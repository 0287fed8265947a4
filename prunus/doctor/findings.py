"""What a model should be, and what the doctor says of it: its tensors, findings, warnings and notes."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# every kind of finding, and what to do about it where the finding does not say; --allow takes these names
KINDS = {
    "too-dense": "prune the model anew, or remove result.json",
    "too-sparse": "prune it anew with exact counts",
    "rows": "prune it anew with exact counts",
    "groups": "exclude it, or choose another N:M",
    "dead-rows": "prune less or per row, or cut them out for good; --allow dead-rows if they are meant",
    "dead-columns": "prune less or per row, or cut them out for good; --allow dead-columns if they are meant",
    "came-back": "apply the masks, and hold them where the weights are trained",
    "moments": "zero them, or the weights come back with the next step",
    "bad-mask": "take the masks that were saved with this model",
    "masks-disagree": "go back to a checkpoint whose masks agree",
    "untied": "store one of them, or set tie_word_embeddings to false",
    "excluded": "take it from the dense model",
    "not-finite": "go back to a checkpoint before they appeared",
    "missing": "copy them from where the model was saved, or save it anew",
    "digest": "the ranks' masks have parted or the file was changed: go back to a checkpoint before it",
    "not-removed": "call torch.nn.utils.prune.remove before saving",
}
WARNINGS = ("dead-rows", "dead-columns")  # what hard pruning does to healthy models too; findings only if strict
PATTERNS = ("global", "layer", "row")


@dataclass(frozen=True)
class Expected:
    sparsity: float | None = None
    pattern: str | None = None  # global, layer, row or N:M
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.sparsity is not None and not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), such as 0.5, got {self.sparsity}")
        if self.pattern is not None and self.pattern not in PATTERNS and self.groups is None:
            raise ValueError(f"pattern must be {', '.join(PATTERNS)} or N:M such as 2:4, got {self.pattern!r}")
        if self.groups and self.sparsity is not None:
            n, m = self.groups
            if abs(1 - n / m - self.sparsity) > 1e-9:
                raise ValueError(f"{n}:{m} has a sparsity of {1 - n / m:g}, but sparsity is {self.sparsity:g}")
        if unknown := sorted(set(self.allow) - set(KINDS)):
            raise ValueError(f"allow takes kinds of findings, got {unknown[0]!r}; they are {', '.join(KINDS)}")

    @property
    def groups(self) -> tuple[int, int] | None:
        """n and m of an N:M pattern."""
        match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", self.pattern or "")
        return (int(match[1]), int(match[2])) if match and 0 < int(match[1]) < int(match[2]) else None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind, the tensor or file, what was found and what to do."""

    kind: str
    where: str
    what: str
    todo: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "todo", self.todo or KINDS[self.kind])

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}; {self.todo}"


@dataclass(frozen=True)
class TensorReport:
    """One tensor as it was found; rows are outputs, columns inputs; what is None is counted where there is a mask."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str  # weight, or why it is not pruned: embedding, head, excluded, ...
    num: int
    num_zeros: int
    pattern: str
    num_dead_rows: int = 0
    num_dead_columns: int = 0
    num_not_finite: int = 0
    num_pruned: int | None = None
    num_live_zeros: int | None = None
    num_came_back: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_prunable(self) -> bool:
        return self.role == "weight"

    @property
    def num_removed(self) -> int:
        """What the mask prunes; without a mask, the zeros."""
        return self.num_zeros if self.num_pruned is None else self.num_pruned

    @property
    def sparsity(self) -> float:
        return self.num_zeros / self.num if self.num else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """All that was found in ``path``; it is healthy if ``findings`` is empty, even with warnings."""

    path: str
    kind: str
    pattern: str
    layers: list[TensorReport]
    findings: list[Finding]
    warnings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None

    @property
    def is_healthy(self) -> bool:
        return not self.findings

    @property
    def num_prunable(self) -> int:
        return sum(layer.num for layer in self.layers if layer.is_prunable)

    @property
    def num_zeros(self) -> int:
        return sum(layer.num_zeros for layer in self.layers if layer.is_prunable)

    @property
    def sparsity(self) -> float:
        return self.num_zeros / self.num_prunable if self.num_prunable else 0.0

    @property
    def verdict(self) -> str:
        counted = f"{self.sparsity:.4%} of {self.num_prunable:,} prunable weights are zero ({self.pattern})"
        faults = ", ".join(_counted("finding", self.findings) + _counted("warning", self.warnings))
        if self.is_healthy:
            return f"healthy{' with ' if faults else ''}{faults}: {counted}"
        return f"not healthy: {faults}; {counted}"

    def to_json(self) -> dict[str, Any]:
        own = {"healthy": self.is_healthy, "verdict": self.verdict, "sparsity": self.sparsity}
        counts = {"num_prunable": self.num_prunable, "num_zeros": self.num_zeros}
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers]
        return own | counts | asdict(self) | {"layers": layers}


def _counted(noun: str, findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    kinds = ", ".join(dict.fromkeys(finding.kind for finding in findings))
    return [f"{len(findings)} {noun}{'s' if len(findings) > 1 else ''} ({kinds})"]


def share(part: int, whole: int) -> str:
    """A percentage that never rounds something to nothing or to all."""
    if not whole:
        return "-"
    shown = f"{part / whole:.2%}"
    if part and shown == "0.00%":
        return "<0.01%"
    return ">99.99%" if part < whole and shown == "100.00%" else shown
