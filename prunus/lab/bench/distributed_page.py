"""``docs/distributed.md``: how to prune by many ranks, what that costs as measured, and what it would at 64 GPUs."""

from pathlib import Path
from typing import Any

from .markdown import number, section, table
from .page import newest_of

LATENCY_US = 100.0  # of a small all-reduce over 8 nodes of 8 GPUs
LINK_GB_S = 50.0  # of a 400 Gb/s link a GPU
WEIGHTS, GPUS = 70_000_000_000, 64

GUIDE = """# Many ranks, the same masks

This page is made by `prunus bench page`; no measured figure in it is typed.

`Pruner` works on what a rank holds: weights of DDP are copies, weights of `fully_shard` and of tensor
parallelism are DTensors of which a rank holds a block. Scores are computed on blocks and never travel; counts
do. For equal weights and moments the masks are those of one process, to the bit, for any number of ranks and
any mesh: of equal scores the first by weight, then by the position in the whole weight, is dropped first,
whoever holds it.

```python
model = DistributedDataParallel(model)  # or: fully_shard(model), or parallelize_module(model, ...)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pruner = Pruner(model, optimizer, schedule=Ramp(0.5, begin=400, end=800))  # after the sharding, on every rank
```

- **Make it after sharding.** `fully_shard` and `parallelize_module` replace parameters; a Pruner made before
  them says so at the first step, and in its report.
- **Collective**, to be called by all ranks: events (`optimizer.step()`, `update`), and for DTensors also
  `sparsity`, `report`, `digest`, `full_masks`, `load_state_dict`, and making a Pruner. `masks[name]` is local:
  the mask of this rank's block. `state_dict()` is called by all ranks too, since it is saved by all.
- **Errors are everybody's.** A score that is not finite on one rank is a ValueError on all, which names the
  weight and the rank. So are masks that differ between ranks that hold copies: they are compared at every
  event, before anything is pruned. Ranks that train different models under one process group say who belongs
  together by `group=`.
- **Layouts**: `Shard` along any dimensions, uneven and empty shards, copies (counted once), grids of both
  (HSDP), FSDP2 over tensor parallelism. All weights must be on one mesh; `Partial` is refused. Over a mesh that
  is smaller than the world (tensor parallelism inside DDP) each mesh decides alone and is not compared with the
  others.
- **Scores**: movement sums are local; input norms are the mean over ranks; a function of yours must be
  element-wise over shards, which is checked; it is handed what the rank holds.
- **Clipping**: gradients are masked as they are accumulated, so what clips sees zeros. Where FSDP2 offloads to
  the CPU they are on their way then: call `pruner.mask_gradients()` before you clip, the step masks them
  anyway. `AdamWPrune(max_norm=...)` sums the norm over all shards, copies once.
- **Checkpoints**: `torch.distributed.checkpoint` reshards what has a weight's shape and placement. So
  `pruner.state_dict()` of DTensors, and `state["mask"]` in the optimizer's state dict under a process group,
  are zeros and ones, a byte a weight (in memory they stay a bit); `state_dict(unpacked=True)` gives the same
  for DDP. Saved by any layout, they are loaded by any other. Where all is plain, masks are saved as packed
  bits.
- **Other numbers of ranks**: for equal weights and moments masks are equal. Trainings of different numbers of ranks
  do not keep them equal, since sums of gradients round differently. While masks agree, losses of short trainings
  differ by less than 1e-4, to which tests hold them. Rounding may also move a weight over the cut, and this grows, so
  that masks and losses part further, the sooner the earlier and the oftener is pruned. The same number of ranks gives
  the same run.

What travels at an event, a rank: for `Global` 2 KiB a sum for each half of a 16-bit digit of the bracket's two
edges and of the cut, one count a weight tensor, and where equal scores are cut, digits of a position; for
`PerLayer` that for every layer; for `PerRow` and N:M nothing but flags while rows lie whole on a rank
(`Shard(0)`), else 16 counts a row for each 4 bits, and the scores of groups that a shard cuts through.
"""

SETTING = """{num_weights:,} weights ({weights}), bitter7 to {sparsity:.0%} in seven events, FSDP2 with every layer a \
group, {tokens} rows a rank; medians of up to {repeat} steps that take turns with those of the same training without \
pruning. """
READING = '"Cut by counts" is the way of many ranks, taken by one. Bytes are what a rank hands to all-reduces.\n'
RANKS = "One thread a rank. All numbers of ranks ended with one digest. "
ONE_RANK = "With so few rows a step is memory traffic and launches by the host, so that overheads show most. "


def distributed_page(folder: Path) -> str | None:
    """The page, or None where nothing was measured."""
    records = [record for record in newest_of(folder) if record["what"] == "distributed"]
    if not records:
        return None
    return "\n".join([GUIDE, *map(_measured, records), _projection(records)])


def _measured(record: dict[str, Any]) -> str:
    lines = [
        (
            f"{row['ranks']} ranks, gloo" if "ranks" in row else row["way"],
            f"{row['event_ms']:.2f}",
            f"{row['bytes_exchanged']:,.0f}" if "bytes_exchanged" in row else "0",
            number(row["plain_step_ms"], "{:.2f}"),
            number(row["pruned_step_ms"], "{:.2f}"),
            "" if row["plain_step_ms"] is None else f"{row['pruned_step_ms'] / row['plain_step_ms'] - 1:+.1%}",
        )
        for row in record["rows"]
    ]
    headings = ("way", "event ms", "bytes", "step without, ms", "step with, ms", "overhead")
    if any("ranks" in row for row in record["rows"]):
        return section("Measured on a CPU, over gloo", record, SETTING + RANKS + READING, table(headings, lines))
    text = SETTING + ONE_RANK + READING
    return section(
        "Measured on a GPU, one rank over NCCL", record, text, table(headings, lines) + "\n\n" + _one_rank(record)
    )


def _one_rank(record: dict[str, Any]) -> str:
    """The way over a process group beside the plain one, in a sentence."""
    plain, alone = record["rows"][:2]
    added = [row["pruned_step_ms"] - row["plain_step_ms"] for row in (alone, plain)]
    ratio = alone["event_ms"] / plain["event_ms"] - 1
    return (
        f"Against the plain way an event over the process group differs by {ratio:+.1%}; pruning adds "
        f"{added[0]:.2f} ms to its step, {added[1]:.2f} ms to the plain one. "
        "What FSDP2 itself adds to a step is in both columns.\n"
    )


def _projection(records: list[dict[str, Any]]) -> str:
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
    lines = lines or [
        "No GPU has been measured yet: `prunus bench distributed --device cuda`, then `prunus bench page`.\n"
    ]
    return "\n".join([f"## An event for {WEIGHTS / 1e9:.0f} B weights on {GPUS} GPUs\n", stated, *lines])
