"""The work of ``prunus shrink``: the model made smaller, compared with the dense one, written, and tables of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..export.card import SIZES
from ..lab.checkpoint import checkpoint_of
from ..lab.parallel import Team
from ..oneshot import ExpertLayer, ShrinkResult, shrink
from ..oneshot.cuts import Cuts
from ..oneshot.disk_offload import disk_offload_of
from ..oneshot.originals import Originals
from ..oneshot.resources import FAILURES
from ..oneshot.shrink_result import ShrunkLayer
from ..recovery import Recovery
from ..trained.model import ModelSource, TrainedModel
from ..trained.speed import Speed, compare_speed
from .console import print, table_of, wide_console
from .model_work import (
    Measure,
    cost_figures,
    loaded,
    offload_device,
    print_written,
    publish,
    working,
    write_folder,
)
from .shrink import WANTED, Command

WORST = 5  # layers that are shown unless all are


@dataclass(frozen=True)
class ShrinkOutcome:
    """A model that was shrunk, and the figures."""

    model: TrainedModel
    result: ShrinkResult
    rows: dict[str, dict[str, float]]  # parameters, sparsity and metric of each model
    speed: Speed | None = None
    recovery: Recovery | None = None


def work(command: Command, team: Team) -> None:
    with working(command, team):
        outcome = _shrunk(command, team)
        if outcome is None:
            return
        sizes = {"before": asdict(outcome.result.before), "after": asdict(outcome.result.after)}
        figures = _figures(outcome) | {"sizes": sizes}
        write_folder(command, outcome.model, figures, sizes=sizes, removed=outcome.result.removed)
    _print_result(outcome, every_layer=command.every_layer)
    if not (command.out / "config.json").is_file():
        print("The weights have the smaller model's shapes: build the model with these before load_state_dict.")
    print_written(command, outcome.result.cost, outcome.recovery, "shrunk")
    publish(command)


def _no_checkpoint(source: ModelSource) -> TrainedModel | None:
    if (path := checkpoint_of(Path(source.model))).exists():
        raise ValueError(
            f"{path} is a checkpoint of prunus train, which rebuilds the model from its settings and could not load a "
            "smaller one; shrink the model in Python: prunus.shrink(model, batches, size=0.7)"
        )
    return None


def _shrunk(command: Command, team: Team) -> ShrinkOutcome | None:
    """The model, shrunk, tuned and recovered, and measured after each step; None on all ranks but the first."""
    trained, recover = loaded(command, _no_checkpoint)
    model, measure = trained.model, Measure(command, trained, team)

    def row() -> dict[str, float]:
        return {"parameters": sum(p.numel() for p in model.parameters())} | measure()

    rows = {"dense": row()}
    wanted: dict[str, Any] = {name: getattr(command, name) for name in (*WANTED, "split")}
    result = _result(command, trained, "solved", **wanted, group=team.size > 1 or None)
    if not team.is_first:
        return None
    rows["solved" if result.layers else "shrunk"] = row()
    if command.tune:  # which solves block after block too, each on inputs from tuned ones
        solved = result
        solved.undo_()
        if solved.mixtures:
            best = min(solved.mixtures, key=lambda one: one.distance)
            wanted |= {"layers": best.layers or None, "split": "even"}
        result = _result(command, trained, "tuned", **wanted, tune=True)
        result.mixtures = solved.mixtures
        result.cost.add_(solved.cost)
        del solved
        rows["tuned"] = row()
    speed = None if command.offload or disk_offload_of(model) else _speed(trained, result)
    recovery = None
    if recover is not None:
        recovery = recover(result.dense())
        rows["recovered"] = row()
    result.level.originals, result.cuts, result.removals = Originals(), Cuts(), ()  # of the dense model
    return ShrinkOutcome(trained, result, rows, speed, recovery)


def _result(command: Command, trained: TrainedModel, state: str, **wanted: Any) -> ShrinkResult:
    how = {"targets": command.targets, "batch_size": command.batch or None, "state": command.unfinished / state}
    return shrink(trained.model, trained.batches, offload=offload_device(command, trained), **how, **wanted)


def _speed(trained: TrainedModel, result: ShrinkResult) -> Speed | None:
    """How fast both models run; None, and the reason is printed, where that cannot be measured."""
    try:
        return compare_speed(trained.model, trained.batches, {"dense": result.undo_, "shrunk": result.apply_})
    except FAILURES as error:
        result.apply_()
        print(f"Speed was not measured: {' '.join(str(error).split())[:200]}")
        return None


def _figures(outcome: ShrinkOutcome) -> dict[str, Any]:
    result = outcome.result
    layers = []
    for layer in result.layers:
        values = asdict(layer) | {"num_kept": len(layer.kept), "sparsity": 1 - len(layer.kept) / layer.num}
        layers.append({key: value for key, value in values.items() if key != "kept"})
    figures = {"rows": outcome.rows, "layers": layers, "removed": result.removed}
    figures |= {"experts": [asdict(layer) for layer in result.experts]} if result.experts else {}
    figures |= {"dropped": result.dropped.names} if result.dropped else {}
    figures |= {"mixtures": [asdict(one) for one in result.mixtures]} if result.mixtures else {}
    figures |= {"speed": asdict(outcome.speed)} if outcome.speed else {}
    return figures | cost_figures(result.cost, outcome.recovery)


def _print_result(outcome: ShrinkOutcome, *, every_layer: bool) -> None:
    """Tables of sizes, layers and experts that lost something, and models."""
    result, console = outcome.result, wide_console()
    print(f"Removed: {', '.join(result.removed)}.")
    console.print(_sizes(outcome))
    if result.layers:
        console.print(_layers(result.layers, every_one=every_layer))
    if result.experts:
        console.print(_experts(result.experts, every_one=every_layer))
    console.print(_models(outcome))
    print(*result.notes)
    if zeros := outcome.rows["dense"]["sparsity"]:
        print(f"{zeros:.4%} of the weights were zero before; they are zero still where their units stay.")


def _sizes(outcome: ShrinkOutcome) -> Table:
    rows, before, after = [], outcome.result.before, outcome.result.after
    for key, text in SIZES.items():
        dense, shrunk = getattr(before, key), getattr(after, key)
        rows.append((text, f"{dense:,}", f"{shrunk:,}", f"{shrunk / max(1, dense):.3f}"))
    if (speed := outcome.speed) is not None:
        dense, shrunk = (speed.per_second[name] for name in ("dense", "shrunk"))
        rows.append((f"{speed.unit} a second", f"{dense:,.1f}", f"{shrunk:,.1f}", f"{shrunk / dense:.3f}"))
    return table_of("size", ("", "dense", "shrunk", "ratio"), rows)


def _layers(layers: Sequence[ShrunkLayer], *, every_one: bool) -> Table:
    """The layers with the largest errors, or all in their order."""
    shown = list(layers) if every_one else sorted(layers, key=lambda layer: -(layer.error or 0.0))[:WORST]
    which = "each layer" if len(shown) == len(layers) else f"the {WORST} worst layers (--every-layer shows all)"
    rows = []
    for layer in shown:
        errors = ("" if error is None else f"{error:.4f}" for error in (layer.mask_error, layer.error))
        units = {"heads": "head groups"}.get(layer.kind, layer.kind)
        rows.append((layer.name, units, f"{len(layer.kept):,} of {layer.num:,}", *errors))
    headings = ("layer", "units", "kept", "error before solving", "error after solving")
    return table_of(f"relative error of the outputs of {which}", headings, rows)


def _experts(layers: Sequence[ExpertLayer], *, every_one: bool) -> Table:
    """Which experts of each layer went, by their importance; ``every_one`` shows that of the others too."""

    def listed(layer: ExpertLayer, numbers: Sequence[int]) -> str:
        return ", ".join(f"{number} ({layer.importance[number]:.4g})" for number in numbers)

    rows = []
    for layer in layers:
        stay = [layer.importance[number] for number in layer.kept]
        shown = listed(layer, layer.kept) if every_one else f"{min(stay):.4g} to {max(stay):.4g}"
        number = f"{len(layer.dropped)} of {len(layer.importance)}"
        rows.append((layer.name, number, listed(layer, layer.dropped), shown))
    title = "removed experts (importance: router weight times norm of output, mean over tokens)"
    texts = ("removed", "importance of the kept ones")
    return table_of(title, ("layer", "number", *texts), rows, texts=texts)


def _models(outcome: ShrinkOutcome) -> Table:
    metric, has_zeros = outcome.model.metric, any(row["sparsity"] for row in outcome.rows.values())
    rows = [
        (
            "as it came" if name == "dense" and row["sparsity"] else name,
            f"{row['parameters']:,}",
            *([f"{row['sparsity']:.4%}"] if has_zeros else []),
            f"{row[metric]:.4f}",
        )
        for name, row in outcome.rows.items()
    ]
    return table_of("on held-out data", ("model", "parameters", *(["sparsity"] if has_zeros else []), metric), rows)
