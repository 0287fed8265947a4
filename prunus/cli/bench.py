"""``prunus bench``"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ..lab.run import ModelName

if TYPE_CHECKING:
    import torch


What = Literal["select", "step", "train", "export", "matvec", "prune", "level", "distributed", "page"]


@dataclass(frozen=True)
class Command:
    """Measure a speed claim beside what it is compared with, in one process, and write the figures as JSON.

    select: finding masks. step: keeping them, on a CPU in a training step, on a GPU in the optimizer's step.
    train: whole training steps of GPT-2 124M. export: the small file form. matvec: products with a pruned weight.
    prune: WANDA and the gradient probe after training. level: a level of the probe on a random model of Mistral-7B's
    shape. distributed: 1, 2 and 4 ranks; on a GPU one beside none. page: docs/benchmarks.md and docs/distributed.md
    from all results.
    """

    what: tyro.conf.Positional[What]  # what to measure
    layers: int = 12  # select, step: number of weights; prune: how many of the model's are probed
    dim: int = 2048  # select, step: rows and columns of each
    shapes: Literal["gpt2", "mistral-7b"] | None = None  # select, step: a model's weights instead
    dtype: Literal["float32", "bfloat16"] = "float32"  # select, matvec: of weights and moments
    score: str = "bitter7"  # select: what makes a weight matter
    sparsity: float = 0.5  # fraction removed
    tokens: tuple[int, ...] = (256, 2048)  # step on a CPU: tokens a step
    data: str = "stdlib"  # train: what to read
    model: ModelName = "gpt2"  # train: network
    context: int = 1024  # train: tokens a window
    batch: int = 32  # train: windows a step
    compile: bool = True  # train: torch.compile the model
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # train: bfloat16 by autocast
    checkpoint: Path | None = None  # prune: Hugging Face folder; without it, random weights of stories15M's shape
    calibration: Path | None = None  # prune: its tokens; without it, random ones
    blocks: int = 32  # level: blocks of the model
    windows: int = 32  # prune, level: calibration windows
    length: int = 256  # prune, level: tokens of each
    megabytes: int = 256  # export: of the weight that is packed
    repeat: int = 15  # calls or rounds that the median is taken over
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    device: str = "cpu"  # cpu or cuda
    results: Path = Path("benchmarks/results")  # folder of the JSON files
    page: Path = Path("docs/benchmarks.md")  # page: file to write


def run(command: Command) -> None:
    _check(command)
    import torch

    from ..ops.machine import device_of

    if command.what == "page":
        from ..lab.bench.distributed_page import distributed_page
        from ..lab.bench.page import page

        text = page(command.results)
        command.page.parent.mkdir(parents=True, exist_ok=True)
        command.page.write_text(text)
        print(f"{command.page} written")
        if text := distributed_page(command.results):
            beside = command.page.with_name("distributed.md")
            beside.write_text(text)
            print(f"{beside} written")
        return
    if command.threads:
        torch.set_num_threads(command.threads)
    device = device_of(command.device)
    if command.what == "step" and device.type == "cuda":
        _finish(command, "update", *_update(command, device))
    else:
        _finish(command, command.what, *MEASURES[command.what](command, device))


def _check(command: Command) -> None:
    """Refuse sizes of which nothing could be measured."""
    from ..schedule import check_sparsity

    check_sparsity(command.sparsity)
    for name in ("layers", "dim", "tokens", "context", "batch", "blocks", "windows", "length", "megabytes", "repeat"):
        value = getattr(command, name)
        if min(value, default=0) < 1 if isinstance(value, tuple) else value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if command.threads < 0:
        raise ValueError(f"--threads must be at least 0, which leaves torch's choice, got {command.threads}")


Measured = tuple[dict[str, Any], list[dict[str, Any]]]


def _select(command: Command, device: "torch.device") -> Measured:
    import torch

    from ..lab.bench.measure import copy_gb_s
    from ..lab.bench.select import bench_select, problem
    from ..lab.bench.shapes import shapes_of

    shapes = shapes_of(command.shapes, command.layers, command.dim)
    p = problem(shapes, command.score, command.sparsity, device, getattr(torch, command.dtype))
    settings = {"score": command.score, "sparsity": command.sparsity, "repeat": command.repeat, "dtype": command.dtype}
    settings |= {"num_weights": p.num_weights, "weights": _said(command, shapes), "num_bytes": p.num_bytes}
    return settings | {"copy_gb_s": copy_gb_s(device)}, bench_select(p, command.repeat, device)


def _step(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.step import bench_step, size

    rows = [
        row
        for tokens in command.tokens
        for fused in (False, True)
        for row in bench_step(tokens, fused, command.repeat, command.sparsity, device)
    ]
    num_weights, num_prunable = size()
    settings = {"sparsity": command.sparsity, "repeat": command.repeat}
    return settings | {"num_weights": num_weights, "num_prunable": num_prunable}, rows


def _update(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.measure import copy_gb_s
    from ..lab.bench.shapes import shapes_of
    from ..lab.bench.update import bench_update

    shapes = shapes_of(command.shapes, command.layers, command.dim)
    settings = {"sparsity": command.sparsity, "repeat": command.repeat, "weights": _said(command, shapes)}
    settings |= {"num_weights": sum(a * b for a, b in shapes), "copy_gb_s": copy_gb_s(device)}
    return settings, bench_update(shapes, command.sparsity, command.repeat, device)


def _train(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.train import bench_train
    from ..lab.run import Run

    rounds = max(3, command.repeat // 3)
    base = Run(
        model=command.model,
        data=command.data,
        context=command.context,
        batch=command.batch,
        compile=command.compile,
        precision=command.precision,
        device=command.device,
        sparsity=command.sparsity,
        steps=50 * (rounds + 2),
        begin=1,
        end=50 * (rounds + 2),
    )
    settings = {name: getattr(base, name) for name in ("model", "context", "batch", "compile", "precision", "every")}
    return settings | {"sparsity": command.sparsity, "rounds": rounds}, bench_train(base, 51, rounds)


def _export(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.export import bench_export
    from ..lab.bench.measure import copy_gb_s

    settings = {"megabytes": command.megabytes, "repeat": command.repeat, "copy_gb_s": copy_gb_s(device)}
    return settings, bench_export(command.megabytes * 10**6, command.repeat, device)


def _matvec(command: Command, device: "torch.device") -> Measured:
    import torch

    from ..lab.bench.matvec import bench_matvec
    from ..lab.bench.measure import copy_gb_s

    settings = {"dtype": command.dtype, "repeat": command.repeat, "copy_gb_s": copy_gb_s(device)}
    return settings, bench_matvec(command.repeat, device, getattr(torch, command.dtype))


def _distributed(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.distributed import TOKENS, bench_one_rank, bench_ranks

    asked = (command.layers, command.dim, command.sparsity, command.repeat)
    settings = {"sparsity": command.sparsity, "repeat": command.repeat, "tokens": TOKENS}
    settings |= {"num_weights": command.layers * command.dim**2, "weights": _said(command, [])}
    rows = bench_ranks(*asked) if device.type == "cpu" else []
    return settings, rows + bench_one_rank(*asked, device)


def _said(command: Command, shapes: list[tuple[int, int]]) -> str:
    if command.shapes:
        return f"{len(shapes)} weights of {command.shapes}"
    return f"{command.layers} weights of {command.dim} x {command.dim}"


def _prune(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.prune import Place, bench_prune, head_share, probe_parts, task_of

    place = Place(command.checkpoint, command.calibration, device)
    task = task_of(place, command.windows, command.length, command.layers, command.sparsity)
    about = command.checkpoint.name if command.checkpoint else "random weights of the shape of stories15M"
    settings = {"model": about, "probed": len(task.names), "sparsity": command.sparsity}
    settings |= {"windows": command.windows, "length": command.length, "head_share": head_share(task)}
    rows = bench_prune(task, command.repeat, device)
    return settings | {"parts": probe_parts(task, device)}, rows


def _level(command: Command, device: "torch.device") -> Measured:
    from ..lab.bench.level import SHAPE, bench_level, level_of

    level = level_of(command.blocks, command.windows, command.length, device)
    settings = {"blocks": command.blocks, "windows": command.windows, "length": command.length, **SHAPE}
    settings |= {"sparsity": command.sparsity, "num_weights": sum(p.numel() for p in level.model.parameters())}
    return settings, bench_level(level, command.sparsity, device)


MEASURES = {
    "select": _select,
    "step": _step,
    "train": _train,
    "export": _export,
    "matvec": _matvec,
    "prune": _prune,
    "level": _level,
    "distributed": _distributed,
}


def _finish(command: Command, what: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from ..lab.bench.measure import record
    from .progress import wide_console

    table = Table(title=f"prunus bench {what}")
    headings = list(dict.fromkeys(name for row in rows for name in row))
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        values = [row.get(heading, "") for heading in headings]
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    wide_console().print(table)
    print(f"written to {record(what, settings, rows, command.results)}")
