"""Other places that a run's metrics go to, if the user names them: wandb, tensorboard, trackio.

A tracker sees what metrics.jsonl gets, nested names joined by a slash: ``loss``, ``eval/perplexity``.
The packages are imported only when asked for, and nothing here speaks to a network of its own accord.
"""

import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .run import Run


class Sink(Protocol):
    """One tracker of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_installed(names: tuple[str, ...]) -> None:
    """Refuse a tracker whose package is missing, before anything is made."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"--track {name} needs the package {name}: pip install 'prunus[{name}]'")


def open_sinks(run: Run, step: int) -> tuple[Sink, ...]:
    """The trackers that ``run`` names, begun at ``step``, or taken up again there."""
    return tuple(OPENED[name](run, step) for name in run.track)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers that change: those of a mapping have its name before theirs; lists and sizes are left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name == "layers":
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            found[prefix + name] = value
    return found


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps it on this machine, in the run folder."""

    def __init__(self, run: Run, step: int) -> None:
        wandb: Any = import_module("wandb")
        known, own = run.out / "wandb-id", run.out / "wandb"
        before = own.exists()
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "prunus"),
                name=run.out.name,
                dir=str(run.out),
                config=run.to_json(),
                id=known.read_text() if step and known.is_file() else None,
                resume="allow" if step else None,
                reinit="finish_previous",  # a run of the same process that failed
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            if not before:
                shutil.rmtree(own, ignore_errors=True)
            raise ValueError(f"wandb did not begin: {error}; WANDB_MODE=offline needs no account") from None
        known.write_text(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Tensorboard:
    """Event files in the run folder: ``tensorboard --logdir RUN``."""

    def __init__(self, run: Run, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.out / "tensorboard"
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """Hugging Face's local-first tracker, in the project prunus: ``trackio show``."""

    def __init__(self, run: Run, step: int) -> None:
        self.trackio: Any = import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "prunus")
        resume = "allow" if step else "never"
        self.run = self.trackio.init(project=project, name=_name(run.out), config=run.to_json(), resume=resume)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


def _name(folder: Path) -> str:
    return "-".join(folder.resolve().parts[-2:])


OPENED = {"wandb": Wandb, "tensorboard": Tensorboard, "trackio": Trackio}
