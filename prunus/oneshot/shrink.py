"""Shrink a trained model: fewer neurons, head groups, layers and experts, and the rest solved to stand in for them."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..grids import on_grids
from ..input_statistics import eagerly
from ..ranks import Ranks
from .built_twice import fewer_layers
from .calibration import Calibration
from .config_units import config_plan
from .cuts import Cuts
from .disk_offload import disk_offload_of
from .drop_experts import ExpertLayer, drop_experts_
from .drop_layers import drop_layers_
from .forward import frozen
from .journal import Folder, Journal
from .layers import matrix_layout
from .level import Level, level_of
from .loop import Loop
from .options import BlockTuning
from .plain_units import plain_plan
from .progress import Progress, progress_line
from .resources import Cost, Peak
from .samples import check_batches
from .shared_work import RankGroup, agreed, all_of, joined, silent
from .shrink_result import Mixture, ShrinkResult, ShrunkLayer, Size
from .shrink_step import Shrink, UnitScore
from .step import Change, Layers
from .unit_check import UnitCheck
from .units import Plan, Removed, UnitLayer, Wanted, Widths

MIXTURES = 3  # of depth and width that are tried, beside width alone
SHORT = BlockTuning(epochs=0, whole_epochs=4)  # of each of them
Split = Literal["even", "measured"]
Targets = Literal["own", "dense"]


def shrink(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    size: float | None = None,
    neurons: Removed = None,
    heads: Removed = None,
    layers: Removed = None,
    experts: Removed = None,
    multiple: int = 1,
    split: Split = "even",
    tune: bool | BlockTuning = False,
    targets: Targets = "own",
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    state: Folder | None = None,
    progress: Progress | bool | None = None,
    group: RankGroup = None,
) -> ShrinkResult:
    """Make ``model`` smaller in place, still an ordinary model of its class, and return what was done.

    ``size`` is the share of the blocks' weights that stays: this share of the head groups, and as many neurons as fit;
    with ``heads=0`` all heads stay. Or say what to remove: ``neurons``, ``heads`` (groups: a key and value head with
    the query heads that read it), ``layers`` and ``experts``, each as a fraction or a number; units and experts are
    counted per layer. All layers keep the same number of units, since engines read one number for all; ``multiple``
    rounds the neurons that stay down to a multiple. In convolutional networks neurons are the inner channels of a
    block.

    Structured OBS chooses the units to remove on the samples of ``batches``, block after block; the weights that read
    the remaining units are solved again to keep the outputs: those on the inputs that the shrunk model gives them
    (``targets="own"``), or those of the dense model (``"dense"``). It removes the layers whose removal changes the
    model's outputs least, and the experts that add least (REAP). With ``tune``, True or ``BlockTuning(...)``, each
    block and then the whole model learns the outputs of the dense one. ``split="measured"`` tries a few mixtures of
    depth and width for a ``size``, tunes each briefly, and keeps the one nearest to the dense model on held-out
    samples.

    Zeros of an already pruned model stay zeros in the units that stay. Frozen weights are shrunk and solved like
    the others, and stay frozen. ``batches``, ``batch_size``, ``offload``, ``state``, ``progress`` and ``group`` are
    those of ``prune``; with a group, the first rank solves for the samples of all ranks. After an exception the
    model is as before.
    """
    ranks = joined(group, locals())
    if ranks is not None and (tune or split == "measured"):
        raise ValueError("tuning runs only in one process: leave out group, or leave out tune and split='measured'")
    wanted = Wanted(size, neurons, heads, layers, experts, multiple)
    if split not in ("even", "measured"):
        raise ValueError(f"split must be even or measured, got {split!r}")
    if targets not in ("own", "dense"):
        raise ValueError(f"targets must be own or dense, got {targets!r}")
    if not isinstance(tune, bool | BlockTuning):
        raise ValueError(f"tune must be True, False or BlockTuning(...), got {tune!r}")
    if isinstance(getattr(model, "_orig_mod", model), nn.parallel.DistributedDataParallel):
        raise ValueError(
            "DistributedDataParallel would keep the old parameters; shrink the model inside it, then wrap it again"
        )
    if getattr(model, "peft_config", None):
        raise ValueError("the model has adapters; merge them first with model = model.merge_and_unload(), then shrink")
    if grids := on_grids(model):
        raise ValueError(f"{next(iter(grids))} is quantised: shrink the model first, then prune and quantize it")
    check_batches(batches)
    tuning = BlockTuning() if tune is True else tune or None
    if disk_offload_of(model):
        if tuning or wanted.layers is not None or wanted.experts is not None or split == "measured":
            raise ValueError("tune, layers, experts and split='measured' need the whole model in memory; load it first")
        if state is None:
            raise ValueError("a model on disk is shrunk block by block: give state=, a folder for finished blocks")
    read = agreed(ranks, lambda: list(batches))
    work = Shrinking(model, read, tuning, targets, batch_size, offload, state, ranks=ranks)
    with silent(ranks) as is_silent, progress_line(False if is_silent else progress, "shrink") as report:
        if split == "measured":
            return _measured(work, wanted, report)
        return work.run(wanted, report)


@dataclass
class Shrinking:
    """A model, its samples, and how it is shrunk; ``score`` and ``refit`` are for comparisons with other methods."""

    model: nn.Module
    batches: Sequence[Any]
    tuning: BlockTuning | None = None
    targets: Targets = "own"
    batch_size: int | None = None
    offload: str | torch.device | None = None
    state: Folder | None = None
    score: UnitScore | None = None
    refit: bool = True
    ranks: Ranks | None = None
    _settings: dict[str, Any] = field(default_factory=dict)  # by which a resumed run knows itself
    _undo: ExitStack = field(default_factory=ExitStack)  # what puts the model back after an exception
    _removals: list[Cuts] = field(default_factory=list)  # of layers and experts
    _progress: Progress | None = None

    def run(self, wanted: Wanted, progress: Progress | None = None) -> ShrinkResult:
        began, calibration = time.perf_counter(), self._calibration()
        before, peak = _size(calibration), Peak(calibration.device)
        self._settings = {"layers": wanted.layers, "experts": wanted.experts, "targets": self.targets}
        self._settings |= {"tuning": self.tuning, "score": self.score, "refit": self.refit}
        self._removals, self._progress = [], progress
        with ExitStack() as self._undo:
            result = self._run(calibration, wanted, before, peak)
            self._undo.pop_all()
        result.cost.seconds = time.perf_counter() - began
        result.cost.peak_bytes = max(result.cost.peak_bytes, peak.bytes())
        if self.ranks is not None:
            result.cost.same_as_(all_of(self.ranks, result.cost))
        return result

    def _run(self, calibration: Calibration, wanted: Wanted, before: Size, peak: Peak) -> ShrinkResult:
        dropped, experts, cost = None, list[ExpertLayer](), Cost()
        if wanted.layers is not None:
            with calibration.clock.part("choice of layers"):
                dropped = drop_layers_(calibration, wanted.layers, self._progress)
            calibration = self._without(dropped.cuts, calibration, cost)
        if wanted.experts is not None:
            calibration.meter.begin(self._progress, len(calibration.samples))
            with calibration.clock.part("choice of experts"):
                experts, cuts = drop_experts_(calibration, wanted.experts)
            calibration = self._without(cuts, calibration, cost)
        cost.peak_bytes = peak.bytes()  # the next part measures its own
        level, cuts, layers = Level({}, {}), Cuts(), list[ShrunkLayer]()
        if wanted.has_width:
            level, cuts, layers = self._narrow(calibration, wanted, before.weights)
        elif self.tuning is not None:
            level = self._solved(calibration, [], {})
        if self.ranks is not None:
            cost.merge_(all_of(self.ranks, cost))
        level.cost.add_(cost)
        after = _size(self._calibration())
        return ShrinkResult(level, calibration.model, layers, dropped, experts, before, after, [], self._removals, cuts)

    def _without(self, cuts: Cuts, calibration: Calibration, cost: Cost) -> Calibration:
        """The calibration of what is left, once the cost of the choice was added."""
        self._removals.append(cuts)
        self._undo.callback(cuts.undo_)
        cost.add_(replace(calibration.cost, parts=calibration.clock.seconds))
        return self._calibration()

    def _narrow(
        self, calibration: Calibration, wanted: Wanted, num_before: int
    ) -> tuple[Level, Cuts, list[ShrunkLayer]]:
        plan = plan_of(calibration)
        widths = Widths(calibration.model, plan, calibration.weights)
        left = widths.by_hand(wanted) if wanted.size is None else widths.of_size(wanted.size * num_before, wanted)
        changed = [layer for layer in plan.layers if left.get(layer.field, layer.num) < layer.num]
        numbers = plan.numbers(left)  # refuses numbers that the class does not take
        calibration = self._calibration([layer.consumer for layer in changed])
        level = self._solved(calibration, changed, left)
        gone = {layer: (~level.units[layer.consumer]).nonzero().squeeze(1) for layer in changed}
        if fault := UnitCheck.of(calibration).fault(gone, numbers):
            raise ValueError(f"{type(calibration.model).__name__} cannot be shrunk this way: {fault}")
        cuts = Cuts.of_units(calibration.model, gone, numbers)
        self._undo.callback(cuts.undo_)
        cuts.apply_()
        return level, cuts, [_shrunk(layer, level) for layer in changed]

    @torch.no_grad()
    def _solved(self, calibration: Calibration, layers: Sequence[UnitLayer], left: Mapping[str, int]) -> Level:
        """The level whose consumers read nothing of the units that go: their columns are zero, nothing is cut yet."""
        weights = {layer.consumer: calibration.weights[layer.consumer] for layer in layers}
        places = {layer.consumer: _columns(calibration, layer) for layer in layers}
        nums = {layer.consumer: layer.num - left[layer.field] for layer in layers}
        step = Shrink(places, nums, self.score, self.refit, self.targets, calibration.clock, self.ranks)
        journal, tuning = None, self.tuning
        level = level_of(weights, {}, calibration.disk)
        self._undo.callback(level.undo_)
        if disk := calibration.disk:
            self._undo.callback(setattr, disk, "stored", dict(disk.stored))
        if self.state is not None:
            own = {"left": dict(left), "samples": calibration.samples.digest()}
            journal = Journal(self.state, self._settings | own, calibration.each_weight(), "shrink", self.ranks)
        num_steps = len(weights)
        num_steps += len(calibration.blocks) * tuning.epochs + tuning.whole_epochs if tuning else 0
        loop = Loop(calibration, level, _unreached, journal=journal, dense=partial(_undone, self._removals))
        blocks = [block for cuts in self._removals for block in cuts.blocks]
        if calibration.offload is not None:
            calibration.offload.units += blocks

        def finished(names: Sequence[str]) -> None:
            calibration.meter.step(f"shrunk {names[-1]}")

        with (
            frozen(nn.ModuleList(blocks)),  # the teacher runs them too
            calibration.open(),
            calibration.measured(self._progress, num_steps) as cost,
            eagerly(),
        ):
            level.cost = cost
            calibration.check_model()
            loop.run(step, finished, tuning)
            loop.finish(True, tuning)
        return level

    def _calibration(self, include: Sequence[str] = ()) -> Calibration:
        how = {"offload": self.offload, "batch_size": self.batch_size, "ranks": self.ranks}
        return Calibration(self.model, self.batches, include=include, takes_frozen=True, **how)


@contextmanager
def _undone(removals: Sequence[Cuts]) -> Iterator[None]:
    """While this is open, the model has all its layers and experts."""
    for removal in reversed(removals):
        removal.undo_()
    try:
        yield
    finally:
        for removal in removals:
            removal.apply_()


def plan_of(calibration: Calibration) -> Plan:
    """The units of a model: from its configuration, or from how its layers follow on one another."""
    is_configured = hasattr(getattr(calibration.model, "config", None), "to_dict")
    return config_plan(calibration) if is_configured else plain_plan(calibration)


def _size(calibration: Calibration) -> Size:
    parameters, weights = list(calibration.model.parameters()), calibration.weights.values()
    num_weights = sum(weight.parameter.numel() for weight in weights)
    return Size(num_weights, sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters))


def _columns(calibration: Calibration, layer: UnitLayer) -> Tensor:
    """Columns of the consumer's matrix (out, in) that belong to each unit: of a channel, one for each place."""
    weight, slices = calibration.weights[layer.consumer], layer.slices[layer.consumer]
    shape, outputs = matrix_layout(weight)
    inner = math.prod(size for dim, size in enumerate(shape) if dim not in outputs and dim != slices.dim)
    return (slices.places[:, :, None] * inner + torch.arange(inner)).flatten(1)


def _unreached(layers: Layers) -> dict[str, Change]:
    raise ValueError(f"no sample reached {next(iter(layers.weights))}; give samples that do")


def _shrunk(layer: UnitLayer, level: Level) -> ShrunkLayer:
    kept, repair = level.units[layer.consumer].nonzero().squeeze(1).tolist(), level.repairs[layer.consumer]
    return ShrunkLayer(layer.consumer, layer.kind, layer.num, tuple(kept), repair.mask_error, repair.error)


def _measured(work: Shrinking, wanted: Wanted, progress: Progress | None) -> ShrinkResult:
    """Try mixtures of depth and width, each tuned for a short time, and keep the one nearest to the dense model."""
    if wanted.size is None or wanted.layers is not None:
        raise ValueError("split='measured' divides a size into depth and width; give size= and no layers=")
    dense = work._calibration()
    num = sum(blocks.num for blocks in fewer_layers(dense.model, dense.blocks).lists)
    most = min(num - 1, int((1 - wanted.size) * num))
    cost, depths = Cost(), sorted({round(most * part / MIXTURES) for part in range(MIXTURES + 1)})
    mixtures = []
    for depth in depths:
        trial = replace(work, tuning=SHORT, state=None).run(replace(wanted, layers=depth or None), progress)
        tuned = trial.level.tuned_whole
        trial.undo_()
        cost.add_(trial.cost)
        if tuned is None:
            raise ValueError("split='measured' tunes the whole model, but memory is too small; choose layers= yourself")
        mixtures.append(Mixture(depth, tuned.after))
    best = min(mixtures, key=lambda one: one.distance)
    result = work.run(replace(wanted, layers=best.layers or None), progress)
    result.cost.add_(cost)
    result.mixtures = mixtures
    return result
