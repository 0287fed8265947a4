"""What ``prunus prune`` and ``prunus shrink`` both do: load, keep others out, measure, recover, write and publish."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import print
from .model_options import ModelCommand, check_places, source_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..files.writer import Saved
    from ..oneshot.resources import Cost
    from ..recovery import Recovery
    from ..sparsity_report import SparsityReport
    from ..trained.model import ModelSource, TrainedModel

Recover = Callable[["nn.Module"], "Recovery"]  # from the dense model


def is_to_do(command: ModelCommand, check: Callable[[Any], None]) -> bool:
    """Check the options; nothing is to do where the command was killed after its result was in its place."""
    check_places(command)
    if _is_written(command):
        shutil.rmtree(command.unfinished, ignore_errors=True)
        print(f"{command.out}: was written already")
        publish(command)
        return False
    check(command)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers, between ours
    return True


def _is_written(command: ModelCommand) -> bool:
    """Whether this command has written its result, and only its folder to work in is left to remove."""
    from ..files.json_file import read_json

    path = command.out / "result.json"
    return command.unfinished.is_dir() and path.is_file() and read_json(path).get("settings") == settings_of(command)


@contextmanager
def working(command: ModelCommand) -> Iterator[None]:
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


def loaded(
    command: ModelCommand, checkpoint: "Callable[[ModelSource], TrainedModel | None]"
) -> "tuple[TrainedModel, Recover | None]":
    """The model with its data, and how it will recover if it will; ``checkpoint`` reads those of ``prunus train``."""
    from ..trained.model import load_trained

    trained = load_trained(source_of(command), checkpoint)
    if trained.note:
        print(trained.note)
    if trained.held_out:
        print(f"Evaluated on {trained.held_out}.")
    return trained, None if command.recover is None else _recovery(command, trained)


def _recovery(command: ModelCommand, trained: "TrainedModel") -> Recover:
    """How the model will learn from the dense one; what that lacks is said before anything is done."""
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


def sparsity_report(command: ModelCommand, model: "nn.Module") -> "SparsityReport":
    from ..eligible import eligible
    from ..sparsity_report import report

    return report(model, eligible(model, **patterns_of(command)))


def patterns_of(command: ModelCommand) -> dict[str, Any]:
    return {name: getattr(command, name, ()) for name in ("include", "exclude", "only")}


class Measure:
    """Returns sparsity and metric of the model as it is now; the clock sums up the time that takes."""

    def __init__(self, command: ModelCommand, trained: "TrainedModel", device: "torch.device") -> None:
        from ..oneshot.resources import Clock

        self.command, self.trained, self.device, self.clock = command, trained, device, Clock(device)

    def __call__(self) -> dict[str, float]:
        with self.clock.part("evaluation"), self._offloaded():
            sparsity = sparsity_report(self.command, self.trained.model).sparsity
            return {"sparsity": sparsity, self.trained.metric: self.trained.evaluate(self.trained.model)}

    def _offloaded(self) -> AbstractContextManager[Any]:
        from ..eligible import eligible
        from ..oneshot.offload import Offload

        if not self.command.offload:
            return nullcontext()
        weights = eligible(self.trained.model, **patterns_of(self.command)).weights
        return Offload(self.trained.model, weights, self.device).open()


def write_folder(
    command: ModelCommand, trained: "TrainedModel", figures: Mapping[str, Any], *, small: bool = False, **facts: Any
) -> "Saved | None":
    """Write the folder, which appears when it is complete, and remove the one to work in.

    ``figures`` are for result.json, beside the settings; ``facts`` are what the card says more. What became of each
    tensor is returned of the small form.
    """
    from ..export.card import CardFacts, write_card
    from ..files.atomic import new_folder
    from ..files.json_file import write_json

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


def cost_figures(cost: "Cost", recovery: "Recovery | None") -> dict[str, Any]:
    """What the work cost, and what the recovery did, for result.json."""
    figures = {name: getattr(cost, name) for name in ("passes", "forwards", "seconds", "peak_bytes")}
    return figures if recovery is None else figures | {"recovery": recovery.figures()}


def print_written(command: ModelCommand, cost: "Cost", recovery: "Recovery | None", done: str) -> None:
    """Say what the recovery did, and what was written; ``done`` is what was done to the model."""
    if recovery is not None:
        print(*str(recovery).splitlines())
    memory = f" with at most {cost.peak_bytes / 2**30:.2f} GiB of memory" if cost.peak_bytes else ""  # if measured
    print(f"{command.out}: written; {command.model} was {done}{memory} in {cost}")


def publish(command: ModelCommand) -> None:
    """Write the chart and push the folder, where that was asked for."""
    if command.plot is not None:
        from ..files.json_file import read_json
        from ..plot import layers_chart, save

        save(layers_chart(read_json(command.out / "result.json")["layers"]), command.plot)
    if command.push is not None:
        from ..export.hub import push

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


def plain(value: Any) -> Any:
    """The same value in types that JSON has."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
