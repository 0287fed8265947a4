"""How a run that was killed goes on: what it must have in common with the one that began, and where that was."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..files.json_file import read_json, write_json
from ..oneshot.samples import digest
from .step_batches import Batches

if TYPE_CHECKING:
    from .recovery_trainer import RecoveryTrainer

SETTINGS = "settings.json"  # in the folder of checkpoints: what they belong to


def settings_of(trainer: "RecoveryTrainer", data: Batches, lr: float | None, train: Any, seed: int) -> dict[str, Any]:
    """What a run that goes on must have in common with the one that began."""
    student, teacher = trainer.distillation.student, trainer.distillation.teacher
    return {
        "steps": trainer.plan.steps,
        "lr": lr,
        "hard": trainer.distillation.hard,
        "train": [train] if isinstance(train, str) else list(train),
        "seed": seed,
        "accumulate": trainer.args.gradient_accumulation_steps,
        "held_out": None if data.is_split else digest(data.held_out),  # which ranks then have their own of
        "student": sampled_digest(student),
        "teacher": None if teacher is None else sampled_digest(teacher.model),
    }


def sampled_digest(model: nn.Module) -> str:
    """A digest of some values of every parameter, by which another model is noticed."""
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().reshape(-1)[:: max(1, p.numel() // 64)].float().cpu() for p in model.parameters()]
    return digest([names, values])


def last_checkpoint(folder: Path, settings: dict[str, Any]) -> str | None:
    """The last complete checkpoint in the folder, if there is one; ValueError where it is of another run."""
    path = folder / SETTINGS
    if path.is_file():
        known = read_json(path)
        if other := [name for name, value in settings.items() if known.get(name) != value]:
            raise ValueError(
                f"{folder} holds a run whose {other[0]} is {known.get(other[0])}, not {settings[other[0]]}; "
                "repeat the call with the old value, or remove the folder to start again"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    steps = sorted((int(p.name.partition("-")[2]) for p in folder.glob("checkpoint-*") if p.is_dir()), reverse=True)
    for step in steps:
        state = folder / f"checkpoint-{step}" / "trainer_state.json"
        try:
            if read_json(state)["global_step"] == step:
                return str(state.parent)
        except (ValueError, KeyError, OSError):  # killed while it was written
            continue
    return None
