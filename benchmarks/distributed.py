"""An event and a step by many ranks: FSDP2 over gloo on CPUs, and the one-rank path over NCCL on a GPU.

The figures stand in ``docs/distributed.md`` below a guide that is written by hand.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from prunus import Event, Pruner, Ramp
from prunus.ops.machine import device_of
from prunus.ops.shard import Shard
from prunus.ranks import Ranks
from prunus.statistics import score_of, sources
from prunus.threshold import cut

from .benchmark import Benchmark, Measured, Record, Row, newest_records, section, table_of
from .measure import median_ms, median_ms_in_turns, timed
from .select import shapes_of

RANKS = (1, 2, 4)
TOKENS = 64  # rows of the batch of each rank
EVENTS = 7


@dataclass(frozen=True, kw_only=True)
class Command(Benchmark):
    """Prune on 1, 2 and 4 ranks of a CPU, or on one rank of a GPU beside no process group."""

    layers: int = 12  # number of weights
    dim: int = 2048  # rows and columns of each
    sparsity: float = 0.5  # fraction removed
    repeat: int = 15  # steps that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        settings = {"sparsity": self.sparsity, "repeat": self.repeat, "tokens": TOKENS}
        settings |= {"num_weights": self.layers * self.dim**2, "weights": shapes_of(None, self.layers, self.dim)[1]}
        rows = measure_ranks(self) if device.type == "cpu" else []
        return "distributed", settings, rows + measure_one_rank(self, device)


def model_of(command: Command, device: torch.device) -> nn.Module:
    """Linear layers with a residual path, as plain as a training step allows."""
    torch.manual_seed(0)
    layers = range(command.layers)
    return nn.ModuleList(nn.Linear(command.dim, command.dim, bias=False, device=device) for _ in layers)


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


def row_of(command: Command, device: torch.device) -> Row:
    """Event, bytes and step of this rank, against the same training without pruning."""
    plain, model = (sharded(model_of(command, device), device) for _ in range(2))
    events: list[Event] = []
    optimizer, pruner = pruned(model, command.sparsity, events)
    x = torch.randn(TOKENS, command.dim, device=device)
    arms = [step_of(plain, AdamW(plain.parameters(), lr=1e-4, fused=True), x), step_of(model, optimizer, x)]
    for arm in arms:
        arm()
    [milliseconds] = events_ms([pruner], device)
    plain_ms, pruned_ms = median_ms_in_turns(arms, command.repeat, device)
    return {
        "ranks": dist.get_world_size(),
        "event_ms": milliseconds,
        "bytes_exchanged": statistics.median(event.bytes_exchanged for event in events),
        "plain_step_ms": plain_ms,
        "pruned_step_ms": pruned_ms,
        "digest": pruner.digest(),
    }


def _rank(rank: int, world: int, folder: str, command: Command) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet{world}", rank=rank, world_size=world)
    found = row_of(command, torch.device("cpu"))
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_ranks(command: Command) -> list[Row]:
    """A row for each number of gloo ranks, one thread each; RuntimeError unless all found the same masks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in RANKS:
            mp.start_processes(_rank, (world, folder, command), world, start_method="fork")
            rows.append(json.loads(Path(folder, f"{world}.json").read_text()))
    if len({row["digest"] for row in rows}) > 1:
        raise RuntimeError("numbers of ranks found different masks, so no speed is reported")
    return rows


def measure_one_rank(command: Command, device: torch.device) -> list[Row]:
    """The one-rank path over a process group beside the plain one, and a cut by counts as sharded ranks make it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        plain = [model_of(command, device) for _ in range(2)]
        first = pruned(plain[1], command.sparsity, [])
        dist.init_process_group(backend, f"file://{folder}/meet", rank=0, world_size=1)
        alone = [sharded(model_of(command, device), device) for _ in range(2)]
        second = pruned(alone[1], command.sparsity, [])
        x = torch.randn(TOKENS, command.dim, device=device)
        dense = [AdamW(model.parameters(), lr=1e-4, fused=True) for model in (plain[0], alone[0])]
        arms = [(plain[0], dense[0]), (plain[1], first[0]), (alone[0], dense[1]), (alone[1], second[0])]
        steps = [step_of(model, optimizer, x) for model, optimizer in arms]
        for step in steps:
            step()
        events = events_ms([first[1], second[1]], device)
        taken = median_ms_in_turns(steps, command.repeat, device)
        ways = ("plain", f"FSDP2 on one rank, {backend}")
        rows: list[Row] = [
            {"way": way, "event_ms": event, "plain_step_ms": without, "pruned_step_ms": with_masks}
            for way, event, without, with_masks in zip(ways, events, taken[::2], taken[1::2], strict=True)
        ]
        rows.append(_by_counts(first[1], command, device))
        dist.destroy_process_group()
    return rows


def _by_counts(pruner: Pruner, command: Command, device: torch.device) -> Row:
    """The next cut of all weights as a rank among many makes it: what it costs a rank beside the links."""
    assert dist.group.WORLD is not None
    ranks = Ranks([dist.group.WORLD], [dist.group.WORLD])
    weights = pruner._eligible.weights
    shards = {
        w.name: Shard(tuple(w.parameter.shape), (0,) * w.parameter.ndim, tuple(w.parameter.shape), True, ranks)
        for w in weights
    }
    made = sources(weights, pruner.optimizer, score_of("bitter7", {}), {}, more={}, shards=shards)
    num_drop = round((1 + command.sparsity) / 2 * sum(source.numel for source in made))

    def event() -> None:
        ranks.num_sums = ranks.num_bytes = 0
        cut(made, num_drop, pruner._store.bits, pruner._store.num_kept)

    row = {"way": "cut by counts, one rank", "event_ms": median_ms(event, command.repeat, device)}
    row |= {"plain_step_ms": None, "pruned_step_ms": None}
    return row | {"num_sums": ranks.num_sums, "bytes_exchanged": ranks.num_bytes}


LATENCY_US = 100.0  # of a small all-reduce over 8 nodes of 8 GPUs
LINK_GB_S = 50.0  # of a 400 Gb/s link a GPU
WEIGHTS, GPUS = 70_000_000_000, 64

MARK = "<!-- What follows is written by python -m benchmarks page. -->\n"
SETTING = """{num_weights:,} weights ({weights}), bitter7 to {sparsity:.0%} in seven events, FSDP2 with every layer a \
group, {tokens} rows a rank; medians of up to {repeat} steps that take turns with those of the same training without \
pruning. """
READING = '"Cut by counts" is the way of many ranks, taken by one. Bytes are what a rank hands to all-reduces.\n'
SHARED = "One thread a rank. All numbers of ranks ended with one digest. "
ALONE = "With so few rows a step is memory traffic and launches by the host, so that overheads show most. "


def page(folder: Path, before: str = "") -> str | None:
    """The page ``before`` with its figures, which follow its guide, written anew; None where nothing was measured."""
    records = [record for record in newest_records(folder) if record["what"] == "distributed"]
    if not records:
        return None
    return "\n".join([before.partition(MARK)[0] + MARK, *map(_measured, records), _projection(records)])


def _measured(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        with_, without = row["pruned_step_ms"], row["plain_step_ms"]
        shown = {"bytes_exchanged": 0, "overhead": None if without is None else with_ / without - 1}
        rows.append({"way": f"{row['ranks']} ranks, gloo"} | shown | row if "ranks" in row else shown | row)
    columns = {"way": "way", "event ms": "event_ms:.2f", "bytes": "bytes_exchanged:,.0f"}
    columns |= {"step without, ms": "plain_step_ms:.2f", "step with, ms": "pruned_step_ms:.2f"}
    body = table_of(rows, columns | {"overhead": "overhead:+.1%"})
    if any("ranks" in row for row in rows):
        return section("Measured on a CPU, over gloo", record, SETTING + SHARED + READING, body)
    plain, alone = rows[:2]
    added = [row["pruned_step_ms"] - row["plain_step_ms"] for row in (alone, plain)]
    body += (
        "\n\nAgainst the plain way an event over the process group differs by "
        f"{alone['event_ms'] / plain['event_ms'] - 1:+.1%}; pruning adds "
        f"{added[0]:.2f} ms to its step, {added[1]:.2f} ms to the plain one. "
        "What FSDP2 itself adds to a step is in both columns.\n"
    )
    return section("Measured on a GPU, one rank over NCCL", record, SETTING + ALONE + READING, body)


def _projection(records: list[Record]) -> str:
    """What an event costs at 70 B weights on 64 GPUs, from the cut by counts as it was measured."""
    lines = []
    for record in records:
        if not any("nccl" in row.get("way", "") for row in record["rows"]):
            continue  # a CPU says nothing about GPUs
        row = next(row for row in record["rows"] if row.get("num_sums"))
        a_rank = WEIGHTS / GPUS
        read = row["event_ms"] / record["settings"]["num_weights"] * a_rank
        wait = row["num_sums"] * LATENCY_US / 1e3
        sent = 2 * (GPUS - 1) / GPUS * row["bytes_exchanged"] / LINK_GB_S / 1e6
        num, took, size = record["settings"]["num_weights"], row["event_ms"], row["bytes_exchanged"]
        lines.append(
            f"On {record['environment']['machine']} a cut by counts of {num:,} weights took {took:.2f} ms, "
            f"{row['num_sums']} all-reduces and {size:,} bytes. At {WEIGHTS / 1e9:.0f} B weights on {GPUS} of them:\n\n"
            f"- a rank reads {WEIGHTS / 1e9:.0f} B / {GPUS} = {a_rank / 1e9:.3f} B weights: "
            f"{took:.2f} ms x {a_rank:,.0f} / {num:,} = {read:,.1f} ms\n"
            f"- it waits for {row['num_sums']} all-reduces of {LATENCY_US:.0f} us each: {wait:.2f} ms\n"
            f"- it sends 2 x {GPUS - 1}/{GPUS} x {size:,} bytes at {LINK_GB_S:.0f} GB/s: {sent:.4f} ms\n\n"
            f"together {read + wait + sent:,.1f} ms an event; "
            f"every 50 steps, {(read + wait + sent) / 50:,.2f} ms a step.\n"
        )
    stated = (
        f"Computed, not measured. Stated, too: {LATENCY_US:.0f} us for a small all-reduce over 8 nodes of 8 GPUs, and "
        f"{LINK_GB_S:.0f} GB/s a GPU between them. The counts do not grow with the model, but for one number a weight "
        "tensor. Later events, where some weights are pruned already, read the masks too. The time of a rank's own cut "
        "includes its all-reduces with itself.\n"
    )
    lines = lines or ["No GPU has been measured yet: `python -m benchmarks distributed --device cuda`, then `page`.\n"]
    return "\n".join([f"## An event for {WEIGHTS / 1e9:.0f} B weights on {GPUS} GPUs\n", stated, *lines])
