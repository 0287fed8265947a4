"""A trained run as other commands take it: its checkpoint to prune, or as a folder of weights with run.json."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..export.convert import Exported, ExportJob, to_folder
from ..files.checksum import hexadecimal
from ..files.json_file import read_json, to_json, write_json
from ..files.one_line import in_one_line
from ..files.reader import open_tensors
from ..files.sparse_file import check_pruned, in_memory, loaded
from ..files.torch_file import write_torch_file
from ..files.writer import Saved
from ..oneshot.progress import progress_line
from ..trained.model import ModelSource, TrainedModel, save_small
from .checkpoint import checkpoint_of, load_checkpoint
from .data.batches import ImageShape, TokenShape
from .evaluate import loss_of
from .models import MODELS, build
from .run import Run, run_of
from .trainer import Training


def export_checkpoint(path: Path, job: ExportJob) -> Exported:
    """Write the model of a checkpoint to a new folder, with the run that made it.

    A non-zero weight where the checkpoint's mask says pruned is refused. Optimizer and masks are left out.
    """
    state = load_checkpoint(path)
    tensors: dict[str, Tensor] = state["model"]
    for name, packed in ((state["pruner"] or {}).get("masks") or {}).items():
        check_pruned(name, tensors[name], packed)
    source = in_memory(tensors)
    before = sum(tensors[name].nbytes for name in source.specs)  # not the file's bytes: most are the optimizer's
    return to_folder(source, job, before, str(path), lambda part: describe(state, part))


def describe(state: Mapping[str, Any], folder: Path) -> None:
    """Write run.json, from which the model of a checkpoint is built again."""
    shape = _shape(state["run"]["model"], {name: tuple(tensor.shape) for name, tensor in state["model"].items()})
    description = {"run": state["run"], "step": state["step"], "shape": shape}
    description["crc32"] = hexadecimal(to_json(description).encode())
    write_json(folder / "run.json", description)


def described(folder: Path) -> tuple[Run, int, dict[str, Any]]:
    """The run, the step and the shape of the data of a model that ``export_checkpoint`` wrote."""
    path = folder / "run.json"
    try:
        values = read_json(path)
        if values.pop("crc32") != hexadecimal(to_json(values).encode()):
            raise ValueError("it does not match its checksum; export the run again")
        if not isinstance(values["step"], int) or not isinstance(values["shape"], dict):
            raise ValueError("its step or its data shape is damaged")
        return run_of(values, path), values["step"], values["shape"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} does not describe a model: {error}") from error


def load_exported(folder: Path, device: torch.device | str = "cpu") -> nn.Module:
    run, _, shape = described(folder)
    with open_tensors(folder) as tensors:
        shapes = {name: record.layout.shape for name, record in tensors.records.items()}
        unfit = (KeyError, IndexError, TypeError, RuntimeError)
        with in_one_line(f"{folder / 'run.json'} does not describe the model beside it", *unfit):
            if shape != _shape(run.model, shapes):  # before memory is taken for what it says
                raise ValueError("its data shape does not match its tensors")
            kind = TokenShape if MODELS[run.model] == "tokens" else ImageShape
            model = build(run.model, kind(**shape), run.width, run.layers).to(device)
            model.load_state_dict(loaded(tensors, device))
    return model.eval()


def _shape(model: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    if MODELS[model] == "tokens":
        return {"vocab_size": shapes["embedding.weight"][0], "context": shapes["positions.weight"][0]}
    matrices = [shape for shape in shapes.values() if len(shape) > 1]
    size = 224 if matrices[0][-1] == 7 else 32  # only the stem depends on it: 7 x 7 for large images
    return {"channels": matrices[0][1], "size": size, "num_classes": matrices[-1][0]}


def from_checkpoint(source: ModelSource) -> TrainedModel | None:
    """The model of a checkpoint, calibrated on its training data and evaluated on its held-out data, or None."""
    path = checkpoint_of(Path(source.model))
    if not path.exists():
        return None
    if source.offload:
        raise ValueError(f"{path} is a prunus checkpoint, which is loaded as a whole; leave off --offload")
    state = load_checkpoint(path)
    run = replace(Run.from_json(state["run"]), compile=False, device=source.device)
    if source.eval_windows is not None:
        run = replace(run, eval_size=source.eval_windows)
    training = Training(run, trains=False)
    training.load_weights(state["model"])
    batch = training.data.train.batch(0, source.samples, source.seed)
    images = training.data.shape.kind == "images"

    def evaluate(model: nn.Module) -> float:
        with progress_line(None, "evaluate") as show:
            quality = training.evaluate(show)
        return quality.accuracy if images else quality.perplexity

    def save(out: Path, *, small: bool = False) -> Saved | None:
        if not small:
            write_torch_file(out / "checkpoint.pt", state | {"model": training.model.state_dict()})
            return None
        saved = save_small(training.model, out)
        describe(state, out)
        return saved

    metric = "accuracy" if images else "perplexity"
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    order = [names[parameter] for group in training.optimizer.param_groups for parameter in group["params"]]
    rows = state["optimizer"]["state"].items()
    moments = {order[i]: row["exp_avg_sq"] for i, row in rows if "exp_avg_sq" in row}
    return TrainedModel(training.model, [batch], evaluate, save, loss_of, metric, moments, training.held_out)
