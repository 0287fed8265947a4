"""``prunus bench``"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Command:
    """Measure a speed claim beside what it is compared with, in one process, and write the figures as JSON.

    select: finding masks. step: keeping them in a training step. page: docs/benchmarks.md from all results.
    """

    what: tyro.conf.Positional[Literal["select", "step", "page"]]  # what to measure
    layers: int = 12  # select: number of weights
    dim: int = 2048  # select: rows and columns of each
    score: str = "bitter7"  # select: what makes a weight matter
    sparsity: float = 0.5  # fraction removed
    tokens: tuple[int, ...] = (256, 2048)  # step: tokens a step
    repeat: int = 15  # calls or rounds that the median is taken over
    threads: int = 0  # CPU threads; 0 leaves torch's choice
    device: str = "cpu"  # cpu or cuda
    results: Path = Path("benchmarks/results")  # folder of the JSON files
    page: Path = Path("docs/benchmarks.md")  # page: file to write


def run(command: Command) -> None:
    import torch

    if command.what == "page":
        from ..lab.bench.page import page

        text = page(command.results)
        command.page.parent.mkdir(parents=True, exist_ok=True)
        command.page.write_text(text)
        print(f"{command.page} written")
        return
    if command.threads:
        torch.set_num_threads(command.threads)
    settings, rows = MEASURES[command.what](command, torch.device(command.device))
    _finish(command, settings, rows)


def _select(command: Command, device: "torch.device") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from ..lab.bench.select import bench_select, problem

    p = problem(command.layers, command.dim, command.score, command.sparsity, device)
    settings = {name: getattr(command, name) for name in ("layers", "dim", "score", "sparsity", "repeat")}
    return settings | {"num_weights": p.num_weights}, bench_select(p, command.repeat, device)


def _step(command: Command, device: "torch.device") -> tuple[dict[str, Any], list[dict[str, Any]]]:
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


MEASURES = {"select": _select, "step": _step}


def _finish(command: Command, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..lab.bench.measure import record

    table = Table(title=f"prunus bench {command.what}")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    print(f"written to {record(command.what, settings, rows, command.results)}")
