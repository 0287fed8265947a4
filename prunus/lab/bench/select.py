"""How long it takes to find the masks: ours beside what others do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ...ops import bits
from ...ops.lazy import Lazy
from ...score import Score
from ...select import Global, NofM, PerLayer, PerRow
from ...stats import score_of
from .measure import median_ms, peak_extra_mib


@dataclass(frozen=True)
class Problem:
    """Weights and Adam moments of one model, and the score to rank them by."""

    weights: list[Tensor]
    moments: list[dict[str, Tensor]]  # exp_avg and exp_avg_sq
    score: Score
    sparsity: float

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of what the score reads: the least that must be moved."""
        return sum(tensor.nbytes for source in self.sources() for tensor in source.reads.values())

    @property
    def num_drop(self) -> int:
        return round(self.sparsity * self.num_weights)

    @cached_property
    def halved(self) -> dict[str, Tensor]:
        """Packed masks of half of the weights."""
        return Global().packed(self.sources(), 0.5, {})

    def scores(self) -> Iterator[Tensor]:
        """The score of each weight, one at a time."""
        for source in self.sources():
            yield next(source.pieces(source.numel))[1].view(source.shape)

    def sources(self) -> list[Lazy]:
        return [
            Lazy(
                f"{i}",
                weight,
                self.score.of,
                {name: weight if name == "weight" else state[name] for name in self.score.reads},
                formula=self.score.formula,
            )
            for i, (weight, state) in enumerate(zip(self.weights, self.moments, strict=True))
        ]


def problem(
    shapes: Sequence[tuple[int, int]], score: str, sparsity: float, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Weights with moments as they look in training: small and of a wide range."""
    row = score_of(score, {})
    if unknown := set(row.reads) - {"weight", "exp_avg", "exp_avg_sq"}:
        raise ValueError(f"the benchmark has weights and moments, but {score} reads {min(unknown)}")
    torch.manual_seed(0)
    weights, moments = [], []
    for outputs, inputs in shapes:
        weight = torch.empty(outputs, inputs, device=device, dtype=dtype).normal_(std=0.02)
        grad = torch.randn_like(weight) * torch.rand_like(weight) * 1e-4
        weights.append(weight)
        moments.append({"exp_avg": 0.1 * grad, "exp_avg_sq": grad.square()})
    return Problem(weights, moments, row, sparsity)


def kthvalue(p: Problem) -> list[Tensor]:
    """Exact but for ties: all scores in one tensor, its k-th value, masks."""
    scores = torch.cat([score.flatten() for score in p.scores()])
    edge = scores.kthvalue(max(1, p.num_drop)).values
    return [score > edge for score in p.scores()]


def topk(p: Problem) -> list[Tensor]:
    """Exact: the indices of the largest scores."""
    scores = torch.cat([score.flatten() for score in p.scores()])
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep[scores.topk(p.num_weights - p.num_drop, sorted=False).indices] = True
    return list(keep.split([weight.numel() for weight in p.weights]))


def sampled_2_percent(p: Problem) -> list[Tensor]:
    """Approximate: a quantile of 2 % of the concatenated scores."""
    scores = torch.cat([score.flatten() for score in p.scores()])
    sample = scores[torch.randint(0, len(scores), (len(scores) // 50,), device=scores.device)]
    edge = sample.kthvalue(max(1, round(p.sparsity * len(sample)))).values
    return [score > edge for score in scores.split([weight.numel() for weight in p.weights])]


def sampled_1_percent(p: Problem) -> list[Tensor]:
    """Approximate: scores cached layer by layer, a quantile of 1 % of them."""
    cache = list(p.scores())
    draws = [torch.randint(0, s.numel(), (s.numel() // 100,), device=s.device) for s in cache]
    sample = torch.cat([score.view(-1)[draw] for score, draw in zip(cache, draws, strict=True)])
    edge = sample.kthvalue(max(1, round(p.sparsity * len(sample)))).values
    return [score > edge for score in cache]


def torch_prune(p: Problem) -> list[Tensor]:
    """torch.nn.utils.prune.global_unstructured, which ranks by magnitude whatever the score is."""
    layers = [nn.Linear(*reversed(weight.shape), bias=False, device="meta") for weight in p.weights]
    for layer, weight in zip(layers, p.weights, strict=True):
        layer.weight = nn.Parameter(weight)
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=p.num_drop)
    return [layer.get_buffer("weight_mask") for layer in layers]


def ours(p: Problem) -> list[Tensor]:
    """Packed masks by one read of what the score reads."""
    return list(Global().packed(p.sources(), p.sparsity, {}).values())


def ours_again(p: Problem) -> list[Tensor]:
    """A later event: half of the weights are pruned, and half of the rest goes."""
    live = p.num_weights - round(0.5 * p.num_weights)
    return list(Global().packed(p.sources(), 0.75, p.halved, live).values())


def ours_with_zeroing(p: Problem) -> list[Tensor]:
    """The whole event: the masks, then weights and moments zeroed by them."""
    masks = ours(p)
    for weight, state, mask in zip(p.weights, p.moments, masks, strict=True):
        for tensor in (weight, *state.values()):
            bits.zero_(tensor, mask)
    return masks


def ours_by_layer(p: Problem) -> list[Tensor]:
    """The same sparsity in every weight."""
    return list(PerLayer().packed(p.sources(), p.sparsity, {}).values())


def ours_by_row(p: Problem) -> list[Tensor]:
    """The same sparsity in every row."""
    return list(PerRow().packed(p.sources(), p.sparsity, {}).values())


def ours_2_of_4(p: Problem) -> list[Tensor]:
    """Two of every four are kept, whatever the sparsity asked for."""
    return list(NofM(2, 4).packed(p.sources(), 0.5, {}).values())


METHODS: dict[str, tuple[Callable[[Problem], list[Tensor]], bool]] = {  # and whether it claims to be exact
    "exact: cat, kthvalue": (kthvalue, True),
    "exact: cat, topk": (topk, True),
    "sampled: 2 % of cat": (sampled_2_percent, False),
    "sampled: 1 %, cached scores": (sampled_1_percent, False),
    "torch.nn.utils.prune (magnitude)": (torch_prune, True),
    "prunus, exact": (ours, True),
    "prunus, exact, from half pruned on": (ours_again, True),
    "prunus, exact, and zeroing w, m, v": (ours_with_zeroing, True),
    "prunus, by layer": (ours_by_layer, True),
    "prunus, by row": (ours_by_row, True),
    "prunus, 2:4": (ours_2_of_4, True),
}
LARGEST = 1 << 31  # weights that the rivals, which put all scores into one tensor, are run on


def bench_select(p: Problem, repeat: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each method: median time, peak extra memory, and how far its count is off."""
    edge = check_exact(p)
    _ = p.halved  # found ahead, so that it counts for no method
    rows = []
    for name, (method, is_exact) in METHODS.items():
        if p.num_weights > LARGEST and not name.startswith("prunus"):
            continue
        restore = _restorer(p) if method is ours_with_zeroing else _nothing
        peak = peak_extra_mib(lambda method=method: method(p), device, restore)
        num_wanted = p.num_weights - num_dropped(p, method)
        masks = method(p)
        num_kept, edge_error = count_kept(masks), None if is_exact else error_of_edge(p, masks, edge)
        del masks
        restore()
        time_ms = median_ms(lambda method=method: method(p), repeat, device, restore)
        restore()
        rows.append(
            {
                "method": name,
                "exact": is_exact,
                "ms": time_ms,
                "extra_mib": peak,
                "kept_too_many": num_kept - num_wanted,
                "edge_error": edge_error,
                "read_gb_s": p.num_bytes / time_ms / 1e6 if method is ours else None,
            }
        )
    return rows


def num_dropped(p: Problem, method: Callable[[Problem], list[Tensor]]) -> int:
    """How many weights a method is to drop."""
    shapes = [weight.shape for weight in p.weights]
    if method is ours_by_layer:
        return sum(round(p.sparsity * rows * inputs) for rows, inputs in shapes)
    if method is ours_by_row:
        return sum(rows * round(p.sparsity * inputs) for rows, inputs in shapes)
    shares = {ours_again: 0.75, ours_2_of_4: 0.5}
    return round(shares[method] * p.num_weights) if method in shares else p.num_drop


def check_exact(p: Problem) -> float:
    """The smallest score kept; RuntimeError unless our masks keep the right number and the largest."""
    kept, lowest, highest = 0, torch.inf, -torch.inf
    for score, mask in zip(p.scores(), ours(p), strict=True):
        keep = bits.unpack(mask, score.shape)
        kept += int(keep.sum())
        lowest = min(lowest, score[keep].min().item() if keep.any() else torch.inf)
        highest = max(highest, score[~keep].max().item() if not keep.all() else -torch.inf)
    if kept != p.num_weights - p.num_drop or lowest < highest:
        raise RuntimeError(
            f"the masks are wrong, so no speed is reported: {kept} kept from {lowest}, up to {highest} not"
        )
    return lowest


def error_of_edge(p: Problem, masks: list[Tensor], edge: float) -> float:
    """How far, relatively, the smallest score kept lies from the exact one."""
    kept = [score.view(-1)[mask.view(-1)] for score, mask in zip(p.scores(), masks, strict=True)]
    return min(part.min().item() for part in kept if len(part)) / edge - 1


def count_kept(masks: list[Tensor]) -> int:
    """Weights kept by masks of any form: packed bits, booleans or floats."""
    packed = all(len(m.shape) == 1 and m.dtype == torch.uint8 for m in masks)
    return sum(int(bits.count(mask) if packed else mask.count_nonzero()) for mask in masks)


def _nothing() -> None: ...


def _restorer(p: Problem) -> Callable[[], None]:
    saved = [
        (tensor, tensor.clone())
        for weight, state in zip(p.weights, p.moments, strict=True)
        for tensor in (weight, *state.values())
    ]

    def restore() -> None:
        for tensor, value in saved:
            tensor.copy_(value)

    return restore
