"""``prunus shrink``: an ordinary smaller model of the same class, compared with the dense one and written."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tyro

from .console import print
from .model_options import ModelCommand, check_model_options
from .model_work import Measure, cost_figures, is_to_do, loaded, print_written, publish, working, write_folder

if TYPE_CHECKING:
    from ..oneshot import ShrinkResult
    from ..trained.model import ModelSource, TrainedModel
    from ..trained.speed import Speed
    from .shrink_tables import ShrinkOutcome

WANTED = ("size", "neurons", "heads", "layers", "experts", "multiple")


@dataclass(frozen=True, kw_only=True)
class Command(ModelCommand):
    """Make a trained model smaller: an ordinary model of its class, which runs without Prunus.

    Give --size, the share of the blocks' weights that stays, or say what goes: --neurons, --heads, --layers, --experts,
    each a fraction (0.25) or a number (4). What goes is chosen on calibration samples, block after block, and the
    weights that read the rest are solved anew. Killed, the same command goes on with the next layers.
    """

    name: ClassVar[str] = "shrink"

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a .gguf file, or module:function
    size: float | None = None  # share of the blocks' weights that stays: fewer neurons and head groups
    neurons: int | float | None = None  # to remove from each MLP, or channels from each block of a ResNet
    heads: int | float | None = None  # groups to remove from each attention: a key and value head with its query heads
    layers: int | float | None = None  # whole layers to remove
    experts: int | float | None = None  # to remove from each layer
    multiple: int = 1  # round the neurons that stay down to a multiple, as 64
    split: Literal["even", "measured"] = "even"  # measured: try mixtures of depth and width for --size, keep the best
    targets: Literal["own", "dense"] = "own"  # reproduce the outputs of each layer by itself, or the dense model's
    samples: int | None = None  # calibration windows; by default up to 512

    @property
    def num_samples(self) -> dict[str, Any]:
        return {"samples": 512, "at_most": True} if self.samples is None else {"samples": self.samples}


def run(command: Command) -> None:
    if not is_to_do(command, check):
        return
    from .shrink_tables import print_result

    with working(command):
        outcome = _shrunk(command)
        sizes = {"before": asdict(outcome.result.before), "after": asdict(outcome.result.after)}
        figures = _figures(outcome) | {"sizes": sizes}
        write_folder(command, outcome.model, figures, sizes=sizes, removed=outcome.result.removed)
    print_result(outcome, every_layer=command.every_layer)
    if not (command.out / "config.json").is_file():
        print("The weights have the shapes of the smaller model: build its class with them before load_state_dict.")
    print_written(command, outcome.result.cost, outcome.recovery, "shrunk")
    publish(command)


def check(command: Command) -> None:
    """Refuse options that make no sense before anything is loaded."""
    from ..oneshot.widths import Wanted

    wanted = {name: getattr(command, name) for name in WANTED}
    if all(value is None for name, value in wanted.items() if name != "multiple"):
        raise ValueError("say how much stays, --size 0.7, or what goes: --neurons, --heads, --layers or --experts")
    if command.split == "measured" and (command.size is None or command.layers is not None):
        raise ValueError("--split measured divides a size into depth and width; give --size and no --layers")
    if not Wanted(**wanted).has_width:
        for name in ("plot", "multiple"):
            if getattr(command, name) != getattr(Command, name):
                raise ValueError(f"without --size, --neurons or --heads nothing reads --{name}; leave it off")
    check_model_options(command)


def _no_checkpoint(source: "ModelSource") -> "TrainedModel | None":
    from ..lab.checkpoint import checkpoint_of

    if (path := checkpoint_of(Path(source.model))).exists():
        raise ValueError(
            f"{path} is a checkpoint of prunus train, whose class is built anew from the recipe, so that a smaller one "
            "could not be loaded again; shrink the model in Python: prunus.shrink(model, batches, size=0.7)"
        )
    return None


def _shrunk(command: Command) -> "ShrinkOutcome":
    """The model, shrunk, tuned and recovered where that was asked for, and measured after each step."""
    import torch

    from ..oneshot.cuts import Cuts
    from ..oneshot.originals import Originals
    from .shrink_tables import ShrinkOutcome

    trained, recover = loaded(command, _no_checkpoint)
    model, device = trained.model, torch.device(command.device)
    measure = Measure(command, trained, device)

    def row() -> dict[str, float]:
        return {"parameters": sum(p.numel() for p in model.parameters())} | measure()

    rows = {"dense": row()}
    wanted: dict[str, Any] = {name: getattr(command, name) for name in (*WANTED, "split")}
    result = _result(command, trained, device, "solved", **wanted)
    rows["solved" if result.layers else "shrunk"] = row()
    if command.tune:  # which solves block after block too, each on inputs from tuned ones
        solved = result
        solved.undo_()
        if solved.mixtures:
            best = min(solved.mixtures, key=lambda one: one.distance)
            wanted |= {"layers": best.layers or None, "split": "even"}
        result = _result(command, trained, device, "tuned", **wanted, tune=True)
        result.mixtures = solved.mixtures
        result.cost.add_(solved.cost)
        del solved
        rows["tuned"] = row()
    speed = None if command.offload else _speed(trained, result)
    recovery = None
    if recover is not None:
        recovery = recover(result.dense())
        rows["recovered"] = row()
    result.level.originals, result.cuts, result.removals = Originals(), Cuts(), ()  # of the dense model
    return ShrinkOutcome(trained, result, rows, speed, recovery)


def _result(command: Command, trained: "TrainedModel", device: Any, state: str, **wanted: Any) -> "ShrinkResult":
    from ..oneshot import shrink

    how = {"targets": command.targets, "batch_size": command.batch or None, "state": command.unfinished / state}
    return shrink(trained.model, trained.batches, offload=device if command.offload else None, **how, **wanted)


def _speed(trained: "TrainedModel", result: "ShrinkResult") -> "Speed | None":
    """How fast both models run; None, and the reason is printed, where that cannot be measured."""
    from ..oneshot.resources import FAILURES
    from ..trained.speed import compare_speed

    try:
        return compare_speed(trained.model, trained.batches, {"dense": result.undo_, "shrunk": result.apply_})
    except FAILURES as error:
        result.apply_()
        print(f"Speed was not measured: {' '.join(str(error).split())[:200]}")
        return None


def _figures(outcome: "ShrinkOutcome") -> dict[str, Any]:
    result = outcome.result
    layers = []
    for layer in result.layers:
        values = asdict(layer) | {"num_kept": len(layer.kept), "sparsity": 1 - len(layer.kept) / layer.num}
        layers.append({key: value for key, value in values.items() if key != "kept"})
    figures = {"rows": outcome.rows, "layers": layers, "removed": result.removed}
    figures |= {"experts": [asdict(layer) for layer in result.experts]} if result.experts else {}
    figures |= {"mixtures": [asdict(one) for one in result.mixtures]} if result.mixtures else {}
    figures |= {"speed": asdict(outcome.speed)} if outcome.speed else {}
    return figures | cost_figures(result.cost, outcome.recovery)
