"""What shrinking is worth: smaller models made by several ways, on held-out data, and after learning.

Every way removes as much from the same model with the same calibration samples, over several draws of them. A record
is on disk after every figure, and records of one model become one table of ``shrink.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from prunus import BlockTuning
from prunus.lab.models import Basic, PadShortcut
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.cuts import Cuts
from prunus.oneshot.forward import frozen, outputs
from prunus.oneshot.shrink import Shrinking, Split, Targets, plan_of, shrink
from prunus.oneshot.shrink_result import ShrinkResult
from prunus.oneshot.shrink_step import UNIT_SCORES, RandomScore
from prunus.oneshot.units import Wanted, Widths
from prunus.trained.data import tokenizer_of

from .benchmark import Row
from .clocks import timed
from .study import Learning, LearningStudy, SeedCase, share_of

WHAT = "shrink quality"
RECOVERED = "-recover"  # behind the name of a way: its model has learned
TORCH_PRUNING = "torch-pruning"
PROMPTS = (
    "The city was founded in the twelfth century and",
    "Photosynthesis is the process by which",
    "Once the war had ended , the general returned to",
)
NEW_TOKENS = 60
FEW = 2  # images that are enough to count multiplications


@dataclass(frozen=True)
class ShrinkWay:
    """How a model is made smaller; ``score`` chooses the units in place of OBS."""

    title: str
    score: str | None = None
    refit: bool = True
    targets: Targets = "own"
    tunes: bool = False
    split: Split = "even"
    depth: bool = False  # whole layers go


SCORES = {"random": "random", "norm": "norm", "wanda": "WANDA, summed", "flap": "FLAP"}
WAYS: dict[str, ShrinkWay] = {
    **{score: ShrinkWay(title, score, refit=False) for score, title in SCORES.items()},
    TORCH_PRUNING: ShrinkWay("Torch-Pruning, norm"),
    "layers": ShrinkWay("layers dropped", depth=True),
    **{f"{score}-refit": ShrinkWay(f"{title}, our refit", score) for score, title in SCORES.items()},
    "obs": ShrinkWay("OBS, old values", refit=False),
    "dense-targets": ShrinkWay("OBS, refit on dense targets", targets="dense"),
    "solved": ShrinkWay("**shrink**"),
    "tuned": ShrinkWay("**shrink, tuned**", tunes=True),
    "layers-tuned": ShrinkWay("layers dropped, tuned", tunes=True, depth=True),
    "measured": ShrinkWay("**shrink, split measured, tuned**", tunes=True, split="measured"),
}
PEERS = (*SCORES, TORCH_PRUNING, "layers")  # what others do
WayName = Literal[tuple(WAYS)]  # pyrefly: ignore[invalid-literal]


def title_of(way: str) -> str:
    base = way.removesuffix(RECOVERED)
    title = WAYS[base].title if base in WAYS else base
    return title if way == base else f"{title}, recovered"


@dataclass(frozen=True, kw_only=True)
class ShrinkQuality(LearningStudy):
    """Make a trained model smaller by several ways, let some learn, and evaluate each, over several seeds.

    The record is written after every figure, and the same command continues it. Torch-Pruning is left out where it is
    not installed.
    """

    what: ClassVar[str] = WHAT

    ways: tuple[WayName, ...] = ("solved", "tuned")  # how models are made smaller
    recover: tuple[WayName, ...] = ()  # which of them learn afterwards
    levels: tuple[str, ...] = ("25", "50")  # what is removed: percent, or a share as 1/3
    of: Literal["weights", "multiplications"] = "weights"  # of the blocks
    texts: bool = False  # write texts with the dense model and with those that have learned

    def runs(self) -> dict[tuple[str, str], list[Learning]]:
        return {
            (way, level): [Learning(f"{way}{RECOVERED}", level, num) for num in self.steps if way in self.recover]
            for level in self.levels
            for way in (*self.ways, *self.recover)
        }

    def rows(self, case: SeedCase, start: str, level: str, runs: Sequence[Learning]) -> Iterator[Row]:
        trained, model = case.trained, case.trained.model
        if start == TORCH_PRUNING and not find_spec("torch_pruning"):
            print(f"{start}: left out, since the package torch-pruning is not installed", flush=True)
            return
        with smaller(self, case, start, level) as sizes:
            row = case.evaluated(trained, start, level)
            yield row | sizes | (self._texts(model) if not level else {})
            stay = {name: value for name, value in sizes.items() if name in SIZES} | {"before_value": row["value"]}
            for run in runs:
                with case.recovered(model, run) as recovery:
                    yield recovery.figures() | case.evaluated(trained, *run) | stay | self._texts(model)

    def count(self, row: Row) -> str:
        return f"{row['parameters']:,} parameters" if "parameters" in row else "dense"

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"of": self.of}

    def _texts(self, model: nn.Module) -> Row:
        if not self.texts:
            return {}
        tokenizer = tokenizer_of(self.model, self.gguf_file)
        if tokenizer is None:
            raise ValueError(f"{self.model} has no tokenizer to write texts with; leave out --texts")
        return {"texts": [continued(model, tokenizer, prompt) for prompt in PROMPTS]}


@torch.no_grad()
def continued(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    end = model.generation_config.eos_token_id
    pad = end[0] if isinstance(end, list) else end
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    written = model.generate(ids, pad_token_id=pad or 0, **options)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


# How a model is made smaller

# of a row, which learning leaves
SIZES = ("weights", "weights_before", "parameters", "num_bytes", "multiplications", "removed")


@contextmanager
def smaller(options: ShrinkQuality, case: SeedCase, name: str, level: str) -> Iterator[Row]:
    """The model is smaller inside; what it is like, and what that took."""
    model, first, device = case.trained.model, case.trained.batches[0], torch.device(options.device)
    is_images = isinstance(first, tuple) and first[0].is_floating_point()
    images = first[0][:FEW].to(device) if is_images else None
    row, undo = {"seconds": 0.0}, lambda: None
    if name == TORCH_PRUNING:
        assert images is not None
        seconds, undo = timed(lambda: torch_pruned_(model, images, share_of(level)), device)
        row = {"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds}
        row |= {"torch_pruning": metadata.version("torch-pruning")}
    elif name != "dense":
        wanted = wanted_of(options, model, name, level, images)
        seconds, result = timed(lambda: shrunk(case, WAYS[name], wanted), device)
        undo, row = result.undo_, row_of(result) | {"seconds": seconds}
    try:
        yield row | ({} if images is None else {"multiplications": multiplications(model, images[:1])})
    finally:
        undo()


def wanted_of(options: ShrinkQuality, model: nn.Module, name: str, level: str, images: Tensor | None) -> Wanted:
    share, way = float(share_of(level)), WAYS[name]
    if way.depth:
        return Wanted(layers=share)
    if way.split == "measured" or options.of == "weights":
        return Wanted(size=1 - share)
    if images is None:
        raise ValueError("--of multiplications is for models that read images")
    return Wanted(neurons=neurons_for(model, images, share_of(level)))


def shrunk(case: SeedCase, way: ShrinkWay, wanted: Wanted) -> ShrinkResult:
    model, batches = case.trained.model, case.trained.batches
    if way.split == "measured":
        return shrink(model, batches, size=wanted.size, split=way.split, tune=way.tunes, progress=False)
    score = None if way.score is None else UNIT_SCORES[way.score]
    if isinstance(score, RandomScore):
        score = RandomScore(case.seed)
    tuning = BlockTuning() if way.tunes else None
    return Shrinking(model, batches, tuning, way.targets, score=score, refit=way.refit).run(wanted)


def row_of(result: ShrinkResult) -> Row:
    sizes = {"weights": result.after.weights, "weights_before": result.before.weights}
    sizes |= {"parameters": result.after.parameters, "num_bytes": result.after.num_bytes, "removed": result.removed}
    cost = {"parts": dict(result.cost.parts), "peak_bytes": result.cost.peak_bytes, "notes": result.notes}
    mixtures = {"mixtures": [[one.layers, one.distance] for one in result.mixtures]} if result.mixtures else {}
    return sizes | cost | mixtures


def left_alone(model: nn.Module) -> list[nn.Module]:
    """Layers whose outputs stay: classes, and all but inner ones where shortcuts pad, which it cannot follow."""
    inner = {block.conv1 for block in model.modules() if isinstance(block, Basic)}
    kinds = nn.Linear, *[nn.Conv2d for module in model.modules() if isinstance(module, PadShortcut)]
    return [module for module in model.modules() if isinstance(module, kinds) and module not in inner]


def torch_pruned_(model: nn.Module, images: Tensor, removed: Fraction) -> Callable[[], None]:
    """Remove channels by Torch-Pruning, as its page shows; returns what brings the dense model back."""
    import torch_pruning

    def prune_(model: nn.Module, thousandths: int) -> nn.Module:
        torch_pruning.pruner.MagnitudePruner(
            model,
            images[:1],
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=thousandths / 1000,
            ignored_layers=left_alone(model),
        ).step()
        return model

    @cache
    def left(thousandths: int) -> int:
        return multiplications(prune_(deepcopy(model), thousandths), images[:1])

    dense = deepcopy(model)
    prune_(model, smallest_share(left, multiplications(model, images[:1]), removed))
    return lambda: vars(model).update(vars(dense))


@torch.no_grad()
def multiplications(model: nn.Module, sample: Any) -> int:
    """Multiplications of convolutions and matrix products for a batch of one sample; biases and norms aside.

    A convolution multiplies its whole kernel at each place of its output, beyond the edges of the image too.
    """
    with frozen(model), FlopCounterMode(display=False) as counter:
        outputs(model, sample)
    return counter.get_total_flops() // 2  # which counts additions too


def neurons_for(model: nn.Module, images: Tensor, removed: Fraction) -> float:
    """The smallest share of inner channels without which the model has that share of multiplications less."""
    calibration = Calibration(model, [images])
    plan = plan_of(calibration)
    widths = Widths(model, plan, calibration.weights)

    @cache
    def left(thousandths: int) -> int:
        stay = widths.by_hand(Wanted(neurons=thousandths / 1000))
        gone = {layer: torch.arange(stay[layer.field], layer.num) for layer in plan.layers if layer.field in stay}
        cuts = Cuts.of_units(model, gone, plan.numbers(stay))  # how many go counts, not which
        try:
            cuts.apply_()
            return multiplications(model, images[:1])
        finally:
            cuts.undo_()

    return smallest_share(left, multiplications(model, images[:1]), removed) / 1000


def smallest_share(left: Callable[[int], int], dense: int, removed: Fraction) -> int:
    """The smallest of 1 to 999 thousandths with which at most ``1 - removed`` of ``dense`` is left."""
    low, high = 1, 999
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if left(middle) <= (1 - removed) * dense else (middle + 1, high)
    if left(low) > (1 - removed) * dense:
        raise ValueError(f"without {low / 1000:.1%} of the units, {left(low) / dense:.1%} of the products are left")
    return low
