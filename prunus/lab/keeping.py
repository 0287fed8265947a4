"""Where a training's state goes and comes from: one file, or pieces that ranks write, whoever reads them later."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..ops.machine import said_by_linux
from .checkpoint import checkpoint_of, drop_pieces, load_checkpoint, save_checkpoint
from .named import cut_as, from_names, to_names

if TYPE_CHECKING:
    from .trainer import Training


def save(training: "Training", last: bool) -> None:
    """Write the checkpoint of the run folder; the ``last`` pieces are put together to one file, too."""
    out, team = training.run.out, training.team
    if team.kind == "none":
        save_checkpoint(out / "checkpoint.pt", training.state())
        drop_pieces(out)
        return
    from .pieces import save_pieces

    team.average_buffers_(training.model)
    state = training.state() | {"digest": None}
    if pruner := training.pruner:
        state |= {"digest": pruner.digest(), "pruner": pruner.state_dict(unpacked=True)}
    path = save_pieces(out, to_names(state, training.model, training.optimizer), team)
    if last and team.is_first and _fits_in_memory(path):
        save_checkpoint(out / "checkpoint.pt", load_checkpoint(path))


def resume(training: "Training") -> None:
    """Continue from the checkpoint of the run folder; without one the training begins."""
    path, team = checkpoint_of(training.run.out), training.team
    if not path.exists():
        return
    if path.is_dir() and team.kind != "none":
        from .pieces import load_pieces

        state = from_names(load_pieces(path, training.model.state_dict(), team))
    else:
        state = cut_as(team.each(lambda: load_checkpoint(path)), training.model, training.optimizer)
    training.load(state)


def _fits_in_memory(path: Path) -> bool:
    """Whether all pieces together leave room in main memory; where that cannot be told they do."""
    available = said_by_linux("meminfo", "MemAvailable")
    return available is None or 1.25 * sum(f.stat().st_size for f in path.iterdir()) < available
