"""``prunus prune``"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from ..oneshot import Probe, Result
    from ..select import Selector


@dataclass(frozen=True)
class Command:
    """Prune a trained model in one shot, with or without the gradient probe, and say what that cost on held-out data.

    The probe keeps some of what the strategy would prune, so the sparsity ends lower, unless tau is target. Beside the
    result stand the dense model and the strategy alone at the same sparsity and scope.
    """

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a checkpoint of prunus, or module:function
    out: Path  # folder to write; it must not exist
    tokens: Path | None = None  # calibration tokens (uint16) for a Hugging Face folder
    eval_tokens: Path | None = None  # held-out tokens for it
    score: Literal["magnitude", "wanda", "fisher", "path", "random"] = "wanda"  # what makes a weight matter
    scope: Literal["auto", "row", "layer", "global", "2:4"] = (
        "auto"  # what is compared; auto: row for wanda, else global
    )
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    probe: Literal["none", "sequential", "block", "joint", "jacobi"] = "none"  # schedule of the probe
    tau: str = "1.0"  # increase of the gradient allowed: a number, adaptive, or target
    order: Literal["reverse", "forward", "size"] = "reverse"  # in which weights or blocks are probed
    reduction: float = 0.1  # what candidates are reduced to
    zero_gradient: Literal["prune", "keep"] = "prune"  # candidates without any gradient
    samples: int = 32  # calibration windows
    length: int = 0  # tokens a window; 0 takes 256, or the model's longest
    eval_windows: int = 0  # held-out windows; 0 takes all
    seed: int = 0  # which calibration windows
    include: tuple[str, ...] = ()  # patterns of weights to prune that are not by default
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    batch: int = 0  # rows a pass; 0 finds what memory allows
    gguf_file: str | None = None  # file in the folder to read the weights from
    dtype: str = "auto"  # auto keeps the model's own
    device: str = "cpu"  # cpu or cuda


def run(command: Command) -> None:
    if command.out.exists():
        raise ValueError(f"{command.out} is there already; choose another --out")
    if not 0 <= command.sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), got {command.sparsity}")
    _write(command, *_pruned(command))


def _pruned(command: Command) -> "tuple[Any, Result, dict[str, Any]]":
    """The subject, pruned, and the figures."""
    from ..lab.subject import Request, subject_of
    from ..oneshot import prune

    request = Request(
        command.model,
        command.tokens,
        command.eval_tokens,
        command.samples,
        command.length,
        command.eval_windows,
        command.seed,
        command.gguf_file,
        command.dtype,
        command.device,
    )
    probe, select = _probe(command), _selector(command.scope)
    subject = subject_of(request)
    settings: dict[str, Any] = {"score": command.score, "select": select, "loss": subject.loss}
    settings |= {"include": command.include, "exclude": command.exclude, "batch_size": command.batch or None}
    rows = {"dense": {"sparsity": 0.0, subject.metric: subject.evaluate(subject.model)}}
    with _bar(command.probe) as progress:
        result = prune(subject.model, subject.batches, command.sparsity, probe=probe, progress=progress, **settings)
    reached = {"sparsity": result.sparsity, subject.metric: subject.evaluate(subject.model)}
    if probe is not None:
        result.undo_()
        alone = prune(subject.model, subject.batches, result.sparsity, **settings)
        rows[f"{command.score} alone"] = {
            "sparsity": alone.sparsity,
            subject.metric: subject.evaluate(subject.model),
        }
        alone.undo_()
        result.apply_()
    rows["probed" if probe else command.score] = reached
    return subject, result, rows


def _probe(command: Command) -> "Probe | None":
    from ..oneshot import Probe

    if command.probe == "none":
        return None
    try:
        tau: Any = command.tau if command.tau in ("adaptive", "target") else float(command.tau)
    except ValueError:
        raise ValueError(f"tau must be a number, adaptive or target, got {command.tau!r}") from None
    return Probe(tau, command.order, command.probe, command.reduction, command.zero_gradient)


def _selector(scope: str) -> "Selector | None":
    from ..select import Global, NofM, PerLayer, PerRow

    return {"auto": None, "row": PerRow(), "layer": PerLayer(), "global": Global(), "2:4": NofM(2, 4)}[scope]


def _bar(title: str) -> Any:
    from .progress import weights_bar

    return weights_bar("prune" if title == "none" else f"probe, {title}")


def _write(command: Command, subject: Any, result: "Result", rows: dict[str, Any]) -> None:
    """The folder, whole or not at all, and the tables."""
    from dataclasses import asdict

    from ..lab.files import write_json

    part = command.out.with_name(command.out.name + ".part")
    part.mkdir(parents=True)
    try:
        subject.save(part)
        settings = {key: value for key, value in asdict(command).items() if key != "out"}
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in result.layers]
        figures = {"passes": result.passes, "seconds": result.seconds, "peak_bytes": result.peak_bytes}
        write_json(part / "result.json", _plain({"settings": settings, "rows": rows, "layers": layers} | figures))
        part.rename(command.out)
    except BaseException:
        import shutil

        shutil.rmtree(part, ignore_errors=True)
        raise
    _print(command, subject.metric, result, rows)


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _print(command: Command, metric: str, result: "Result", rows: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    layers = Table(title="what was pruned in each weight")
    for heading in ("weight", "shape", "proposed", "pruned", "sparsity", "no gradient", "not finite", "tau"):
        layers.add_column(heading, justify="left" if heading == "weight" else "right", no_wrap=True)
    for layer in result.layers:
        shape, tau = "x".join(map(str, layer.shape)), "" if layer.tau is None else f"{layer.tau:.4g}"
        counts = (f"{layer.num_candidates:,}", f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}")
        layers.add_row(layer.name, shape, *counts, str(layer.num_zero_gradient), str(layer.num_not_finite), tau)
    table = Table(title=f"{command.model}, on held-out data")
    for heading in ("model", "sparsity", metric):
        table.add_column(heading)
    for name, row in rows.items():
        table.add_row(name, f"{row['sparsity']:.4%}", f"{row[metric]:.4f}")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(layers)
    console.print(table)
    if command.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    print(f"{command.out}: written in {result.seconds:.1f} s of pruning, {result.passes:,} passes of one sample")
