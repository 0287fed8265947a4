"""The work of ``prunus prune``: prunes, compares and writes; ``--dry-run`` says what that will take."""

import tempfile
import time
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import torch

from ..grids import on_grids
from ..lab.parallel import Team
from ..lab.tracking import sampled, utilisation_reader
from ..lab.trained_run import from_checkpoint
from ..oneshot import Probe, Repair, prune
from ..oneshot.calibration import Calibration
from ..oneshot.disk_offload import LIMITS, disk_offload_of
from ..oneshot.model_folder import FirstBlock, FirstBlockDone, in_units, needs_of
from ..oneshot.originals import Originals
from ..oneshot.resources import Cost, free_bytes
from ..select import Global, NofM, PerLayer, PerRow, Selector
from ..trained.model import TrainedModel
from .console import print
from .model_work import (
    Measure,
    cost_figures,
    loaded,
    offload_device,
    patterns_of,
    print_written,
    publish,
    sparsity_report,
    working,
    write_folder,
)
from .prune import Command
from .prune_tables import Outcome, Profile, advice, print_profile, print_result, split
from .quantising import print_bits, quantised, warn_if_dense


def work(command: Command, team: Team) -> None:
    if command.dry_run:
        _dry_run(command)
        return
    with working(command, team):
        outcome = _pruned(command, team)
        if outcome is None:
            return
        how = {"small": command.bits is not None, "of_prunable": True}
        zeros = sparsity_report(command, outcome.model.model)
        saved = write_folder(command, outcome.model, _figures(outcome), **how)
    print_result(outcome, command.sparsity, is_probed=command.probe != "none", every_layer=command.every_layer)
    print(
        f"{zeros.sparsity:.4%} of {zeros.num_prunable:,} prunable weights and {zeros.sparsity_of_all:.4%} of all "
        f"{zeros.num_parameters:,} are zero"
    )
    if command.bits is not None and saved is not None:
        print_bits(command, command.bits, outcome.in_bits.level, saved)
    if outcome.score == "wanda" and command.scope == "global":
        print("Wanda suits a threshold for each row (--scope row): one for all layers was far worse on small GPTs.")
    print_written(command, outcome.result.cost, outcome.recovery, "pruned")
    if outcome.profile is not None:
        print_profile(outcome.profile)
    publish(command)


def _pruned(command: Command, team: Team) -> Outcome | None:
    """The model, pruned, compared with the dense one and the score alone; None on all ranks but the first."""
    probe, score = _probe_of(command), command.chosen_score
    repair = Repair(command.targets, command.damping, tune=command.tune) if command.repairs else None
    trained, recover = loaded(command, from_checkpoint)
    if disk := disk_offload_of(trained.model):
        needs, _ = needs_of(_calibration_of(command, trained), disk, repairs=command.repairs)
        print(f"{command.model} is read block by block: it {needs}.")
    settings = _settings_of(command, trained) | {"loss": trained.loss, "checkpointing": command.checkpointing}
    if command.memory_bytes is not None:
        LIMITS[trained.model] = command.memory_bytes, command.unfinished
    if command.allocate == "moments" and not trained.moments:
        raise ValueError(
            f"--allocate moments reads Adam's second moments, and {command.model} has none: they are in a checkpoint "
            "of prunus train with an Adam optimizer; use --allocate fisher"
        )
    settings |= {"moments": trained.moments} if command.allocate == "moments" else {}
    if command.bits is not None and not command.sparsity:
        warn_if_dense(command, trained.model)
    if command.bits is None and on_grids(trained.model):
        print(f"{command.model} is quantised; without --bits the pruned model is written in full size.")
    began, measure = time.perf_counter(), Measure(command, trained, team)
    with sampled(utilisation_reader(torch.device(command.device)) if command.profile else None) as busy:
        rows = {"dense": measure()}
        # a repair has its folder for itself; beside it are tokens and the checkpoints of a recovery
        folder = command.unfinished if command.recover is None else command.unfinished / "repair"
        bits = command.bits if recover is None else None  # what recovers is quantised when it has
        more: dict[str, Any] = {"probe": probe, "repair": repair, "bits": bits}
        more["state"] = folder if (repair or bits or disk) and not probe else None
        more["group"] = team.size > 1 or None
        result = prune(trained.model, trained.batches, command.sparsity, **settings, **more)
        if not team.is_first:
            return None
        reached = measure()
        if probe is not None:
            reached_sparsity = result.sparsity
            result.undo_()
            alone = prune(trained.model, trained.batches, reached_sparsity, repair=None, **settings)
            rows[f"{score} alone"] = measure()
            alone.undo_()
            result.apply_()
        if repair is not None:
            with result.masks_alone():
                rows["masks alone"] = measure()
        name = "repaired" if repair else "probed" if probe else score or ""
        rows[f"{name}, {bits} bits" if bits else name] = reached
    outcome = Outcome(trained, result, rows, score)
    if recover is not None:
        outcome = replace(outcome, recovery=recover(result.dense()))
        rows["recovered"] = measure()
    result.level.originals = Originals()  # the dense weights, which nothing reads any more
    if recover is not None and command.bits is not None:
        outcome = replace(outcome, quantised=quantised(command, trained, command.bits))
        result.cost.add_(outcome.in_bits.cost)
        rows[f"recovered, {command.bits} bits"] = measure()
    if command.profile:
        seconds, cost = result.cost.parts | measure.clock.seconds, result.cost
        memory = (cost.rows, cost.halved, cost.peak_bytes, _left_bytes(command, cost))
        how = {"utilisation": fmean(busy) if busy else None, "checkpointing": cost.checkpointing}
        parts = split(seconds, time.perf_counter() - began)
        return replace(outcome, profile=Profile(parts, *memory, command.device, command.probe, **how))
    return outcome


def _settings_of(command: Command, trained: TrainedModel) -> dict[str, Any]:
    scopes = {"row": PerRow(), "layer": PerLayer(command.allocate), "global": Global(), "2:4": NofM(2, 4)}
    select: Selector = scopes[command.chosen_scope]
    how = {"score": command.chosen_score, "select": select, "memory": command.memory_bytes}
    how |= {"offload": offload_device(command, trained), "batch_size": command.batch or None}
    return how | patterns_of(command)


def _probe_of(command: Command) -> Probe | None:
    if command.probe == "none":
        return None
    try:
        tau: Any = command.tau if command.tau in ("adaptive", "target") else float(command.tau)
    except ValueError:
        raise ValueError(f"tau must be a number, adaptive or target, got {command.tau!r}") from None
    return Probe(tau, command.order, command.probe, command.reduction, command.zero_gradient)


def _left_bytes(command: Command, cost: Cost) -> int:
    device = torch.device(command.device)
    left = free_bytes(device)
    if device.type == "cuda":
        left -= cost.peak_bytes - torch.cuda.memory_allocated(device)
    return max(0, left)


def _figures(outcome: Outcome) -> dict[str, Any]:
    result, profile = outcome.result, outcome.profile
    layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in outcome.layers]
    figures = {"rows": outcome.rows, "layers": layers} | cost_figures(result.cost, outcome.recovery)
    if (level := outcome.in_bits.level).grids:
        figures["bits_a_weight"] = level.bits_a_weight
    return figures | ({} if profile is None else {"profile": asdict(profile) | {"advice": advice(profile)}})


def _dry_run(command: Command) -> None:
    """Print blocks, memory and time, from arithmetic and from a trial on the first block; nothing is written."""
    if command.recover is not None:
        print("The recovery is not part of the estimate: it needs both models and Adam's state at once.")
    command = replace(command, recover=None)
    trained, _ = loaded(command, from_checkpoint)
    calibration = _calibration_of(command, trained)
    num_bytes = sum(parameter.nbytes for parameter in trained.model.parameters())
    disk = disk_offload_of(trained.model)
    if disk is None:
        times = 3.4 if command.repairs else 2.4
        print(f"{command.model} is held in memory as a whole: it needs about {in_units(round(times * num_bytes))}")
        return
    sizes = list(map(disk.num_bytes, disk.blocks))
    windows = f"; {len(calibration.samples)} calibration samples" if calibration.has_batches else ""
    print(f"{command.model}: {len(sizes)} blocks of at most {in_units(max(sizes))}{windows}")
    needs, parts = needs_of(calibration, disk, repairs=command.repairs)
    print(f"It {needs}: {', '.join(f'{part} {in_units(size)}' for part, size in parts.items() if size)}")
    if command.repairs:
        _try_first_block(command, trained, len(sizes))
    print("Nothing was written.")


def _calibration_of(command: Command, trained: TrainedModel) -> Calibration:
    how = patterns_of(command) | {"offload": offload_device(command, trained), "batch_size": command.batch or None}
    return Calibration(trained.model, trained.batches, memory=command.memory_bytes, **how)


def _try_first_block(command: Command, trained: TrainedModel, num_blocks: int) -> None:
    """Repair the first block in a folder that goes away, and say how long all of them will take."""
    progress, repair = FirstBlock(), Repair(command.targets, command.damping)
    settings = _settings_of(command, trained) | {"repair": repair, "bits": command.bits}
    with tempfile.TemporaryDirectory() as folder:
        try:
            prune(trained.model, trained.batches, command.sparsity, state=folder, progress=progress, **settings)
        except FirstBlockDone:
            total = progress.before + progress.seconds * num_blocks
            print(
                f"The first block took {progress.seconds:.1f} s, after {progress.before:.1f} s of preparation: about "
                f"{total / 60:.1f} minutes for all {num_blocks} blocks, plus the evaluation"
            )
