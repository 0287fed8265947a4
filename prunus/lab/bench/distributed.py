"""An event and a step by many ranks: FSDP2 over gloo on CPUs, and the one-rank path over NCCL on a GPU."""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from ...ops.part import Part
from ...schedule import Ramp
from ...shard import Ranks
from ...stats import score_of, sources
from ...threshold import cut
from ...training import Event, Pruner
from .measure import median_ms, timed

RANKS = (1, 2, 4)
TOKENS = 64  # rows of the batch of each rank
EVENTS = 7


def model_of(layers: int, dim: int, device: torch.device) -> nn.Module:
    """Linear layers with a residual path, as plain as a training step allows."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(dim, dim, bias=False, device=device) for _ in range(layers))


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """Every layer is a group of its own, over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return model


def step_of(model: nn.Module, optimizer: AdamW, x: Tensor) -> Callable[[], None]:
    """One training step."""

    def step() -> None:
        y = x
        for layer in model.children():
            y = y + 0.1 * layer(y)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pruned(model: nn.Module, sparsity: float, events: list[Event]) -> tuple[AdamW, Pruner]:
    """An optimizer, and a Pruner whose events are called by hand."""
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = Ramp(sparsity, 10**6, 10**6 + EVENTS, shape="linear")
    return optimizer, Pruner(model, optimizer, schedule=schedule, every=10**9, on_event=events.append)


def events_ms(pruners: list[Pruner], device: torch.device) -> list[float]:
    """Median milliseconds of an event of each Pruner, in turns; each event prunes some more."""
    times: list[list[float]] = [[] for _ in pruners]
    for number in range(1, EVENTS + 1):
        for pruner, found in zip(pruners, times, strict=True):
            pruner.step = 10**6 + number
            found.append(1e3 * timed(pruner.update, device)[0])
            pruner.step = 0
    return [statistics.median(found[1:]) for found in times]


def interleaved_ms(arms: list[Callable[[], None]], repeat: int, device: torch.device) -> list[float]:
    """Median milliseconds of each arm, which take turns."""
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(repeat + 1):
        for arm, found in zip(arms, times, strict=True):
            found.append(1e3 * timed(arm, device)[0])
    return [statistics.median(found[1:]) for found in times]


def row_of(layers: int, dim: int, sparsity: float, repeat: int, device: torch.device) -> dict[str, Any]:
    """Event, bytes and step of this rank, against the same training without pruning."""
    plain, model = (sharded(model_of(layers, dim, device), device) for _ in range(2))
    events: list[Event] = []
    optimizer, pruner = pruned(model, sparsity, events)
    x = torch.randn(TOKENS, dim, device=device)
    arms = [step_of(plain, AdamW(plain.parameters(), lr=1e-4, fused=True), x), step_of(model, optimizer, x)]
    for arm in arms:
        arm()
    [milliseconds] = events_ms([pruner], device)
    plain_ms, pruned_ms = interleaved_ms(arms, repeat, device)
    return {
        "ranks": dist.get_world_size(),
        "event_ms": milliseconds,
        "bytes_exchanged": statistics.median(event.bytes_exchanged for event in events),
        "plain_step_ms": plain_ms,
        "pruned_step_ms": pruned_ms,
        "digest": pruner.digest(),
    }


def _rank(rank: int, world: int, folder: str, asked: tuple[int, int, float, int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet{world}", rank=rank, world_size=world)
    found = row_of(*asked, torch.device("cpu"))
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def bench_ranks(layers: int, dim: int, sparsity: float, repeat: int) -> list[dict[str, Any]]:
    """A row for each number of gloo ranks, one thread each; no row unless all found the same masks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in RANKS:
            mp.start_processes(_rank, (world, folder, (layers, dim, sparsity, repeat)), world, start_method="fork")
            rows.append(json.loads(Path(folder, f"{world}.json").read_text()))
    if len({row["digest"] for row in rows}) > 1:
        raise RuntimeError("numbers of ranks found different masks, so no speed is reported")
    return rows


def bench_one_rank(layers: int, dim: int, sparsity: float, repeat: int, device: torch.device) -> list[dict[str, Any]]:
    """The one-rank path over a process group beside the plain one, and a cut by counts as sharded ranks make it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        plain = [model_of(layers, dim, device) for _ in range(2)]
        first = pruned(plain[1], sparsity, [])
        dist.init_process_group(backend, f"file://{folder}/meet", rank=0, world_size=1)
        alone = [sharded(model_of(layers, dim, device), device) for _ in range(2)]
        second = pruned(alone[1], sparsity, [])
        x = torch.randn(TOKENS, dim, device=device)
        dense = [AdamW(model.parameters(), lr=1e-4, fused=True) for model in (plain[0], alone[0])]
        arms = [(plain[0], dense[0]), (plain[1], first[0]), (alone[0], dense[1]), (alone[1], second[0])]
        steps = [step_of(model, optimizer, x) for model, optimizer in arms]
        for step in steps:
            step()
        events = events_ms([first[1], second[1]], device)
        taken = interleaved_ms(steps, repeat, device)
        ways = ("plain", f"FSDP2 on one rank, {backend}")
        rows: list[dict[str, Any]] = [
            {"way": way, "event_ms": event, "plain_step_ms": without, "pruned_step_ms": with_masks}
            for way, event, without, with_masks in zip(ways, events, taken[::2], taken[1::2], strict=True)
        ]
        rows.append(_by_counts(first[1], sparsity, repeat, device))
        dist.destroy_process_group()
    return rows


def _by_counts(pruner: Pruner, sparsity: float, repeat: int, device: torch.device) -> dict[str, Any]:
    """The next cut of all weights as a rank among many makes it: what it costs a rank beside the links."""
    assert dist.group.WORLD is not None
    ranks = Ranks([dist.group.WORLD], [dist.group.WORLD])
    weights = pruner._eligible.weights
    parts = {
        w.name: Part(tuple(w.parameter.shape), (0,) * w.parameter.ndim, tuple(w.parameter.shape), True, ranks)
        for w in weights
    }
    made = sources(weights, pruner.optimizer, score_of("bitter7", {}), {}, more={}, parts=parts)
    num_drop = round((1 + sparsity) / 2 * sum(source.numel for source in made))

    def event() -> None:
        ranks.num_sums = ranks.num_bytes = 0
        cut(made, num_drop, pruner._held.bits, pruner._held.num_kept)

    milliseconds = median_ms(event, repeat, device, lambda: None)
    counted = {"num_sums": ranks.num_sums, "bytes_exchanged": ranks.num_bytes}
    times = {"event_ms": milliseconds, "plain_step_ms": None, "pruned_step_ms": None}
    return {"way": "cut by counts, one rank"} | times | counted
