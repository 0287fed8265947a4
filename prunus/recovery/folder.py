"""Folders of a recovery: the checkpoints from which a run that was killed goes on, and the model with its figures."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..export.card import DATA, CardFacts, write_card
from ..export.convert import copy_beside
from ..export.huggingface import quiet_transformers, save_config, small_source
from ..files.atomic import new_folder
from ..files.json_file import read_json, write_json
from ..files.reader import PLAIN, SMALL
from ..files.sparse_file import in_memory
from ..files.writer import WritePlan, write
from ..grids import on_grids
from ..oneshot.samples import digest
from ..ranks import is_dtensor
from .result import Recovery
from .step_batches import Batches
from .teacher import narrowed

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


FIGURES = "recovery.json"


def write_recovered(
    out: Path,
    model: Any,
    recovery: Recovery,
    *,
    source: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    unfinished: Path | None = None,
) -> None:
    """Write a folder that appears when it is complete; what lies beside the weights of ``source`` is copied.

    A model with weights on grids is written in the small form, with their codes, and any other as plain tensors.
    Every rank calls it where weights are sharded, and the first one writes.
    """
    tensors, dtype = whole_tensors(model), dtype_of(model)
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        torch.distributed.barrier()
        return
    figures = recovery.figures() | {"settings": dict(settings or {})}
    with new_folder(out, inside=unfinished) if unfinished else new_folder(out) as part:
        if on_grids(model):  # a small folder alone holds codes
            save_config(model, part)
            write(small_source(model), WritePlan(part / SMALL))
        elif hasattr(model, "save_pretrained"):
            with quiet_transformers():
                model.save_pretrained(part, state_dict=tensors)
            if isinstance(dtype, torch.dtype) and (config := part / "config.json").is_file():
                write_json(config, read_json(config) | {"dtype": str(dtype).removeprefix("torch.")})
        else:
            write(in_memory(tensors, {"format": "pt"}), WritePlan(part / PLAIN, small=False))
        if source is not None:
            copy_beside(source, part)
        write_json(part / FIGURES, figures)
        write_card(part, _facts(part, out, tensors, recovery, source, settings or {}))
    if unfinished is not None:
        shutil.rmtree(unfinished, ignore_errors=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, gathered in main memory on the first rank where it is sharded."""
    if not any(map(is_dtensor, model.parameters())):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    tensors: dict[str, Any] = get_model_state_dict(model, options=options)
    if (dtype := dtype_of(model)) in (torch.float16, torch.bfloat16):
        tensors = {name: narrowed(each, dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tensors:  # each name is gathered by itself; what is tied is to be stored once
            tensors[name] = tensors[first.setdefault(parameter, name)]
    return tensors


def dtype_of(model: nn.Module) -> Any:
    """What its configuration says: sharded weights stay in float32, in which they learned."""
    return getattr(getattr(model, "config", None), "dtype", None)


def _facts(
    part: Path, out: Path, tensors: Mapping[str, Tensor], recovery: Recovery, source: Path | None, settings: Any
) -> CardFacts:
    layers = []
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and (zeros := tensor.numel() - int(tensor.count_nonzero())):
            share = zeros / tensor.numel()
            layers.append({"name": name, "num_weights": tensor.numel(), "num_pruned": zeros, "sparsity": share})
    models = {"before recovery": recovery.before, "recovered": recovery.after, "teacher": recovery.teacher}
    rows = {name: {recovery.metric: getattr(figures, recovery.metric)} for name, figures in models.items()}
    pruned, more = {}, {}  # settings of ``prunus prune`` or ``prunus shrink``, where that wrote the source
    with suppress(ValueError, OSError, KeyError):
        result = read_json(part / "result.json")
        pruned = dict(result["settings"])
        more = {"sizes": dict(result["sizes"]), "removed": list(result["removed"])}
    teacher = f" from {Path(settings['teacher']).name}" if settings.get("teacher") else ""
    learned = f"{recovery.tokens:,} tokens{teacher}, learning rate {recovery.lr:g}"
    data = {name: settings[name] for name in DATA if settings.get(name)}
    return CardFacts(out.name, layers, str(source or ""), rows, pruned | data | {"recovery": learned}, **more)
