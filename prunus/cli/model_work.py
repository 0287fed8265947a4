"""What ``prunus prune`` and ``prunus shrink`` both do: load, keep others out, measure, recover, write and publish."""

import io
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import MISSING, asdict, fields
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..eligible import eligible
from ..export.card import CardFacts, write_card
from ..export.hub import check_push, push
from ..files.atomic import new_folder
from ..files.json_file import read_json, write_json
from ..files.lock import lock_folder
from ..files.writer import Saved
from ..lab.parallel import Team, join
from ..oneshot.disk_offload import disk_offload_of
from ..oneshot.offload import Offload
from ..oneshot.resources import Clock, Cost
from ..ops.machine import device_of
from ..plot import check_picture, layers_chart, save
from ..recovery import Recovery
from ..recovery.recover import training_arguments
from ..sparsity_report import SparsityReport, report
from ..trained.data import TokenCache, TrainingBatches
from ..trained.model import ModelSource, TrainedModel, load_trained
from .console import print
from .model_options import ModelCommand
from .recovering import batch_options, recovered
from .shared_options import check_new_folder, check_not_negative, is_written, number_of, plain, size_in_bytes

Recover = Callable[[nn.Module], Recovery]  # from the dense model


def on_all_ranks(command: ModelCommand) -> None:
    """Do a command's work, which NAME_work holds, on each rank; the first one speaks, measures and writes."""
    work: Callable[[Any, Team], None] = import_module(f"{__package__}.{command.name}_work").work
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if is_to_do(command):
            work(command, Team())
        return
    for name in ("recover", "tune", "probe"):
        if getattr(command, name, None) not in (None, False, "none"):
            raise ValueError(f"--{name} runs in one process only: leave it off, or start the command without torchrun")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    device = torch.device(command.device)
    join(device.type == "cuda", timedelta(days=1))  # others wait while the first one measures; torchrun ends them all
    team = Team("ddp", dist.get_rank(), dist.get_world_size())
    try:
        team.each(lambda: team.place(device))
        with nullcontext() if team.is_first else redirect_stdout(io.StringIO()):
            if team.first(lambda: is_to_do(command)):
                work(command, team)
        dist.destroy_process_group()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "onnection" not in str(error):
            raise
        raise ValueError("another rank has ended; repeat the command to continue") from error


def is_to_do(command: ModelCommand) -> bool:
    """Check the options; nothing is to do where the command was killed after its result was in its place."""
    if command.plot is not None:
        check_picture(command.plot)
    if command.private and command.push is None:
        raise ValueError("without --push nothing reads --private; leave it off")
    if command.push is not None:
        check_push(command.push)
    if is_written(command.out / "result.json", command.unfinished, settings_of(command)):
        shutil.rmtree(command.unfinished, ignore_errors=True)
        print(f"{command.out}: already written")
        publish(command)
        return False
    command.check()
    check_new_folder(command.out)
    size_in_bytes(command.max_shard_size)
    check_not_negative(command, "length", "eval_windows", "batch")
    if command.recover is not None:
        number_of(command.recover)
        if command.offload:
            raise ValueError("--recover trains the model on the device; leave off --offload, or recover it afterwards")
        if command.calibrate == "self":
            raise ValueError("--recover learns from text; give --text, --tokens or --batches, not --calibrate self")
    device_of(command.device)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers, between ours
    return True


@contextmanager
def working(command: ModelCommand, team: Team = Team()) -> Iterator[None]:
    """Keep other processes out of the folder to work in."""
    if not team.is_first:
        yield
        return
    folder = command.unfinished
    is_new = not folder.exists()
    with lock_folder(folder):
        try:
            yield
        except ValueError:
            if command.recover is not None and is_new and not any(path.is_dir() for path in folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)  # tokens alone
            raise


def source_of(command: ModelCommand) -> ModelSource:
    known = {one.name: getattr(command, one.name) for one in fields(ModelSource) if hasattr(command, one.name)}
    if known["samples"] is None:
        known |= {"samples": command.most_samples, "at_most": True}
    known["max_shard_bytes"] = size_in_bytes(command.max_shard_size)
    if command.recover is not None:
        known["cache"] = TokenCache(command.unfinished, number_of(command.recover) * 10 // 9)
    return ModelSource(**known)


def loaded(
    command: ModelCommand, checkpoint: Callable[[ModelSource], TrainedModel | None]
) -> tuple[TrainedModel, Recover | None]:
    """The model with its data, and how it will recover if it will; ``checkpoint`` reads those of ``prunus train``."""
    is_folder = (Path(command.model) / "config.json").is_file()
    if command.needs_whole and is_folder:
        print(f"{command.model} is held in memory as a whole: {command.needs_whole} needs it.")
    trained = load_trained(source_of(command), checkpoint)
    if trained.note:
        print(trained.note)
    if trained.held_out and not getattr(command, "dry_run", False):
        print(f"Evaluated on {trained.held_out}.")
    return trained, None if command.recover is None else _recovery(command, trained)


def _recovery(command: ModelCommand, trained: TrainedModel) -> Recover:
    """How the model will learn from the dense one; what that lacks is said before anything is done."""
    if trained.samples is None:
        raise ValueError(
            f"--recover needs --text, --tokens or --batches, and {command.model} reads none; recover it in Python: "
            "prunus.recover(model, teacher=result.dense(), ...)"
        )
    args = training_arguments(command.unfinished / "recovery", torch.device(command.device).type, seed=command.seed)
    options = batch_options(command.recover or "", trained, args, length=command.length)
    TrainingBatches(trained.samples.of_length(options.length), options.size)  # refuses too few samples
    return lambda dense: recovered(command, trained, dense, args, options)


def sparsity_report(command: ModelCommand, model: nn.Module) -> SparsityReport:
    disk, chosen = disk_offload_of(model), eligible(model, **patterns_of(command))
    return report(model, chosen) if disk is None else report(model, chosen, holding=disk.holding)


def patterns_of(command: ModelCommand) -> dict[str, Any]:
    return {name: getattr(command, name, ()) for name in ("include", "exclude", "only")}


class Measure:
    """Returns sparsity and metric of the model as it is now, on the first rank alone; the clock adds the time up."""

    def __init__(self, command: ModelCommand, trained: TrainedModel, team: Team = Team()) -> None:
        self.command, self.trained, self.team = command, trained, team
        self.clock = Clock(torch.device(command.device))

    def __call__(self) -> dict[str, float]:
        if not self.team.is_first:
            return {}
        command, model = self.command, self.trained.model
        with self.clock.part("evaluation"), ExitStack() as stack:
            if device := offload_device(command, self.trained):
                weights = eligible(model, **patterns_of(command)).weights
                stack.enter_context(Offload(model, weights, device).open())
            sparsity = sparsity_report(command, model).sparsity
            return {"sparsity": sparsity, self.trained.metric: self.trained.evaluate(model)}


def offload_device(command: ModelCommand, trained: TrainedModel) -> torch.device | None:
    """Where blocks are moved one at a time: on request, and whenever they are read one at a time."""
    device = torch.device(command.device)
    is_moved = command.offload or (device.type != "cpu" and disk_offload_of(trained.model))
    return device if is_moved else None


def write_folder(
    command: ModelCommand, trained: TrainedModel, figures: Mapping[str, Any], *, small: bool = False, **facts: Any
) -> Saved | None:
    """Write the folder, which appears when it is complete, and remove the one to work in.

    ``figures`` are for result.json, beside the settings; ``facts`` are what the card says more. What became of each
    tensor is returned of the small form.
    """
    about = {"command": command_line(command), "settings": settings_of(command), "held_out": trained.held_out}
    figures = plain(about | dict(figures))
    known = {name: figures[name] for name in ("command", "layers", "rows", "settings")}
    card = CardFacts(command.out.name, source=command.model, repo=command.push, **known, **facts)
    with new_folder(command.out, inside=command.unfinished) as part:
        saved = trained.save(part, small=True) if small else trained.save(part)
        (part / "recovery.json").unlink(missing_ok=True)  # of a recovery before this command
        write_json(part / "result.json", figures)
        write_card(part, card)
    shutil.rmtree(command.unfinished, ignore_errors=True)
    return saved


def cost_figures(cost: Cost, recovery: Recovery | None) -> dict[str, Any]:
    figures = {name: getattr(cost, name) for name in ("passes", "forwards", "seconds", "peak_bytes")}
    return figures if recovery is None else figures | {"recovery": recovery.figures()}


def print_written(command: ModelCommand, cost: Cost, recovery: Recovery | None, done: str) -> None:
    if recovery is not None:
        print(*str(recovery).splitlines())
    memory = f" with at most {cost.peak_bytes / 2**30:.2f} GiB of memory" if cost.peak_bytes else ""  # if measured
    print(f"{command.out}: written; {done} from {command.model}{memory} in {cost}")


def publish(command: ModelCommand) -> None:
    if command.plot is not None:
        save(layers_chart(read_json(command.out / "result.json")["layers"]), command.plot)
    if command.push is not None:
        print(f"{command.out}: pushed to {push(command.out, command.push, private=command.private)}")


def settings_of(command: ModelCommand) -> Any:
    left_out = ("out", "plot", "push", "private")  # where the result goes, not what it is
    return plain({key: value for key, value in asdict(command).items() if key not in left_out})


def command_line(command: ModelCommand) -> str:
    """The command that makes this folder; paths are names alone, which say nothing of the machine."""
    parts = ["prunus", command.name, Path(command.model).name]
    for option in fields(command):
        value, default = getattr(command, option.name), option.default
        if option.name in ("model", "plot", "push", "private") or value in (default, MISSING):
            continue
        parts.append(f"--{option.name.replace('_', '-')}")
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        parts += [one.name if isinstance(one, Path) else str(one) for one in values]
    return shlex.join(parts)
