"""How long it takes to find the masks: ours beside what others do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from prunus import Global, NofM, PerLayer, PerRow
from prunus.ops import bits
from prunus.ops.lazy import Lazy
from prunus.ops.machine import device_of
from prunus.statistics import score_of

from .benchmark import SPARSITY, Benchmark, Measured, Record, RecordTable, Row
from .clocks import copy_gb_s, median_ms, peak_extra_mib

GPT2 = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
MISTRAL = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SHAPES = {"gpt2": 12 * GPT2, "mistral-7b": 32 * MISTRAL}
OURS, SCORE = "prunus, exact", "bitter7"
LARGEST = 1 << 31  # weights that the rivals, which put all scores into one tensor, are run on


@dataclass(frozen=True, kw_only=True)
class Select(Benchmark):
    """Find masks by every selector, and in the ways of others where the weights are not too many for these."""

    layers: int = 12  # number of weights
    dim: int = 2048  # rows and columns of each
    shapes: Literal["gpt2", "mistral-7b"] | None = None  # a model's weights instead
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and moments
    repeat: int = 15  # calls that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        shapes = SHAPES[self.shapes] if self.shapes else [(self.dim, self.dim)] * self.layers
        about = f"{len(shapes)} weights of {self.shapes or f'{self.dim} x {self.dim}'}"
        weights = ScoredWeights(shapes, device, getattr(torch, self.dtype))
        settings = {"score": SCORE, "sparsity": SPARSITY, "repeat": self.repeat, "dtype": self.dtype}
        num_bytes = sum(tensor.nbytes for source in weights.sources for tensor in source.reads.values())
        settings |= {"num_weights": weights.num, "weights": about, "num_bytes": num_bytes}
        rows = measure_cuts(weights, self.repeat, device)
        for row in rows:
            row["read_gb_s"] = num_bytes / row["ms"] / 1e6 if row["method"] == OURS else None
        return "select", settings | {"copy_gb_s": copy_gb_s(device)}, rows


class ScoredWeights:
    """Random weights and Adam's moments as they look in training, small and of a wide range, and their scores."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> None:
        row = score_of(SCORE, {})
        torch.manual_seed(0)
        self.sources: list[Lazy] = []
        self.tensors: list[tuple[Tensor, ...]] = []  # weight and moments
        for number, shape in enumerate(shapes):
            weight = torch.empty(shape, device=device, dtype=dtype).normal_(std=0.02)
            grad = torch.randn_like(weight) * torch.rand_like(weight) * 1e-4
            tensors = {"weight": weight, "exp_avg": 0.1 * grad, "exp_avg_sq": grad.square()}
            reads = {name: tensors[name] for name in row.reads}
            self.sources.append(Lazy(f"{number}", weight, row.of, reads, formula=row.formula))
            self.tensors.append(tuple(tensors.values()))
        self.weights = [source.weight for source in self.sources]
        self.num = sum(source.numel for source in self.sources)
        self.num_drop = round(SPARSITY * self.num)

    @cached_property
    def halved(self) -> dict[str, Tensor]:
        """Packed masks of half of the weights."""
        return Global().packed(self.sources, 0.5, {})

    def scores(self) -> Iterator[Tensor]:
        """The score of each weight, one at a time."""
        return (source.all() for source in self.sources)

    def all_scores(self) -> Tensor:
        return torch.cat([score.flatten() for score in self.scores()])


def kthvalue(p: ScoredWeights) -> list[Tensor]:
    """Exact but for ties: all scores in one tensor, its k-th value, masks."""
    scores = p.all_scores()
    edge = scores.kthvalue(max(1, p.num_drop)).values
    return [score > edge for score in p.scores()]


def topk(p: ScoredWeights) -> list[Tensor]:
    """Exact: the indices of the largest scores."""
    scores = p.all_scores()
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[scores.topk(p.num - p.num_drop, sorted=False).indices] = True
    return list(keep.split([weight.numel() for weight in p.weights]))


def sampled_2_percent(p: ScoredWeights) -> list[Tensor]:
    """Approximate: a quantile of 2 % of the concatenated scores."""
    scores = p.all_scores()
    sample = scores[torch.randint(0, len(scores), (len(scores) // 50,), device=scores.device)]
    edge = sample.kthvalue(max(1, round(SPARSITY * len(sample)))).values
    return [score > edge for score in scores.split([weight.numel() for weight in p.weights])]


def sampled_1_percent(p: ScoredWeights) -> list[Tensor]:
    """Approximate: scores cached layer by layer, a quantile of 1 % of them."""
    cache = list(p.scores())
    draws = [torch.randint(0, s.numel(), (s.numel() // 100,), device=s.device) for s in cache]
    sample = torch.cat([score.view(-1)[draw] for score, draw in zip(cache, draws, strict=True)])
    edge = sample.kthvalue(max(1, round(SPARSITY * len(sample)))).values
    return [score > edge for score in cache]


def torch_prune(p: ScoredWeights) -> list[Tensor]:
    """torch.nn.utils.prune.global_unstructured, which ranks by magnitude whatever the score is."""
    layers = [nn.Linear(*reversed(weight.shape), bias=False, device="meta") for weight in p.weights]
    for layer, weight in zip(layers, p.weights, strict=True):
        layer.weight = nn.Parameter(weight)
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=p.num_drop)
    return [layer.get_buffer("weight_mask") for layer in layers]


def by(select: Any) -> Callable[[ScoredWeights], list[Tensor]]:
    """Ours: packed masks by one read of what the score reads."""
    return lambda p: list(select.packed(p.sources, select.sparsity or SPARSITY, {}).values())


def from_half_on(p: ScoredWeights) -> list[Tensor]:
    """A later event: half of the weights are pruned, and half of the rest goes."""
    live = p.num - round(0.5 * p.num)
    return list(Global().packed(p.sources, 0.75, p.halved, live).values())


def with_zeroing(p: ScoredWeights) -> list[Tensor]:
    """The whole event: the masks, then weights and moments zeroed by them."""
    masks = by(Global())(p)
    bits.zero_each_((tensor, mask) for tensors, mask in zip(p.tensors, masks, strict=True) for tensor in tensors)
    return masks


@dataclass(frozen=True)
class MaskMethod:
    """A way to find the masks, whether it claims to be exact, and the share of the weights that it drops."""

    masks: Callable[[ScoredWeights], list[Tensor]]
    exact: bool = True
    drops: float = SPARSITY


CUTS = {
    "exact: cat, kthvalue": MaskMethod(kthvalue),
    "exact: cat, topk": MaskMethod(topk),
    "sampled: 2 % of cat": MaskMethod(sampled_2_percent, exact=False),
    "sampled: 1 %, cached scores": MaskMethod(sampled_1_percent, exact=False),
    "torch.nn.utils.prune (magnitude)": MaskMethod(torch_prune),
    OURS: MaskMethod(by(Global())),
    "prunus, exact, from half pruned on": MaskMethod(from_half_on, drops=0.75),
    "prunus, exact, and zeroing w, m, v": MaskMethod(with_zeroing),
    "prunus, by layer": MaskMethod(by(PerLayer())),
    "prunus, by row": MaskMethod(by(PerRow())),
    "prunus, 2:4": MaskMethod(by(NofM(2, 4))),
}


def measure_cuts(p: ScoredWeights, repeat: int, device: torch.device) -> list[Row]:
    """A row for each way: median time, peak extra memory, and how far its count is off."""
    edge = check_exact(p)
    _ = p.halved  # found ahead, so that it counts for no way
    rows = []
    for name, way in CUTS.items():
        if p.num > LARGEST and not name.startswith("prunus"):
            continue
        tensors = [tensor for some in p.tensors for tensor in some]
        copies = [tensor.clone() for tensor in tensors] if way.masks is with_zeroing else []
        restore = partial(torch._foreach_copy_, tensors, copies) if copies else lambda: None
        call = partial(way.masks, p)
        peak = peak_extra_mib(call, device, restore)
        masks = call()
        too_many = count_kept(masks) - (p.num - round(way.drops * p.num))
        edge_error = None if way.exact else error_of_edge(p, masks, edge)
        del masks
        restore()
        ms = median_ms(call, repeat, device, restore)
        restore()
        row = {"method": name, "exact": way.exact, "ms": ms, "extra_mib": peak}
        rows.append(row | {"kept_too_many": too_many, "edge_error": edge_error})
    return rows


def check_exact(p: ScoredWeights) -> float:
    """The smallest score kept; RuntimeError unless our masks keep the right number and the largest."""
    kept, lowest, highest = 0, torch.inf, -torch.inf
    for score, mask in zip(p.scores(), by(Global())(p), strict=True):
        keep = bits.unpack(mask, score.shape)
        kept += int(keep.sum())
        lowest = min(lowest, score[keep].min().item() if keep.any() else torch.inf)
        highest = max(highest, score[~keep].max().item() if not keep.all() else -torch.inf)
    if kept != p.num - p.num_drop or lowest < highest:
        raise RuntimeError(
            f"the masks are wrong, so no speed is reported: {kept} kept from {lowest}, up to {highest} not"
        )
    return lowest


def error_of_edge(p: ScoredWeights, masks: list[Tensor], edge: float) -> float:
    """How far, relatively, the smallest score kept lies from the exact one."""
    kept = [score.view(-1)[mask.view(-1)] for score, mask in zip(p.scores(), masks, strict=True)]
    return min(part.min().item() for part in kept if len(part)) / edge - 1


def count_kept(masks: list[Tensor]) -> int:
    """Weights kept by masks of any form: packed bits, booleans or floats."""
    packed = all(len(m.shape) == 1 and m.dtype == torch.uint8 for m in masks)
    return sum(int(bits.count(mask) if packed else mask.count_nonzero()) for mask in masks)


def _more(row: Row, record: Record) -> Row:
    ours = next(row for row in record["rows"] if row["method"] == OURS)
    more = {"extra": "not measured" if row["extra_mib"] is None else f"{row['extra_mib']:.1f}"}
    copy = record["settings"]["copy_gb_s"]
    if copy and row is ours:  # what must be read at least, at the speed of a copy
        more |= {"least_ms": record["settings"]["num_bytes"] / copy / 1e6, "of_copy": row["read_gb_s"] / copy}
    return more | {"times_ours": row["ms"] / ours["ms"]}


COLUMNS = (
    "method | ms:.2f | times ours = times_ours:.2f | extra MiB = extra | off by = kept_too_many:, | "
    "edge = edge_error:+.2% | ms at a copy's speed = least_ms:.2f | GB/s read = read_gb_s:,.0f | "
    "of a copy's = of_copy:.0%"
)
TABLES = {
    "select": RecordTable(COLUMNS, _more),
    "parts": RecordTable("part | where | us:,.1f"),  # no command writes such a record
}
