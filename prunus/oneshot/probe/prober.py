"""A probe: which weights are probed together and in which order, and what is pruned of each, by two gradient records.

    prune where  G1 <= (1 + tau) G0,  as  q <= 1 + tau  with the ratio q = G1 / G0

The ratios are kept at the candidates only; every tau is then a comparison.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ...eligible import Weight
from ...ops import bits
from ..blocks import block_of
from ..originals import Originals
from .engine import Engine, Records

ZeroGradient = Literal["prune", "keep"]
Tau = float | Mapping[str, float] | Sequence[float] | Literal["adaptive", "target"]


@dataclass(frozen=True)
class Ratios:
    """q at the candidates of one weight, in order: NaN where one stays whatever tau is, infinite where G0 is 0."""

    q: Tensor
    num_zero: int  # both gradients are zero
    num_not_finite: int  # a gradient is NaN or infinite


def ratios(before: Tensor, after: Tensor, zero: ZeroGradient) -> Ratios:
    """``G1 / G0`` of the candidates' gradients, each a vector."""
    broken = ~(torch.isfinite(before) & torch.isfinite(after))
    none = (before == 0) & (after == 0)
    q = after / before
    q[none] = 0.0 if zero == "prune" else math.nan
    q[broken] = math.nan
    return Ratios(q, int(none.sum()), int(broken.sum()))


def is_allowed(q: Tensor, tau: float) -> Tensor:
    return q <= 1 + tau


def smallest_ratios(q: Sequence[Tensor], num: int) -> list[Tensor]:
    """Masks of the ``num`` smallest ratios of all, the first of equal ones first; of fewer where others are NaN."""
    whole = torch.cat(list(q))
    order = whole.sort(stable=True).indices  # NaN comes last
    chosen = torch.zeros_like(whole, dtype=torch.bool)
    chosen[order[: min(num, int((~whole.isnan()).sum()))]] = True
    return list(chosen.split([len(part) for part in q]))


def taus(tau: Tau, sizes: Mapping[str, int], base: float) -> dict[str, float]:
    """tau of every weight; ``sizes`` are their numbers of elements, in model order.

    ``adaptive`` is ``base sqrt(n / mean n)``: large layers are allowed more. The keys of a mapping are names or
    patterns, of which the first match counts; a sequence is in model order.
    """
    if isinstance(tau, str):
        mean = sum(sizes.values()) / len(sizes)
        return {name: base * math.sqrt(size / mean) for name, size in sizes.items()}
    if isinstance(tau, Mapping):
        for pattern in tau:
            if not any(fnmatchcase(name, pattern) for name in sizes):
                raise ValueError(f"tau has the pattern {pattern!r}, which matches none of: {', '.join(sizes)}")
        by_name = {}
        for name in sizes:
            values = [value for pattern, value in tau.items() if fnmatchcase(name, pattern)]
            if not values:
                raise ValueError(f"tau has no value for {name}; add it, or a last pattern '*'")
            by_name[name] = values[0]
        return by_name
    if isinstance(tau, Sequence):
        if len(tau) != len(sizes):
            raise ValueError(f"tau as a list needs one value for each of {len(sizes)} weights, got {len(tau)}")
        return dict(zip(sizes, tau, strict=True))
    return dict.fromkeys(sizes, tau)


def check_tau(tau: Tau) -> None:
    """Raise ValueError unless tau is a known rule, or every value a finite number of at least 0."""
    if isinstance(tau, str):
        if tau not in ("adaptive", "target"):
            raise ValueError(f"tau must be a number, a mapping, a list, 'adaptive' or 'target', got {tau!r}")
        return
    values = tau.values() if isinstance(tau, Mapping) else tau if isinstance(tau, Sequence) else [tau]
    for value in values:
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise ValueError(f"tau, the allowed increase, must be at least 0 (0.1 is 10 %), got {value!r}")


Order = Literal["reverse", "forward"]
ProbeSchedule = Literal["joint", "sequential", "block"]


@dataclass(frozen=True)
class Probe:
    """Prunes a candidate only if its gradient grows by at most the fraction ``tau`` when it is scaled by ``reduction``.

    - ``joint``: all weight matrices at once, with two gradient records in all.
    - ``sequential``: one matrix after another, with new gradients after each has been pruned.
    - ``block``: the matrices of one block together, then the next block; those in no block one by one.

    ``order`` is for ``sequential`` and ``block``: from the last to the first, or from the first. With tau ``target``
    the candidates are those at sparsity ``pool`` (by default 1.2 times the sparsity, at most halfway from it to 1), and
    those whose gradients grow least are pruned until the sparsity is exact.
    """

    tau: Tau = 1.0
    order: Order = "reverse"
    schedule: ProbeSchedule = "sequential"
    reduction: float = 0.1
    zero_gradient: ZeroGradient = "prune"
    base: float = 1.0  # tau of a weight of mean size where tau is adaptive
    pool: float | None = None

    def __post_init__(self) -> None:
        check_tau(self.tau)
        for name, kind in (("order", Order), ("schedule", ProbeSchedule), ("zero_gradient", ZeroGradient)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not 0 <= self.reduction < 1:
            raise ValueError(f"reduction, the factor on candidates, must lie in [0, 1), got {self.reduction}")
        if self.pool is not None and not (self.tau == "target" and 0 < self.pool < 1):
            raise ValueError(f"pool must be a sparsity in (0, 1), and needs tau='target', got {self.pool}")

    def pool_sparsity(self, sparsity: float) -> float:
        """Sparsity of the candidates."""
        if self.tau != "target":
            return sparsity
        pool = min(1.2 * sparsity, (1 + sparsity) / 2) if self.pool is None else self.pool
        if pool < sparsity:
            raise ValueError(f"pool must be at least the sparsity {sparsity}, got {pool}")
        return pool


@dataclass
class Probed:
    """What a probe has found, by weight: candidates as packed bits, their ratios, and the tau that decided."""

    candidates: dict[str, Tensor] = field(default_factory=dict)
    ratios: dict[str, Ratios] = field(default_factory=dict)
    taus: dict[str, float] = field(default_factory=dict)
    pruned: dict[str, Tensor] = field(default_factory=dict)  # packed


Finished = Callable[[Sequence[str], Probed], None]


@dataclass(eq=False)
class Prober:
    """One probe of one model. ``candidates`` are packed bits; of each weight ``num_prune`` go at tau ``target``."""

    engine: Engine
    probe: Probe
    candidates: Mapping[str, Tensor]
    num_prune: Mapping[str, int]
    undo: Originals

    def __post_init__(self) -> None:
        self.weights, self.found = self.engine.weights, Probed(candidates=dict(self.candidates))
        if self.probe.tau != "target":
            sizes = {name: weight.parameter.numel() for name, weight in self.weights.items()}
            self.found.taus = taus(self.probe.tau, sizes, self.probe.base)

    def run(self, finished: Finished, done: Sequence[str] = ()) -> Probed:
        """Probe and prune; ``finished`` is called after every group. Groups whose weights are ``done`` are skipped."""
        groups = grouped(self.weights, self.engine.calibration.blocks, self.probe)
        groups = [group for group in groups if not set(group) <= set(done)]
        for i, names in enumerate(groups):
            self.engine.calibration.meter.show(f"probe of {names[0]}")
            if self.probe.schedule == "joint":
                before, after = self._joint_records(names)
            else:
                # of the activations, keep those that this group and the next ones start from
                self.engine.stream.want({min(map(self.engine.start, group)) for group in groups[i:]})
                records = self.engine.records(names, [{}, self._reduced(names)])
                before, after = map(self._at_candidates, records)
            zero = self.probe.zero_gradient
            self.found.ratios |= {name: ratios(before[name], after[name], zero) for name in names}
            self._decide(names)
            finished(names, self.found)
        return self.found

    def _where(self, name: str) -> Tensor:
        return bits.unpack(self.found.candidates[name], self.weights[name].parameter.shape)

    @torch.no_grad()
    def _reduced(self, names: Sequence[str]) -> dict[str, Tensor]:
        weights = {name: self.weights[name].parameter.detach() for name in names}
        return {n: torch.where(self._where(n), weight * self.probe.reduction, weight) for n, weight in weights.items()}

    def _at_candidates(self, record: Records) -> Records:
        return {name: values[self._where(name)] for name, values in record.items()}

    def _joint_records(self, names: Sequence[str]) -> tuple[Records, Records]:
        """Records of the model and of the model with all candidates reduced, at the candidates."""
        calibration, where = self.engine.calibration, {name: self.found.candidates[name] for name in names}
        with calibration.reading("gradients"):
            before = self._at_candidates(*self.engine.records(names, [{}]))
        with self.engine.reduced(where, self.probe.reduction), calibration.reading("gradients with candidates reduced"):
            return before, self._at_candidates(*self.engine.records(names, [{}]))

    def _decide(self, names: Sequence[str]) -> None:
        q = [self.found.ratios[name].q for name in names]
        if self.probe.tau == "target":
            chosen = smallest_ratios(q, sum(self.num_prune[name] for name in names))
            reached = max(
                (float(part[take].max()) for part, take in zip(q, chosen, strict=True) if take.any()), default=1.0
            )
            self.found.taus.update(dict.fromkeys(names, reached - 1))
        else:
            chosen = [is_allowed(part, self.found.taus[name]) for part, name in zip(q, names, strict=True)]
        for name, take in zip(names, chosen, strict=True):
            where = self._where(name)
            where[where.clone()] = take
            self.undo.prune_(self.weights[name].parameter, where)
            self.found.pruned[name] = bits.pack(where)
        self.engine.changed(names)

    def resume(self, done: Probed) -> None:
        """Prune what an earlier run of this probe has already decided."""
        for name, packed in done.pruned.items():
            parameter = self.weights[name].parameter
            self.undo.prune_(parameter, bits.unpack(packed, parameter.shape))
        self.found.pruned.update(done.pruned)
        self.found.ratios.update(done.ratios)
        self.found.taus.update(done.taus)
        self.engine.changed(list(self.weights))


def grouped(weights: Mapping[str, Weight], blocks: Sequence[nn.Module], probe: Probe) -> list[list[str]]:
    """Names of the weights that are probed together, in the order of the schedule."""
    if probe.schedule == "joint":
        return [list(weights)]
    groups: dict[object, list[str]] = {}
    for name, weight in weights.items():
        block = block_of(weight.module, blocks) if probe.schedule == "block" else None
        groups.setdefault(name if block is None else block, []).append(name)
    ordered = list(groups.values())
    return ordered[::-1] if probe.order == "reverse" else ordered
