"""``prunus prune``: prunes, compares and writes; the options are beside it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import print
from .prune_options import Command, check, check_places, probe_of, selector_of, source_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..oneshot.resources import Cost
    from ..recovery import Recovery
    from ..sparsity_report import SparsityReport
    from ..trained.model import TrainedModel
    from .prune_tables import Outcome, Profile


def run(command: Command) -> None:
    check_places(command)
    if command.sparsity is None:
        command = replace(command, sparsity=0.5 if command.experts is None or command.scope == "2:4" else 0.0)
    if _is_written(command):  # killed after the result was in its place
        shutil.rmtree(command.unfinished, ignore_errors=True)
        print(f"{command.out}: was written already")
        _publish(command)
        return
    check(command)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers, between ours
    from .prune_tables import print_profile, print_result

    with _working(command):
        outcome = _pruned(command)
        _write(command, outcome)
    print_result(outcome, command.sparsity or 0.0, is_probed=command.probe != "none", every_layer=command.layers)
    zeros = _report(command, outcome.model.model)
    print(
        f"{zeros.sparsity:.4%} of {zeros.num_prunable:,} prunable weights and {zeros.sparsity_of_all:.4%} of all "
        f"{zeros.num_parameters:,} are zero"
    )
    if outcome.recovery is not None:
        print(*str(outcome.recovery).splitlines())
    if outcome.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    cost = outcome.result.cost
    memory = f"at most {cost.peak_bytes / 2**30:.2f} GiB of memory"
    print(f"{command.out}: written; {command.model} was pruned with {memory} in {cost}")
    if outcome.profile is not None:
        print_profile(outcome.profile)
    _publish(command)


def _publish(command: Command) -> None:
    """Write the chart and push the folder, where that was asked for."""
    if command.plot is not None:
        from ..files.json_file import read_json
        from ..plot import layers_chart, save

        save(layers_chart(read_json(command.out / "result.json")["layers"]), command.plot)
    if command.push is not None:
        from ..export.hub import push

        print(f"{command.out}: pushed to {push(command.out, command.push, private=command.private)}")


def _report(command: Command, model: "nn.Module") -> "SparsityReport":
    from ..eligible import eligible
    from ..sparsity_report import report

    return report(model, eligible(model, command.include, command.exclude, command.only))


def _pruned(command: Command) -> "Outcome":
    """The model, pruned, compared with the dense one and the score alone."""
    import time

    import torch

    from ..lab.gpu import Sampler, utilisation_reader
    from ..lab.trained_run import from_checkpoint
    from ..oneshot import Repair, prune
    from ..oneshot.fewer_experts import fewer_experts
    from ..oneshot.originals import Originals
    from ..trained.model import load_trained
    from .prune_tables import Outcome

    probe, score, device = probe_of(command), command.chosen_score, torch.device(command.device)
    repair = Repair(command.targets, command.damping, tune=command.tune) if command.repairs else None
    trained = load_trained(source_of(command), from_checkpoint)
    if trained.note:
        print(trained.note)
    if trained.held_out:
        print(f"Evaluated on {trained.held_out}.")
    recovers = None if command.recover is None else _recovery(command, trained)
    if command.experts is not None:
        fewer_experts(trained.model, command.experts)  # refuses a model without experts before it is evaluated
    common: dict[str, Any] = {"include": command.include, "exclude": command.exclude, "only": command.only}
    common |= {"batch_size": command.batch or None, "offload": device if command.offload else None}
    settings: dict[str, Any] = {"score": score, "select": selector_of(command), "loss": trained.loss, **common}
    if command.allocate == "moments" and not trained.moments:
        raise ValueError(
            f"--allocate moments reads Adam's second moments, and {command.model} has none: they are in a checkpoint "
            "of prunus that was trained with Adam; take --allocate fisher"
        )
    settings |= {"moments": trained.moments} if command.allocate == "moments" else {}
    settings |= {"checkpointing": command.checkpointing}
    began, measure = time.perf_counter(), _Measure(command, trained, device)
    sampler = Sampler(utilisation_reader(device) if command.profile else None)
    with sampler.running():
        rows = {"dense": measure()}
        dropping = result = None
        if command.experts is not None:
            dropping = result = prune(trained.model, trained.batches, experts=command.experts, **common)
            rows["experts dropped"] = measure()
        if result is None or command.prunes:
            # a repair has its folder for itself; beside it are tokens and the checkpoints of a recovery
            folder = command.unfinished if command.recover is None else command.unfinished / "repair"
            more: dict[str, Any] = {"state": folder if repair and not probe else None}
            more |= {"probe": probe, "repair": repair}
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
            rows["repaired" if repair else "probed" if probe else score or ""] = reached
    recovery = None
    if recovers is not None:
        recovery = recovers(result.dense())
        rows["recovered"] = measure()
    result.level.originals = Originals()  # the dense weights, which nothing reads any more
    if dropping is not None and result is not dropping:
        result.experts = dropping.experts
        result.cost.add_(dropping.cost)
    outcome = Outcome(trained, result, rows, score, recovery=recovery)
    if not command.profile:
        return outcome
    seconds = result.cost.parts | measure.clock.seconds
    total = time.perf_counter() - began
    return replace(outcome, profile=_profile(command, result.cost, seconds, total, sampler.mean))


def _recovery(command: Command, trained: "TrainedModel") -> "Callable[[nn.Module], Recovery]":
    """How the pruned model will learn from the dense one; what that lacks is said before anything is pruned."""
    import torch

    from ..recovery.training_options import training_arguments
    from .recovering import batch_options, recovered, training_batches

    if trained.training is None:
        raise ValueError(
            f"--recover reads --text, --tokens or --batches, which {command.model} does not; recover it in Python: "
            "prunus.recover(model, teacher=result.dense(), ...)"
        )
    args = training_arguments(command.unfinished / "recovery", torch.device(command.device).type, seed=command.seed)
    options = batch_options(command.recover or "", trained, args, length=command.length)
    training_batches(trained, options)
    return lambda dense: recovered(command, trained, dense, args, options)


@contextmanager
def _working(command: Command) -> Iterator[None]:
    """Keep other processes out of the folder to work in; folders that were made for it go if they stay empty."""
    from ..files.lock import lock_folder

    folder = command.unfinished
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with lock_folder(folder):
            yield
    except ValueError:
        if command.recover is not None and folder in made and not any(path.is_dir() for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)  # tokens alone
        raise
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _is_written(command: Command) -> bool:
    """Whether this command has written its result, and only its folder to work in is left to remove."""
    from ..files.json_file import read_json

    path = command.out / "result.json"
    return command.unfinished.is_dir() and path.is_file() and read_json(path).get("settings") == _settings(command)


class _Measure:
    """Returns sparsity and metric of the model as it is now; the clock sums up the time that takes."""

    def __init__(self, command: Command, trained: "TrainedModel", device: "torch.device") -> None:
        from ..oneshot.resources import Clock

        self.command, self.trained, self.device, self.clock = command, trained, device, Clock(device)

    def __call__(self) -> dict[str, float]:
        with self.clock.part("evaluation"), self._offloaded():
            zeros = _report(self.command, self.trained.model)
            size = {} if self.command.experts is None else {"parameters": zeros.num_parameters}
            return size | {"sparsity": zeros.sparsity, self.trained.metric: self.trained.evaluate(self.trained.model)}

    def _offloaded(self) -> AbstractContextManager[Any]:
        from contextlib import nullcontext

        from ..eligible import eligible
        from ..oneshot.offload import Offload

        if not self.command.offload:
            return nullcontext()
        weights = eligible(self.trained.model, self.command.include, self.command.exclude, self.command.only).weights
        return Offload(self.trained.model, weights, self.device).open()


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


def _write(command: Command, outcome: "Outcome") -> None:
    """Write the folder, which appears when it is complete, and remove the one to work in."""
    from ..export.card import CardFacts, write_card
    from ..files.atomic import new_folder
    from ..files.json_file import write_json

    figures = _plain(_figures(command, outcome))
    said = {name: figures[name] for name in ("layers", "rows", "settings")}
    facts = CardFacts(command.out.name, source=command.model, of_prunable=True, repo=command.push, **said)
    with new_folder(command.out, inside=command.unfinished) as part:
        outcome.model.save(part)
        (part / "recovery.json").unlink(missing_ok=True)  # of a recovery before this pruning
        write_json(part / "result.json", figures)
        write_card(part, facts)
    shutil.rmtree(command.unfinished, ignore_errors=True)


def _figures(command: Command, outcome: "Outcome") -> dict[str, Any]:
    from .prune_tables import advice

    result, profile = outcome.result, outcome.profile
    layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in result.layers]
    cost = {name: getattr(result.cost, name) for name in ("passes", "forwards", "seconds", "peak_bytes")}
    recovery = {} if outcome.recovery is None else {"recovery": outcome.recovery.figures()}
    found = (
        recovery
        | {
            "settings": _settings(command),
            "held_out": outcome.model.held_out,
            "rows": outcome.rows,
            "layers": layers,
        }
        | cost
    )
    if result.experts is not None:
        found["experts"] = [asdict(layer) for layer in result.experts.layers]
    return found | ({} if profile is None else {"profile": asdict(profile) | {"advice": advice(profile)}})


def _settings(command: Command) -> Any:
    left_out = ("out", "plot", "push", "private")  # where the result goes, not what it is
    return _plain({key: value for key, value in asdict(command).items() if key not in left_out})


def _plain(value: Any) -> Any:
    """The same value in types that JSON has."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
