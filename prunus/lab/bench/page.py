"""``docs/benchmarks.md`` from the files that benchmarks left: no figure in it is typed."""

from pathlib import Path
from typing import Any

from . import prune_page
from .markdown import number, section, table
from .measure import read_record

INTRODUCTION = """# Benchmarks

This page is made by `prunus bench page` from the JSON files in `benchmarks/results/`; nothing in it is
typed. Where a record was not written by a command, its section says so. All
methods of a table ran in one process, one after the other or in turns. Run them on your
own machine with `prunus bench select`, `step`, `train`, `export`, `matvec`, `prune` and `level` (`--device cuda` on
a GPU).
"""

SELECT = """Masks of {num_weights:,} weights ({weights}, {dtype}) at {sparsity:.0%} by {score}, median of up to \
{repeat} calls. Extra memory is the peak beyond weights and moments, the masks included. "Off by" is how many more \
weights than asked are kept (negative: fewer), "edge" how far the smallest score kept lies from the exact one. \
torch.nn.utils.prune ranks by magnitude, which reads less. "From half pruned on" is a later event: half are pruned, \
and half of the rest goes.
"""

STEP = """A step of a GPT with {num_weights:,} weights, {num_prunable:,} of them prunable, at {sparsity:.0%}, \
no event among the steps; medians over {repeat} rounds in which the arms take turns. Overhead is the median \
over rounds of the time beyond the arm it stands beside, in the same round.
"""

UPDATE = """The optimizer's step alone on {num_weights:,} float32 weights ({weights}), {sparsity:.0%} of them masked; \
medians of queued calls, the ratio is to torch's fused step without masks.
"""

TRAIN = """Training {model}, context {context}, batch {batch}, {precision}, compile {compile}, an event every {every} \
steps counted in; medians of {rounds} rounds of {every} steps, to {sparsity:.0%}.
"""

EXPORT = """A pruned weight of {megabytes} MB without its zeros and back, medians of up to {repeat} calls; GB/s count \
dense bytes, whatever is moved. Every way gave each bit back before it was timed. In memory: finding the non-zeros and \
compacting them, then expanding. Files lie in memory where the machine has such a place; ours are summed, flushed \
and checked, dense ones are not. Size is relative to dense, beside the goal.
"""

MATVEC = """Products of a pruned {dtype} weight with some vectors; medians of {repeat} rounds. On a GPU calls are made \
within a CUDA graph and go round copies of more than 200 MB, so that none is read from a cache; "launched" is without \
the graph, by the host. Times faster and size are relative to dense in the same table. Every way agreed with \
the product in higher precision before it was timed.
"""

PARTS = """Where the time of one event goes ({weights}, bitter7, 50 %). Events queued one behind the other take \
{queued_ms:.2f} ms each on the device, a CUDA graph of one with the wait {replayed_ms:.2f} ms; called one by one, \
{total_ms:.2f} ms in the median of the stamped calls and {least_ms:.2f} ms at best: the rest is the host before the \
pass is launched, which the device waits for. What the host does after that is hidden behind the pass.
"""


def page(folder: Path) -> str:
    """The page for all records in ``folder``, the newest of each kind and machine."""
    records = [record for record in newest_of(folder) if record["what"] in SECTIONS]
    if not records:
        raise ValueError(f"there are no results in {folder}; run prunus bench select first")
    return "\n".join([INTRODUCTION, *(SECTIONS[record["what"]](record) for record in records)])


def newest_of(folder: Path) -> list[dict[str, Any]]:
    """The newest record of each kind, machine and model."""
    newest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: (read_record(path)["date"], path.stat().st_mtime)):
        record = read_record(path)
        about = record["settings"].get("weights", "")
        newest[record["what"], record["environment"]["machine"], about] = record | {"file": path.name}
    return [record for _, record in sorted(newest.items())]


def _select(record: dict[str, Any]) -> str:
    rows = record["rows"]
    ours = next(row for row in rows if row["method"] == "prunus, exact")
    lines = [
        (
            row["method"],
            f"{row['ms']:.2f}",
            f"{row['ms'] / ours['ms']:.2f}",
            "not measured" if row["extra_mib"] is None else f"{row['extra_mib']:.1f}",
            f"{row['kept_too_many']:,}",
            number(row["edge_error"], "{:+.2%}"),
        )
        for row in rows
    ]
    headings = ("method", "ms", "times ours", "extra MiB", "off by", "edge")
    body = table(headings, lines)
    if record["settings"]["copy_gb_s"]:
        floor = record["settings"]["num_bytes"] / record["settings"]["copy_gb_s"] / 1e6
        body += (
            f"\n\nThe least that must be read is {record['settings']['num_bytes'] / 1e9:.2f} GB: {floor:.2f} ms at the "
            f"{record['settings']['copy_gb_s']:,.0f} GB/s of a copy measured in the same run. Ours reads "
            f"{ours['read_gb_s']:,.0f} GB/s over the whole event, "
            f"{ours['read_gb_s'] / record['settings']['copy_gb_s']:.0%} of that."
        )
    return section("Finding the masks", record, SELECT, body)


def _parts(record: dict[str, Any]) -> str:
    lines = [(row["part"], row["where"], f"{row['us']:,.1f}") for row in record["rows"]]
    return section("Finding the masks: what bounds it", record, PARTS, table(("part", "where", "us"), lines))


def _update(record: dict[str, Any]) -> str:
    lines = [(row["way"], f"{row['ms']:.3f}", f"{row['ratio']:.3f}") for row in record["rows"]]
    body = table(("way", "ms", "ratio"), lines)
    ulps = record["rows"][0]["ulps_from_torch"]
    body += f"\n\nOne step from equal state differs from torch's by at most {ulps:.2f} ulp, "
    body += "counted at the larger of the weight and the learning rate."
    return section("Keeping them: the optimizer's step", record, UPDATE, body)


def _train(record: dict[str, Any]) -> str:
    lines = [
        (
            row["arm"],
            f"{row['ms']:.2f}",
            f"{row['ratio']:.4f}",
            f"{row['spread']:.2f}",
            f"{row['tokens_a_second']:,.0f}",
            number(row["peak_mib"], "{:,.0f}"),
            number(row["steady_mib"], "{:,.1f}"),
        )
        for row in record["rows"]
    ]
    headings = ("arm", "ms a step", "ratio", "spread", "tokens/s", "peak MiB", "steady MiB")
    return section("Whole training", record, TRAIN, table(headings, lines))


def _step(record: dict[str, Any]) -> str:
    lines = [
        (
            row["arm"],
            row["optimizer"],
            f"{row['tokens']:,}",
            f"{row['ms']:.1f}",
            f"{row['overhead']:+.2%}" if row["arm"] != row["beside"] else "",
            row["beside"] if row["arm"] != row["beside"] else "",
        )
        for row in record["rows"]
    ]
    headings = ("arm", "optimizer", "tokens", "ms", "overhead", "beside")
    return section("Keeping them: a training step", record, STEP, table(headings, lines))


def _export(record: dict[str, Any]) -> str:
    lines = [
        (
            row["way"],
            row["dtype"],
            f"{row['sparsity']:.0%}",
            f"{row['pack_gb_s']:.2f}",
            f"{row['unpack_gb_s']:.2f}",
            f"{row['size']:.4f}",
            number(row["size_goal"], "{:g}"),
        )
        for row in record["rows"]
    ]
    headings = ("way", "type", "zeros", "pack GB/s", "unpack GB/s", "size", "goal")
    body = table(headings, lines)
    if record["settings"]["copy_gb_s"]:
        body += (
            f"\n\nA copy on this device moves {record['settings']['copy_gb_s']:,.0f} GB/s, read and written together."
        )
    return section("Small files", record, EXPORT, body)


def _matvec(record: dict[str, Any]) -> str:
    lines = [
        (
            row["way"],
            row["shape"],
            row["zeros"],
            f"{row['vectors']:,}",
            row["problem"] if row["us"] is None else f"{row['us']:,.1f}",
            *(number(row[name], "{:.2f}") for name in ("times_faster", "size")),
            number(row["launched_us"], "{:,.1f}"),
            number(row["read_gb_s"], "{:,.0f}"),
        )
        for row in record["rows"]
    ]
    headings = ("way", "weight", "zeros", "vectors", "us", "times faster", "size", "launched us", "GB/s of it")
    return section("Products with a pruned weight", record, MATVEC, table(headings, lines))


SECTIONS = {
    "level": prune_page.level,
    "export": _export,
    "lora": prune_page.lora,
    "matvec": _matvec,
    "parts": _parts,
    "prune": prune_page.prune,
    "select": _select,
    "step": _step,
    "train": _train,
    "update": _update,
    "wanda": prune_page.wanda,
}
