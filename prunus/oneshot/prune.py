"""Prune a trained model: a score or the solver chooses weights, a probe may keep some, a repair changes the others."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..allocate import clipped
from ..eligible import warn_if_much_stays_dense
from ..input_statistics import eagerly
from ..ops import bits
from ..ranks import Ranks
from ..select import Global, Quota, Selector, Shape
from .calibration import Calibration, Patterns
from .journal import Folder, Journal
from .level import Level, level_of
from .loop import Loop
from .model_folder import changed_folder
from .options import Method, Repair, ScoreLike
from .probe.objective import Loss
from .probe.prober import Finished, Probe, Probed, Prober
from .progress import Progress, progress_line
from .quantize import check_finite, checked_grid, quantize_level_, without_grid
from .quantizer import Nearest, Quantize
from .result import Result
from .samples import digest
from .scoring import Packed, Scores
from .shared_work import RankGroup, joined, same, silent
from .step import Choose, keep_all_but
from .steps import Mask, Solve


def prune(
    model: nn.Module | str | os.PathLike[str],
    batches: Iterable[Any] = (),
    sparsity: float | None = None,
    *,
    score: ScoreLike | None = None,
    select: Selector | None = None,
    bits: int | None = None,
    probe: Probe | None = None,
    loss: Loss | None = None,
    repair: Repair | Literal["auto"] | None = "auto",
    moments: Mapping[str, Tensor] | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    only: Patterns = (),
    batch_size: int | None = None,
    offload: str | torch.device | None = None,
    checkpointing: bool = False,
    memory: int | None = None,
    state: Folder | None = None,
    out: Folder | None = None,
    progress: Progress | bool | None = None,
    group: RankGroup = None,
    **moved: object,
) -> Result:
    """Prune ``model`` in place to ``sparsity`` of its prunable weights, and return what was done.

    With batches, the weights that stay are also repaired: solved for, block after block, so that each layer's outputs
    stay close to the dense model's. Without a ``score`` the solver also chooses which weights stay; with one, the score
    chooses, and ``repair=None`` prunes by the score alone. Without batches nothing is repaired, and the score is
    magnitude by default.

    ``sparsity`` is a half by default, or that of ``NofM``. It counts all zeros, and weights that are zero already go
    first. If the model, or a row where rows are compared one by one, has more zeros than that, none comes back.

    ``batches`` are tensors, pairs (input, target) or dicts, read once; a sample is one index of dimension 0, and
    its loss is that of a batch of one. ``score`` is ``magnitude``, ``|w|``; ``wanda``, ``|w|`` times the norm of the
    input; ``fisher``, ``w^2`` times the mean squared gradient; ``path``, ``|w| (G0 + G1)``: the largest gradient of any
    sample, G0 in the dense model, G1 with the weights that magnitude would prune scaled to a tenth; ``random``; or a
    function of ``weight``, ``input_norm`` or ``position``. Fisher and path need a loss: Hugging Face models have their
    own, others need ``loss(output, target)`` and targets. ``include`` adds to the weights that are pruned by default,
    ``only`` restricts them, and ``exclude`` wins. ``select`` defaults to ``PerLayer`` where the solver chooses,
    ``PerRow`` for wanda and ``Global`` for other scores. ``PerLayer("moments")`` reads ``moments``: by name, Adam's
    ``exp_avg_sq`` of each weight.

    ``bits`` (8, 4 or 3) also quantises the weights that stay, each layer after it is solved and before the next one;
    with tuning, after it. ``quantize`` says how, and quantises a model that is already sparse.

    A probe keeps some of the weights that the score would prune, so the sparsity ends lower than requested, unless its
    tau is ``target``; with a probe, nothing is repaired unless you pass ``repair``. With ``offload``, a device, blocks
    move there one at a time and everything else for the whole call; the masks are the same. With
    ``checkpointing``, blocks after the probed one run again in the backward pass instead of keeping their
    activations; this also happens if a single sample does not fit. With ``state``, a folder, a repair that was killed
    continues when you repeat the call with the same dense model, and ends with the same bits. ``memory`` limits
    the bytes of main memory for activations; the rest goes to a file, in ``state`` if it is given.

    ``progress`` is a bar in a terminal or notebook, and elsewhere a line on standard error for every tenth of a call
    that takes more than a few seconds; False shows nothing. If it is a function, it is called with the steps done, the
    steps in all, and what is being done.

    If ``model`` is the path of a Hugging Face folder, the model may be larger than memory: one block at a time is read,
    pruned and stored beside ``out``, a new folder. If the call is killed, repeat it to continue. Zeros and values are
    the same as in memory, but ``undo_`` cannot restore the model.

    ``group``, a process group of ``torch.distributed`` or True for all ranks, divides the work: every rank of it makes
    the same call with the same model and batches, runs a share of the samples, solves a share of the rows, and ends
    with the same weights. By default this process works alone, whatever groups exist. Only the first rank shows
    progress, warns and uses ``state``. For a score, every rank reads all samples; a probe and tuning are refused. Sums
    run in another order, so the last bits depend on the number of ranks.

    The model keeps its mode and its buffers, except for the statistics of batch norms, which a repair updates; after an
    exception it has its old weights too.
    """
    ranks = joined(group, locals())
    _refuse(moved)
    if ranks is not None and (probe is not None or (isinstance(repair, Repair) and repair.tune)):
        raise ValueError("a probe and tuning run only in one process: leave out group, or prune without them")
    if sparsity is None:
        sparsity = getattr(select, "sparsity", None) or 0.5
    grid = None if bits is None else checked_grid(bits)
    if grid and probe:
        raise ValueError("a probe and bits cannot be combined in one call: prune, then call quantize(model, batches)")
    more = {"loss": loss, "checkpointing": checkpointing, "moments": moments or {}, "grid": grid}
    method = Method.of(batches, score, select, probe, repair, **more)
    how: dict[str, Any] = {"include": include, "exclude": exclude, "only": only, "offload": offload, "memory": memory}
    with silent(ranks) as is_silent, _module(model, state, out, ranks, small=grid is not None) as (module, state):
        how |= {"batch_size": batch_size, "ranks": ranks, "scratch": state and Path(state)}
        calibration = Calibration(module, batches, **how)
        warn_if_much_stays_dense(calibration.model, calibration.eligible)
        with calibration.open(), progress_line(False if is_silent else progress, "prune") as report:
            level = prune_to(Scores(calibration, method), sparsity, probe, state=state, progress=report)
    return Result(level, calibration.model)


@contextmanager
def _module(
    model: nn.Module | Folder, state: Folder | None, out: Folder | None, ranks: Ranks | None, *, small: bool
) -> Iterator[tuple[nn.Module, Folder | None]]:
    """The model to prune, and the folder for what is done; that of a folder is written to ``out`` at the end."""
    if not isinstance(model, str | os.PathLike):
        if out is not None:
            raise ValueError("out= works only with a folder as the model; save a module with save_model")
        yield model, state
        return
    if state is not None:
        raise ValueError("progress on a folder is kept beside out: leave out state=")
    with changed_folder(model, out, ranks, small=small) as (module, unfinished):
        yield module, unfinished


def prune_to(
    scores: Scores,
    sparsity: float,
    probe: Probe | None = None,
    *,
    within: Packed | None = None,
    masks: Packed | None = None,
    done: Probed | None = None,
    state: Folder | None = None,
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> Level:
    """Prune an open model to one sparsity; on an exception the weights are as before.

    ``within`` are packed masks of an earlier level, ``masks`` those that this level chose before, and ``done`` what its
    probe decided before. ``finished`` is called with the probe's decisions after each of its groups.
    """
    if not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be a number in [0, 1), such as 0.5, got {sparsity!r}")
    calibration, method = scores.calibration, scores.method
    _check_disk(scores, probe, state)
    level = level_of(scores.weights, scores.live(within or {}), calibration.disk)
    try:
        with calibration.measured(progress, _num_steps(scores, probe)) as cost, torch.no_grad(), eagerly():
            level.cost = cost
            if method.repair or probe or scores.num_passes:
                calibration.check_model()
            if method.repair or method.grid:
                level.leave_grids_(calibration.model)
            with calibration.clock.part("scores"):
                select = _selector(scores, sparsity, level.live)
                if select is not method.select:
                    select = same(calibration.ranks, select)
            if probe is not None:
                masks = _probe(scores, level, select, sparsity, probe, done, finished)
            elif masks is None and method.score is not None:
                with calibration.clock.part("scores"):
                    masks = same(calibration.ranks, scores.keep(select, sparsity, level.live))
            if probe is None or method.repair is not None:
                _change(scores, level, select, sparsity, masks, state)
                if probe is not None:
                    level.repair_again = lambda: _change(scores, level, select, sparsity, level.packed, None)
    except BaseException:
        if calibration.offload is not None:
            calibration.offload.unload()
        level.undo_()
        scores.changed()
        raise
    return level


def _check_disk(scores: Scores, probe: Probe | None, state: Folder | None) -> None:
    """Refuse what takes a whole model in memory."""
    if scores.calibration.disk is None:
        return
    method = scores.method
    tuning = method.repair.tuning if method.repair else None
    for what, is_asked in {
        "a probe": probe is not None,
        "the score fisher": method.score == "fisher",
        "the score path": method.score == "path",
        "allocate='fisher'": method.allocate == "fisher",
        "allocate='moments'": method.allocate == "moments",
        "the tuning of the whole model": bool(tuning and tuning.whole_epochs),
    }.items():
        if is_asked:
            raise ValueError(f"{what} needs the whole model in memory; load it, and prune the module")
    if scores.calibration.ranks is not None and method.grid and not method.repair:
        raise ValueError("ranks can quantise a model on disk only with a repair: repair it, or leave out group")
    if state is None:
        raise ValueError("a model on disk is pruned block by block: give state=, a folder for finished blocks")


def _num_steps(scores: Scores, probe: Probe | None) -> int:
    """Steps of a level's progress: weights, samples that its score reads, and epochs of tuning."""
    num, repair = len(scores.weights), scores.method.repair
    if num_passes := scores.num_passes + 2 * (probe is not None and probe.schedule == "joint"):
        num += num_passes * len(scores.calibration.samples)
    if scores.method.grid and not (repair and not repair.tuning):
        num += len(scores.weights)
    if repair is None:
        return num
    tuning = repair.tuning
    tuned = len(scores.calibration.blocks) * tuning.epochs + tuning.whole_epochs if tuning else 0
    return num + tuned + (len(scores.weights) if probe is not None else 0)


def _probe(
    scores: Scores,
    level: Level,
    select: Selector,
    sparsity: float,
    probe: Probe,
    done: Probed | None,
    finished: Finished | None,
) -> dict[str, Tensor]:
    """Packed masks of a probe. They prune the model, unless it will be repaired: then it is dense again."""
    calibration, live, pool = scores.calibration, level.live, probe.pool_sparsity(sparsity)
    with calibration.clock.part("scores"):
        keep = scores.keep(select, pool, live)
        exact = scores.keep(select, sparsity, live) if pool != sparsity else keep
    level.candidates = {name: live[name] & ~keep[name] for name in scores.weights}
    num_prune = {name: int(bits.count(live[name] & ~exact[name])) for name in scores.weights}
    prober = Prober(scores.engine(), probe, level.candidates, num_prune, level.originals)
    if done is not None and done.pruned:
        prober.resume(done)
        calibration.meter.step("what was done before", len(done.pruned))

    def on_group(names: Sequence[str], probed: Probed) -> None:
        if finished is not None:
            finished(names, probed)
        calibration.meter.step(f"probed {names[-1]}", len(names))

    with calibration.clock.part("records"):
        probed = prober.run(on_group, list(done.pruned) if done else [])
    level.ratios, level.taus = probed.ratios, probed.taus
    level.packed = {name: live[name] & ~probed.pruned[name] for name in scores.weights}
    if scores.method.repair is not None:
        level.originals.restore_()
    return level.packed


def _selector(scores: Scores, sparsity: float, live: Packed) -> Selector:
    """The selector of the method; for allocate="fisher" and "moments" one by layer, with the counts of a global one."""
    method = scores.method
    if method.allocate not in ("fisher", "moments"):
        return method.select
    masks = Global().packed(scores.allocating(), sparsity, live)
    sizes = [weight.parameter.numel() for weight in scores.weights.values()]
    wish, gone = ([scores.num_pruned(name, packed) for name in scores.weights] for packed in (masks, live))
    return Counted(dict(zip(scores.weights, clipped(wish, sizes, sparsity, gone), strict=True)))


def _refuse(moved: Mapping[str, object]) -> None:
    if "experts" in moved:
        raise ValueError(
            f"prune no longer drops experts: call shrink(model, batches, experts={moved['experts']!r}), then prune "
            "what stays"
        )
    if moved:
        raise TypeError(f"prune() got an unexpected keyword argument {next(iter(moved))!r}")


@dataclass(frozen=True)
class Counted(Selector):
    """By layer, with numbers that are known."""

    num_drop: Mapping[str, int]
    group = "layer"

    def quota(
        self, shapes: Sequence[Shape], sparsity: float, num_pruned: Mapping[str, int] | None = None
    ) -> list[Quota]:
        return [Quota((shape.name,), shape.numel, self.num_drop[shape.name]) for shape in shapes]


def _allocation(
    scores: Scores, select: Selector, sparsity: float, live: Packed
) -> tuple[Choose | None, Mapping[str, int]]:
    """What the solver chooses by, and how many of each layer go where only these numbers matter."""
    if select.group == "all":
        masks = scores.keep(select, sparsity, live)
        num_drop = {name: scores.num_pruned(name, masks) for name in scores.weights}
    else:
        gone = {name: scores.num_pruned(name, live) for name in scores.weights}
        quotas = select.quota(scores.shapes(), sparsity, gone)
        if select.group != "layer":
            return lambda scores, live: select(scores, sparsity, live), {}
        num_drop = {quota.names[0]: quota.num_drop for quota in quotas}
    return keep_all_but(num_drop), num_drop


def _change(
    scores: Scores, level: Level, select: Selector, sparsity: float, masks: Packed | None, state: Folder | None
) -> None:
    """Run the loop over the dense model, by known masks, or by those that its steps choose within the allocation."""
    calibration, repair = scores.calibration, scores.method.repair
    choose, num_drop = _allocation(scores, select, sparsity, level.live) if masks is None else (None, {})
    level.packed, level.repairs, level.tuned, level.not_tuned = {}, {}, {}, []
    journal = None
    if (repair is not None or calibration.disk) and state is not None:
        settings: dict[str, Any] = {"sparsity": sparsity}
        settings |= {"samples": calibration.samples.digest()} if calibration.has_batches else {}
        settings |= scores.method.settings(scores.weights)
        settings |= {"masks of the probe": digest(dict(masks))} if masks and level.candidates else {}
        weights = scores.fingerprint or calibration.each_weight()
        journal = Journal(state, settings, weights, ranks=calibration.ranks)

    def finished(names: Sequence[str]) -> None:
        calibration.meter.step(f"{'repaired' if repair else 'pruned'} {names[-1]}", len(names))

    mask, solve, grid = Mask(choose), None, scores.method.grid
    if repair is not None:
        solve = Solve(repair, choose, num_drop, calibration.clock, calibration.ranks)
    is_at_once = grid and repair and not repair.tuning  # what is tuned leaves its grid
    if is_at_once:
        skipped = without_grid(scores.weights)
        mask = Nearest(grid, skipped, mask)
        solve = Quantize(grid, solve, skipped, calibration.clock, calibration.ranks)
    loop = Loop(calibration, level, mask, masks=masks, journal=journal)
    with nullcontext() if calibration.is_open else calibration.open(), eagerly():
        if grid:
            check_finite(calibration)
        loop.run(solve, finished, None if repair is None else repair.tuning)
        if repair is not None:
            loop.finish(repair.batch_norm, repair.tuning)
        if grid and not is_at_once:
            quantize_level_(calibration, level, grid, state=None if state is None else Path(state) / "bits")
    scores.changed()
