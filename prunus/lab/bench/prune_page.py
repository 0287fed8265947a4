"""Sections on pruning after training."""

from typing import Any

from .markdown import number, section, table

PRUNE = """{model}, {probed} of its weights, {windows} windows of {length} tokens, to {sparsity:.0%}, in float32. \
Plainly is WANDA as its authors' code does it, a sample at a time with a sort and a scatter, and the probe by its \
definition: two passes for each weight and sample, all others frozen. Operations are those of matrix products, as \
torch counts them over eight windows, the inspection of the model included: what is faster than by their ratio comes \
from running them better, not from leaving them out.
"""


LEVEL = """One level, WANDA candidates and the probe at {sparsity:.0%}, on a random bfloat16 model of Mistral-7B's \
shape ({num_weights:,} weights, {blocks} blocks, {windows} samples of {length} tokens): what a level costs, nothing \
about quality. Plainly is the probe by its definition, one sample a pass, all other weights frozen, two records a \
weight; it was timed for three weights over four samples and scaled to all. The first level of a process also compiles \
kernels, which stay on disk. Busy is the driver's figure; the share of peak counts matrix products alone, against 989 \
TFLOP/s.
"""

WANDA = """One-shot WANDA by rows to {sparsity:.0%} on a CPU beside llmcompressor {llmcompressor}, {windows} windows \
of {length} tokens for the model; medians of {repeat} runs in turns in one process, by \
`benchmarks/wanda_llmcompressor.py`. "Times ours" is of CPU seconds over all cores. Its functions are called from \
plain hooks; `oneshot` is its users' way. A model's time is that of its forward passes first of all.
"""

LORA = """A small GPT-2 of bytes learns the source of Python's standard library in {steps} steps while it is pruned to \
50 %, then {tuning} steps of the English of its manual, by LoRA of rank {rank} and by other ways at one learning rate; \
held-out loss, mean and deviation of {seeds} seeds of the tuning, by `benchmarks/lora_merge.py`. Sparsity is of the \
weights the adapters stand on; before the merge a dense update stands beside them.
"""

HEAD = """The head takes {head_share:.0%} of the products of a record that starts at the probed weight, and either \
side runs it once for each record and sample: a record is taken with other weights than the one before it, so that its \
logits are new ones, and no decision is kept without them. What can be saved is the blocks before the probed weight, \
and the time that batches and a head in parts save. The parts below are of a run of its own, with clocks."""


def prune(record: dict[str, Any]) -> str:
    lines = [
        (
            row["task"],
            *(f"{row[name]:.3f}" for name in ("seconds", "plain_seconds")),
            f"{row['times_faster']:.2f}",
            number(row["times_fewer_operations"], "{:.2f}"),
            f"{row['different']:,} of {row['num_weights']:,}",
        )
        for row in record["rows"]
    ]
    headings = ("task", "s", "plainly, s", "times faster", "times fewer operations", "mask elements that differ")
    body = table(headings, lines)
    if parts := record["settings"].get("parts"):
        body += f"\n\n{HEAD.format(**record['settings'])}\n\n"
        shares = [(row["part"], f"{row['seconds']:.3f}", f"{row['share']:.0%}") for row in parts]
        body += table(("part of our probe", "s", "share"), shares)
    return section("Pruning after training", record, PRUNE, body)


def level(record: dict[str, Any]) -> str:
    plain = record["rows"][0]["seconds"]
    lines = [
        (
            row["way"],
            f"{row['seconds']:.1f}",
            f"{plain / row['seconds']:.1f}",
            number(row.get("utilisation"), "{:.0%}"),
            number(row.get("share_of_peak"), "{:.0%}"),
            number(row.get("peak_gib"), "{:.1f}"),
            f"{row['passes']:,}",
            number(row.get("sparsity"), "{:.2%}"),
        )
        for row in record["rows"]
    ]
    headings = ("way", "s a level", "times faster", "busy", "of peak", "peak GiB", "passes", "sparsity")
    return section("The gradient probe: a level of a 7 B model", record, LEVEL, table(headings, lines))


def wanda(record: dict[str, Any]) -> str:
    lines = [
        (
            f"{row['task']}: {row['way']}",
            *(f"{row[name]:.3f}" for name in ("seconds", "cpu_seconds")),
            f"{row['times_ours']:.2f}",
            f"{row['different']:,} of {row['num_weights']:,}",
        )
        for row in record["rows"]
    ]
    headings = ("task and way", "s", "CPU s", "times ours", "weights pruned elsewhere")
    return section("WANDA beside llmcompressor", record, WANDA, table(headings, lines))


def lora(record: dict[str, Any]) -> str:
    lines = [(r["way"], f"{r['loss']:.3f} ± {r['spread']:.3f}", f"{r['sparsity']:.2%}") for r in record["rows"]]
    return section("Merging adapters under masks", record, LORA, table(("way", "loss", "sparsity"), lines))
