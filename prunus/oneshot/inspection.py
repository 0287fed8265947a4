"""What may be batched and what may be skipped, found by comparing passes over two samples with passes over one.

Nothing is concluded from the names of classes: a layer whose rows are not samples, a loss that mixes samples, or a
model that reads more of its blocks than the last one's output shows itself in the numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..eligible import Weight
from .chain import Prefix
from .kinds import rebuildable, weight_of
from .memory import counted_saves, is_out_of_memory, release
from .objective import FORMS, Objective, num_tokens, shortened
from .offload import Offload, gradients
from .samples import Chunk, Group, Samples, Tree, moved, repeated, rows
from .taps import Taps

# relative: what rounding may do where a batch is run by other kernels than a sample; a mix-up is of order 1
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
# relative: two losses from the same operations
SAME = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

TF32 = 0.03  # relative: products of float32 that a GPU may round to 10 bits, as it does in convolutions unless told

TOKENS = 64  # of each sample that are looked at

Modules = Mapping[str, Sequence[nn.Module]]


@dataclass
class Findings:
    """What was found of a model and its samples."""

    batched: bool = False  # the sum of losses of two samples is that of their own losses
    form: str | None = None  # formula of the model's own loss
    chained: bool = False  # a pass may start behind any block
    quick: set[str] = field(default_factory=set)  # weights whose gradients can be rebuilt from a batch
    starts: dict[str, int] = field(default_factory=dict)  # blocks that have ended when a weight is first used
    saved_bytes: int = 0  # that one sample leaves for its backward


@dataclass
class Seen:
    """One observed pass: its loss, the blocks in the order they were called, and what the layers saw."""

    loss: Tensor
    order: list[int]
    starts: dict[str, int]
    sketches: dict[str, list[list[Tensor]]]  # for each call of a weight's layers: of input and gradient
    elsewhere: set[str]  # weights that are used other than by a call of their layers
    saved_bytes: int


def holders(model: nn.Module, weights: Sequence[Weight]) -> dict[str, list[nn.Module]]:
    """Modules that hold each weight, by name, if its gradient can be rebuilt in all of them; else none."""
    names = {weight.parameter: weight.name for weight in weights}
    found: dict[str, list[nn.Module]] = {name: [] for name in names.values()}
    doubtful = set()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if (name := names.get(parameter)) is not None:
                found[name].append(module)
                if key != "weight" or not rebuildable(module):
                    doubtful.add(name)
    return {name: [] if name in doubtful else modules for name, modules in found.items()}


def inspect(
    objective: Objective, modules: Modules, blocks: Sequence[nn.Module], samples: Samples, device: torch.device
) -> Findings:
    """What holds for these samples; a doubt makes the passes slower, never wrong.

    A few tokens of two samples are enough to see it, fewer where memory runs out.
    """
    group = next((group for group in samples.groups if group.size > 1), samples.groups[0])
    two = moved(rows(group.tree, 0, 2, group.size) if group.size > 1 else repeated(group.tree, 2, 1), device)
    whole = num_tokens(two) if objective.loss is None else 0
    length = min(whole, TOKENS) or 1
    while True:
        try:
            found = _inspected(objective, modules, blocks, shortened(two, length) if whole else two)
            found.saved_bytes *= -(-whole // length) if whole else 1
            return found
        except Exception as error:
            if not is_out_of_memory(error) or length < 4:
                raise
        length //= 2
        release(device)


def _inspected(objective: Objective, modules: Modules, blocks: Sequence[nn.Module], two: Tree) -> Findings:
    tapped = {name: held for name, held in modules.items() if held}
    alone = [_observe(objective, objective.alone, rows(two, i, i + 1, 2), tapped, blocks) for i in (0, 1)]
    dtypes = {alone[0].loss.dtype, *(p.dtype for p in objective.model.parameters() if p.is_floating_point())}
    tolerance = max([ROUNDING.get(dtype, 0.25) for dtype in dtypes] + [TF32] * _rounds_products(alone[0].loss))
    elsewhere = alone[0].elsewhere | alone[1].elsewhere
    starts = {name: min(seen.starts.get(name, start) for seen in alone) for name, start in alone[0].starts.items()}
    found = Findings(saved_bytes=max(seen.saved_bytes for seen in alone))
    found.starts = {name: start for name, start in starts.items() if name not in elsewhere}
    found.form = _form(objective, two, alone, min(tolerance, 1e-2))
    found.chained = _is_chain(objective, blocks, two, alone)
    if objective.loss is None and found.form is None:
        return found
    try:
        together = _observe(objective, lambda tree: objective.summed(tree, 2, found.form), two, tapped, blocks)
    except Exception as error:
        if not is_out_of_memory(error) or num_tokens(two) > 3:
            raise
        return found  # there is room for one sample only, and no shorter one to be had
    found.batched = _near(together.loss, alone[0].loss + alone[1].loss, tolerance)
    if found.batched:
        found.quick = {name for name in found.starts if _agree(name, together, alone, tolerance)}
    return found


def _rounds_products(loss: Tensor) -> bool:
    """Whether the products behind it may have been rounded to TF32."""
    if not loss.is_cuda:
        return False
    return bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)


def _observe(
    objective: Objective, loss: Callable[[Tree], Tensor], tree: Tree, modules: Modules, blocks: Sequence[nn.Module]
) -> Seen:
    order: list[int] = []
    starts: dict[str, int] = {}
    ended = [0]

    def end(*_: object) -> None:
        ended[0] += 1

    def begin(name: str) -> None:
        starts.setdefault(name, ended[0])

    handles = [block.register_forward_pre_hook(lambda *_, i=i: order.append(i)) for i, block in enumerate(blocks)]
    handles += [block.register_forward_hook(end) for block in blocks]
    taps = Taps(modules, 0, strict=False, on_call=begin)
    try:
        with (
            torch.enable_grad(),
            taps.open(),
            _asking(modules),
            counted_saves(objective.model, objective.offload) as saved,
        ):
            total = loss(tree)
            taps.recording = False
            asked = [call.out for call in taps.calls], [weight_of(held[0]) for held in modules.values()]
            outputs, others = _gradients(total, *asked, objective.offload)
    finally:
        for handle in handles:
            handle.remove()
    elsewhere = {name for name, gradient in zip(modules, others, strict=True) if gradient is not None}
    sketches: dict[str, list[list[Tensor]]] = {}
    for call, d in zip(taps.calls, outputs, strict=True):
        both = _sketches(call.x) + _sketches(torch.zeros_like(call.out) if d is None else d)
        sketches.setdefault(call.name, []).append(both)
    return Seen(total.detach().reshape(()), order, starts, sketches, elsewhere, sum(saved))


def _gradients(
    total: Tensor, outputs: list[Tensor], weights: list[Tensor], offload: Offload | None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of the outputs of all calls, and those that reach a weight by another way."""
    if total.numel() != 1:
        raise ValueError(f"the loss of a sample must be one number, got a tensor of shape {tuple(total.shape)}")
    if not total.requires_grad:
        return [None] * len(outputs), [None] * len(weights)
    found = gradients(offload, total.sum(), outputs + weights)
    return found[: len(outputs)], found[len(outputs) :]


@contextmanager
def _asking(modules: Modules) -> Iterator[None]:
    """The weights ask for gradients, which the taps keep from them."""
    weights = [weight_of(held[0]) for held in modules.values()]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(False)


def _sketches(x: Tensor) -> list[Tensor]:
    """Sums of absolute values over all but the first and one other dimension: (rows, length) each."""
    size = x.detach().abs().double().nan_to_num(posinf=1e300)
    dims = range(1, max(2, x.ndim))
    return [size.sum([other for other in dims if other != dim]) if x.ndim > 2 else size for dim in dims]


def _agree(name: str, together: Seen, alone: Sequence[Seen], tolerance: float) -> bool:
    """Whether each row of what a layer saw in a batch is what it saw of that sample alone."""
    calls = together.sketches.get(name, [])
    if not calls or any(len(seen.sketches.get(name, [])) != len(calls) for seen in alone):
        return False
    for number, tensors in enumerate(calls):
        for which, batch in enumerate(tensors):
            single = [seen.sketches[name][number][which] for seen in alone]
            if any(len(one) != 1 or one.shape[1:] != batch.shape[1:] for one in single) or len(batch) != 2:
                return False
            if not all(_near(batch[i], single[i][0], tolerance) for i in (0, 1)):
                return False
    return True


def _near(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    difference = (value - expected).abs().max() if value.numel() else torch.zeros(())
    return bool(difference <= tolerance * expected.abs().max()) if value.numel() else True


def _form(objective: Objective, two: Tree, alone: Sequence[Seen], tolerance: float) -> str | None:
    """The formula by which the model's own loss of a sample follows from its logits, if it is one we know."""
    if objective.loss is not None:
        return None
    for form in FORMS:
        try:
            with torch.no_grad():
                found = [objective.summed(rows(two, i, i + 1, 2), 1, form) for i in (0, 1)]
        except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
            continue
        if all(_near(value, seen.loss, tolerance) for value, seen in zip(found, alone, strict=True)):
            return form
    return None


def _is_chain(objective: Objective, blocks: Sequence[nn.Module], two: Tree, alone: Sequence[Seen]) -> bool:
    """Whether passes that start in the middle and at the end of the blocks give the losses of whole passes."""
    if len(blocks) < 2 or any(seen.order != list(range(len(blocks))) for seen in alone):
        return False
    samples = Samples([Group(rows(two, i, i + 1, 2), 1) for i in (0, 1)])
    try:
        return _skips_well(objective, Prefix(blocks, samples), alone, SAME.get(alone[0].loss.dtype, 1e-2))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
        return False  # the model does more with its blocks than hand a state from one to the next


def _skips_well(objective: Objective, prefix: Prefix, alone: Sequence[Seen], tolerance: float) -> bool:
    samples, num = prefix.samples, len(prefix.blocks)
    for number, seen in enumerate(alone):
        chunk = Chunk(number, 0, 1)
        for k in (num // 2, num):
            prefix.ensure(k, lambda chunk: objective.alone(samples.tree(chunk)), 1)
            with torch.no_grad(), prefix.skipping(k, chunk):
                if not _near(objective.alone(samples.tree(chunk)), seen.loss, tolerance):
                    return False
    return True
