"""``prunus prune``: prunes, compares and writes; the options are beside it."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .console import print
from .model_work import (
    Measure,
    cost_figures,
    is_to_do,
    loaded,
    patterns_of,
    print_written,
    publish,
    sparsity_report,
    working,
    write_folder,
)
from .prune_options import Command, check, probe_of, selector_of
from .quantising import print_bits, quantised, warn_if_dense

if TYPE_CHECKING:
    from ..oneshot.resources import Cost
    from .prune_tables import Outcome, Profile


def run(command: Command) -> None:
    if not is_to_do(command, check):
        return
    from .prune_tables import print_profile, print_result

    with working(command):
        outcome = _pruned(command)
        how = {"small": command.bits is not None, "of_prunable": True}
        saved = write_folder(command, outcome.model, _figures(outcome), **how)
    print_result(outcome, command.sparsity, is_probed=command.probe != "none", every_layer=command.every_layer)
    zeros = sparsity_report(command, outcome.model.model)
    print(
        f"{zeros.sparsity:.4%} of {zeros.num_prunable:,} prunable weights and {zeros.sparsity_of_all:.4%} of all "
        f"{zeros.num_parameters:,} are zero"
    )
    if command.bits is not None and saved is not None:
        print_bits(command, command.bits, outcome.in_bits.level, saved)
    if outcome.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    print_written(command, outcome.result.cost, outcome.recovery, "pruned")
    if outcome.profile is not None:
        print_profile(outcome.profile)
    publish(command)


def _pruned(command: Command) -> "Outcome":
    """The model, pruned, compared with the dense one and the score alone."""
    import time

    import torch

    from ..grids import on_grids
    from ..lab.gpu import Sampler, utilisation_reader
    from ..lab.trained_run import from_checkpoint
    from ..oneshot import Repair, prune
    from ..oneshot.originals import Originals
    from .prune_tables import Outcome

    probe, score, device = probe_of(command), command.chosen_score, torch.device(command.device)
    repair = Repair(command.targets, command.damping, tune=command.tune) if command.repairs else None
    trained, recover = loaded(command, from_checkpoint)
    settings: dict[str, Any] = {"score": score, "select": selector_of(command), "loss": trained.loss}
    settings |= {"batch_size": command.batch or None, "offload": device if command.offload else None}
    settings |= {"checkpointing": command.checkpointing, **patterns_of(command)}
    if command.allocate == "moments" and not trained.moments:
        raise ValueError(
            f"--allocate moments reads Adam's second moments, and {command.model} has none: they are in a checkpoint "
            "of prunus that was trained with Adam; take --allocate fisher"
        )
    settings |= {"moments": trained.moments} if command.allocate == "moments" else {}
    if command.bits is not None and not command.sparsity:
        warn_if_dense(command, trained.model)
    if command.bits is None and on_grids(trained.model):
        print(f"{command.model} is in few bits; what is pruned is written in full size without --bits.")
    began, measure = time.perf_counter(), Measure(command, trained, device)
    sampler = Sampler(utilisation_reader(device) if command.profile else None)
    with sampler.running():
        rows = {"dense": measure()}
        # a repair has its folder for itself; beside it are tokens and the checkpoints of a recovery
        folder = command.unfinished if command.recover is None else command.unfinished / "repair"
        bits = command.bits if recover is None else None  # what recovers is quantised when it has
        more: dict[str, Any] = {"probe": probe, "repair": repair, "bits": bits}
        more["state"] = folder if (repair or bits) and not probe else None
        result = prune(trained.model, trained.batches, command.sparsity, **settings, **more)
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
    if not command.profile:
        return outcome
    seconds = result.cost.parts | measure.clock.seconds
    total = time.perf_counter() - began
    return replace(outcome, profile=_profile(command, result.cost, seconds, total, sampler.mean))


def _profile(
    command: Command, cost: "Cost", parts: dict[str, float], total: float, utilisation: float | None
) -> "Profile":
    import torch

    from ..oneshot.resources import free_bytes
    from .prune_tables import Profile, split

    device = torch.device(command.device)
    left = free_bytes(device)
    if device.type == "cuda":
        left -= cost.peak_bytes - torch.cuda.memory_allocated(device)
    state = (cost.rows, cost.halved, cost.peak_bytes, max(0, left))
    return Profile(split(parts, total), *state, command.device, command.probe, utilisation, cost.checkpointing)


def _figures(outcome: "Outcome") -> dict[str, Any]:
    from .prune_tables import advice

    result, profile = outcome.result, outcome.profile
    layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in outcome.layers]
    figures = {"rows": outcome.rows, "layers": layers} | cost_figures(result.cost, outcome.recovery)
    if (level := outcome.in_bits.level).grids:
        figures["bits_a_weight"] = level.bits_a_weight
    return figures | ({} if profile is None else {"profile": asdict(profile) | {"advice": advice(profile)}})
