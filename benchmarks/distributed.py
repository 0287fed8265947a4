"""An event and a step by many ranks: FSDP2 over gloo on CPUs, and the one-rank path over NCCL on a GPU.

The figures stand in ``docs/distributed.md``.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from prunus import Event, Pruner, Ramp
from prunus.eligible import eligible
from prunus.ops import bits
from prunus.ops.machine import device_of
from prunus.ops.shard import Shard
from prunus.ranks import Ranks
from prunus.statistics import score_of, sources
from prunus.threshold import cut

from .benchmark import SPARSITY, Benchmark, Measured, Record, RecordTable, Row, newest_records, table_of
from .clocks import in_turns, median_ms

RANKS = (1, 2, 4)
TOKENS = 64  # rows of the batch of each rank
EVENTS = 7
RAMP_BEGIN = 10**6  # a step that is never reached: events are called by hand


@dataclass(frozen=True, kw_only=True)
class Distributed(Benchmark):
    """Prune on 1, 2 and 4 ranks of a CPU, or on one rank of a GPU beside no process group."""

    layers: int = 12  # number of weights
    dim: int = 2048  # rows and columns of each
    repeat: int = 15  # steps that the median is taken over
    device: str = "cpu"  # cpu or cuda

    def measure(self) -> Measured:
        device = device_of(self.device)
        settings = {"sparsity": SPARSITY, "repeat": self.repeat, "tokens": TOKENS}
        weights = f"{self.layers} weights of {self.dim} x {self.dim}"
        settings |= {"num_weights": self.layers * self.dim**2, "weights": weights}
        rows = measure_ranks(self) if device.type == "cpu" else []
        return "distributed", settings, rows + measure_one_rank(self, device)


class ShardedTraining:
    """Linear layers with a residual path, as plain as a training step allows; FSDP2 shards each over all ranks."""

    def __init__(self, options: Distributed, device: torch.device, *, sharded: bool, pruned: bool) -> None:
        torch.manual_seed(0)
        shape = (options.dim, options.dim)
        self.model = nn.ModuleList(nn.Linear(*shape, bias=False, device=device) for _ in range(options.layers))
        if sharded:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(TOKENS, options.dim, device=device)
        self.events: list[Event] = []
        if pruned:
            schedule = Ramp(SPARSITY, RAMP_BEGIN, RAMP_BEGIN + EVENTS, shape="linear")
            arguments = {"schedule": schedule, "every": 10**9, "on_event": self.events.append}
            self.pruner = Pruner(self.model, self.optimizer, **arguments)
        self.step()

    def step(self) -> None:
        y = self.x
        for layer in self.model:
            y = y + 0.1 * layer(y)
        y.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def event(self) -> None:
        """The next event, which prunes some more."""
        self.pruner.step = RAMP_BEGIN + len(self.events) + 1
        self.pruner.update()
        self.pruner.step = 0


def pair(options: Distributed, device: torch.device, sharded: bool) -> list[ShardedTraining]:
    """The same training without and with pruning."""
    return [ShardedTraining(options, device, sharded=sharded, pruned=pruned) for pruned in (False, True)]


def rows_of(pairs: Mapping[str, list[ShardedTraining]], options: Distributed, device: torch.device) -> list[Row]:
    """Event and step of each pair, all of them in turns."""
    events = in_turns({way: pruned.event for way, (_, pruned) in pairs.items()}, EVENTS - 1, device)
    arms = {f"{way} {i}": training.step for way, both in pairs.items() for i, training in enumerate(both)}
    steps = {name: turns.ms for name, turns in in_turns(arms, options.repeat, device).items()}
    rows = []
    for way in pairs:
        row = {"way": way, "event_ms": events[way].ms}
        rows.append(row | {"plain_step_ms": steps[f"{way} 0"], "pruned_step_ms": steps[f"{way} 1"]})
    return rows


def _rank(rank: int, world: int, folder: str, options: Distributed) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet{world}", rank=rank, world_size=world)
    device = torch.device("cpu")
    both = pair(options, device, sharded=True)
    [row] = rows_of({"": both}, options, device)
    num_bytes, digest = statistics.median(e.bytes_exchanged for e in both[1].events), both[1].pruner.digest()
    if rank == 0:
        del row["way"]
        found = {"ranks": world} | row | {"bytes_exchanged": num_bytes, "digest": digest}
        Path(folder, f"{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_ranks(options: Distributed) -> list[Row]:
    """A row for each number of gloo ranks, one thread each; RuntimeError unless all found the same masks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in RANKS:
            mp.start_processes(_rank, (world, folder, options), world, start_method="fork")
            rows.append(json.loads(Path(folder, f"{world}.json").read_text()))
    if len({row["digest"] for row in rows}) > 1:
        raise RuntimeError("numbers of ranks found different masks, so no speed is reported")
    return rows


def measure_one_rank(options: Distributed, device: torch.device) -> list[Row]:
    """The one-rank path over a process group beside the plain one, and a cut by counts as sharded ranks make it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        plain = pair(options, device, sharded=False)
        dist.init_process_group(backend, f"file://{folder}/meet", rank=0, world_size=1)
        alone = pair(options, device, sharded=True)
        rows = rows_of({"plain": plain, f"FSDP2 on one rank, {backend}": alone}, options, device)
        rows.append(_by_counts(plain[1].pruner, options, device))
        dist.destroy_process_group()
    return rows


def _by_counts(pruner: Pruner, options: Distributed, device: torch.device) -> Row:
    """The next cut of all weights as a rank among many makes it: what it costs a rank beside the links."""
    assert dist.group.WORLD is not None
    ranks, weights = Ranks([dist.group.WORLD], [dist.group.WORLD]), eligible(pruner.model).weights
    shapes = {weight.name: tuple(weight.parameter.shape) for weight in weights}
    shards = {name: Shard(shape, (0,) * len(shape), shape, True, ranks) for name, shape in shapes.items()}
    made = sources(weights, pruner.optimizer, score_of("bitter7", {}), {}, more={}, shards=shards)
    live = {name: bits.pack(mask) for name, mask in pruner.masks.items()}
    num_live = sum(int(bits.count(packed)) for packed in live.values())
    num_drop = round((1 + SPARSITY) / 2 * sum(source.numel for source in made))

    def event() -> None:
        ranks.num_sums = ranks.num_bytes = 0
        cut(made, num_drop, live, num_live)

    row = {"way": "cut by counts, one rank", "event_ms": median_ms(event, options.repeat, device)}
    row |= {"plain_step_ms": None, "pruned_step_ms": None}
    return row | {"num_sums": ranks.num_sums, "bytes_exchanged": ranks.num_bytes}


COLUMNS = (
    "way | event ms = event_ms:.2f | bytes = bytes_exchanged:,.0f | step without, ms = plain_step_ms:.2f | "
    "step with, ms = pruned_step_ms:.2f | overhead:+.1% | pruning adds, ms = added:.2f"
)
WEIGHTS, GPUS = 70_000_000_000, 64
LATENCY_US = 100.0  # of a small all-reduce over 8 nodes of 8 GPUs
LINK_GB_S = 50.0  # of a 400 Gb/s link a GPU
PROJECTED = (
    "machine | cut of = num:, | took ms = event_ms:.2f | all-reduces = num_sums | bytes = bytes_exchanged:, | "
    "70 B: reading, ms = read:,.1f | waiting, ms = wait:.2f | sending, ms = sent:.4f | an event, ms = total:,.1f | "
    "a step, one event in 50, ms = a_step:,.2f"
)


def parts(folder: Path) -> dict[str, str]:
    """What ``docs/distributed.md`` shows between its marks."""
    records = newest_records(folder, "distributed")
    on_gpus = [record for record in records if any("nccl" in row.get("way", "") for row in record["rows"])]
    drawn = "\n".join(map(RecordTable(COLUMNS, _more), records))
    return {"ranks": drawn, "projection": table_of([*map(projected, on_gpus)], PROJECTED)}


def _more(row: Row, record: Record) -> Row:
    without, with_ = row["plain_step_ms"], row["pruned_step_ms"]
    more = {"overhead": with_ / without - 1, "added": with_ - without} if without is not None else {}
    more |= {"way": f"{row['ranks']} ranks, gloo"} if "ranks" in row else {}
    return {"bytes_exchanged": 0} | row | more


def projected(record: Record) -> Row:
    """What an event costs at 70 B weights on 64 GPUs, from the cut by counts as a GPU took it."""
    row = next(row for row in record["rows"] if row.get("num_sums"))
    num = record["settings"]["num_weights"]
    read, wait = row["event_ms"] * WEIGHTS / GPUS / num, row["num_sums"] * LATENCY_US / 1e3
    sent = 2 * (GPUS - 1) / GPUS * row["bytes_exchanged"] / LINK_GB_S / 1e6
    total = read + wait + sent
    computed = {"read": read, "wait": wait, "sent": sent, "total": total, "a_step": total / 50}
    return row | computed | {"num": num, "machine": record["environment"]["machine"]}
