"""What may be batched and what may be skipped, found by comparing a pass over two samples with passes over each.

No conclusion rests on class names: a layer whose rows are not samples, a loss that mixes samples, or a model that
reads other outputs of its blocks than the last shows in the numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..blocks import Stream, is_chain, is_near, seen_calls
from ..calibration import Calibration
from ..forward import requiring_grad
from ..layers import weight_of
from ..offload import counted_saves, gradients
from ..resources import FAILURES, is_out_of_memory, release
from ..samples import Chunk, Samples, Stack, Tree, moved, num_tokens, repeated, rows, shortened
from .objective import FORMS, Objective
from .taps import Taps

# relative: rounding where a batch is run by other kernels than a single sample; a real difference is of order 1
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
TF32 = 0.03  # relative: float32 products that a GPU may round to 10 bits, as it does in convolutions by default

TOKENS = 64  # of each sample that are run

Modules = Mapping[str, Sequence[nn.Module]]


@dataclass
class Findings:
    batched: bool = False  # the loss of two samples in one pass is the sum of their own losses
    form: str | None = None  # formula of the model's own loss
    chained: bool = False  # a pass may start after any block
    quick: set[str] = field(default_factory=set)  # weights whose gradients can be rebuilt from a batch
    starts: dict[str, int] = field(default_factory=dict)  # blocks that have ended when a weight is first used
    saved_bytes: int = 0  # that one sample saves for its backward


@dataclass
class Seen:
    """One observed pass: its loss, the order in which blocks were called, and what the layers saw."""

    loss: Tensor
    order: list[int]
    starts: dict[str, int]
    sketches: dict[str, list[list[Tensor]]]  # for each call of a weight's layers: of input and gradient
    elsewhere: set[str]  # weights that are also used outside the calls of their layers
    saved_bytes: int


def inspect(calibration: Calibration, objective: Objective, modules: Modules) -> Findings:
    """What holds for these samples, by two of them, cut to a few tokens; a doubt makes passes slower, never wrong."""
    stacks = calibration.samples.stacks
    stack = next((stack for stack in stacks if stack.size > 1), stacks[0])
    two = rows(stack.tree, slice(2), stack.size) if stack.size > 1 else repeated(stack.tree, 2, 1)
    two = moved(two, calibration.device)
    whole = num_tokens(two) if objective.loss is None else 0
    length = min(whole, TOKENS) or 1
    while True:
        try:
            findings = _inspected(calibration, objective, modules, shortened(two, length) if whole else two)
            findings.saved_bytes *= -(-whole // length) if whole else 1
            return findings
        except Exception as error:
            if not is_out_of_memory(error) or length < 4:
                raise
        length //= 2
        release(calibration.device)


def _inspected(calibration: Calibration, objective: Objective, modules: Modules, two: Tree) -> Findings:
    tapped = {name: holding for name, holding in modules.items() if holding}
    alone = [_observe(calibration, objective.alone, rows(two, slice(i, i + 1), 2), tapped) for i in (0, 1)]
    dtypes = {alone[0].loss.dtype, *(p.dtype for p in objective.model.parameters() if p.is_floating_point())}
    tolerance = max(ROUNDING.get(dtype, 0.25) for dtype in dtypes)
    if alone[0].loss.is_cuda and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        tolerance = max(tolerance, TF32)
    elsewhere = alone[0].elsewhere | alone[1].elsewhere
    starts = {name: min(seen.starts.get(name, start) for seen in alone) for name, start in alone[0].starts.items()}
    findings = Findings(saved_bytes=max(seen.saved_bytes for seen in alone))
    findings.starts = {name: start for name, start in starts.items() if name not in elsewhere}
    findings.form = _form(objective, two, alone, min(tolerance, 1e-2))
    findings.chained = _is_chained(calibration.blocks, objective, two, alone)
    if objective.loss is None and findings.form is None:
        return findings
    try:
        together = _observe(calibration, lambda tree: objective.summed(tree, 2, findings.form), two, tapped)
    except Exception as error:
        if not is_out_of_memory(error) or num_tokens(two) > 3:
            raise
        return findings  # memory holds one sample only, and it cannot be shortened
    findings.batched = is_near(together.loss, alone[0].loss + alone[1].loss, tolerance)
    if findings.batched:
        findings.quick = {name for name in findings.starts if _agree(name, together, alone, tolerance)}
    return findings


def _observe(calibration: Calibration, loss: Callable[[Tree], Tensor], tree: Tree, modules: Modules) -> Seen:
    starts: dict[str, int] = {}
    weights = [weight_of(holding[0]) for holding in modules.values()]
    with (
        torch.enable_grad(),
        seen_calls(calibration.blocks) as (called, ended),
        Taps(modules, 0, strict=False, on_call=lambda name: starts.setdefault(name, len(ended))).open() as taps,
        requiring_grad(weights),  # taps detach them, so that a gradient is of another use
        counted_saves(calibration.model, calibration.offload) as saved,
    ):
        total = loss(tree)
        taps.recording = False
        if total.numel() != 1:
            raise ValueError(f"the loss of a sample must be one number, got a tensor of shape {tuple(total.shape)}")
        inputs = [*(call.out for call in taps.calls), *weights]
        found: list[Tensor | None] = [None] * len(inputs)
        if total.requires_grad:
            found = gradients(calibration.offload, total.sum(), inputs)
        outputs, others = found[: len(taps.calls)], found[len(taps.calls) :]
    elsewhere = {name for name, gradient in zip(modules, others, strict=True) if gradient is not None}
    sketches: dict[str, list[list[Tensor]]] = {}
    for call, d in zip(taps.calls, outputs, strict=True):
        both = _sketches(call.x) + _sketches(torch.zeros_like(call.out) if d is None else d)
        sketches.setdefault(call.name, []).append(both)
    return Seen(total.detach().reshape(()), called, starts, sketches, elsewhere, sum(saved))


def _sketches(x: Tensor) -> list[Tensor]:
    """Sums of absolute values over all but the first and one other dimension: (rows, length) each."""
    size = x.detach().abs().double().nan_to_num(posinf=1e300)
    dims = range(1, max(2, x.ndim))
    return [size.sum([other for other in dims if other != dim]) if x.ndim > 2 else size for dim in dims]


def _agree(name: str, together: Seen, alone: Sequence[Seen], tolerance: float) -> bool:
    """Whether each row that a layer saw in the batch is what it saw of that sample alone."""
    calls = together.sketches.get(name, [])
    if not calls or any(len(seen.sketches.get(name, [])) != len(calls) for seen in alone):
        return False
    for number, tensors in enumerate(calls):
        for which, batch in enumerate(tensors):
            single = [seen.sketches[name][number][which] for seen in alone]
            if any(len(one) != 1 or one.shape[1:] != batch.shape[1:] for one in single) or len(batch) != 2:
                return False
            if not all(is_near(batch[i], single[i][0], tolerance) for i in (0, 1)):
                return False
    return True


def _form(objective: Objective, two: Tree, alone: Sequence[Seen], tolerance: float) -> str | None:
    """The formula of FORMS by which the model's own loss follows from its logits, if one does."""
    if objective.loss is not None:
        return None
    for form in FORMS:
        try:
            with torch.no_grad():
                losses = [objective.summed(rows(two, slice(i, i + 1), 2), 1, form) for i in (0, 1)]
        except FAILURES:
            continue
        if all(is_near(value, seen.loss, tolerance) for value, seen in zip(losses, alone, strict=True)):
            return form
    return None


def _is_chained(blocks: Sequence[nn.Module], objective: Objective, two: Tree, alone: Sequence[Seen]) -> bool:
    """Whether passes that start at any block give the losses of whole passes."""
    if len(blocks) < 2 or any(seen.order != list(range(len(blocks))) for seen in alone):
        return False
    samples = Samples([Stack(rows(two, slice(i, i + 1), 2), 1) for i in (0, 1)])

    def loss(chunk: Chunk) -> Tensor:
        return objective.alone(samples.tree(chunk))

    return is_chain(Stream(blocks, samples), loss, [seen.loss for seen in alone])
