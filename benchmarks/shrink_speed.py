"""What shrinking costs, and how fast text comes from a shrunk model: random models, whose values play no part in it."""

import gc
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from prunus import shrink
from prunus.oneshot.shrink import Shrinking
from prunus.oneshot.structured import UNIT_SCORES, cheapest
from prunus.oneshot.widths import Wanted
from prunus.ops.machine import device_of

from .benchmark import Benchmark, Measured, Record, RecordTable, Row, random_llama, write_record
from .clocks import timed
from .decode import PROMPT, WAYS, decoder_of, model_bytes, step_times
from .recover_step import LLAMA_1B
from .repair import measured_cost

LLAMA_7B = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
LLAMA_7B |= {"num_key_value_heads": 32, "max_position_embeddings": 4096}
WHOLE = 32  # blocks of that model
TIME_GOALS = {"seconds": 300.0, "peak_gib": 24.0}  # of all of its blocks; the memory with offload
SELECTION = (14336, 4096, 1 / 3, 1.0)  # neurons, outputs, the share that goes, and how many seconds it may take
GOAL_WINDOWS = 512  # of the goals for time and memory
OF_BYTES = 0.9  # goal: the share of the speed that fewer bytes promise


@dataclass(frozen=True, kw_only=True)
class ShrinkTime(Benchmark):
    """Time shrinking, part by part, on a random model of Llama-2-7B's shape.

    Two numbers of blocks give what a block takes, and so an estimate for all 32 of them: the rest of the model is read
    once, whatever their number.
    """

    blocks: tuple[int, ...] = (32,)  # of the random model, one run for each
    windows: int = 512  # calibration windows
    length: int = 2048  # tokens of each
    size: float = 0.7  # share of the blocks' weights that stays
    batch_size: int | None = None  # windows of a pass; by default those that fit
    offload: bool = False  # the model stays in main memory, one block at a time on the device
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        device, place = device_of(self.device), "cpu" if self.offload else self.device
        settings = {"weights": f"Llama-2-7B's shape{', offload' if self.offload else ''}", "offload": self.offload}
        settings |= {"windows": self.windows, "length": self.length, "size": self.size}
        rows: list[Row] = []
        for num in sorted(self.blocks):
            model, tokens = random_llama(LLAMA_7B, num, (self.windows, self.length), device)
            model, tokens = model.to(place), tokens.to(place)
            settings["dtype"] = str(model.dtype).removeprefix("torch.")
            rows.append({"blocks": num} | self._row(model, tokens, device))
            write_record("shrink time", settings, rows, self.results)  # a run that is killed keeps what it has
            del model
            gc.collect()
        return "shrink time", settings, [*rows, self._selection(device)]

    def _row(self, model: Any, tokens: Tensor, device: torch.device) -> Row:
        how: dict[str, Any] = {"size": self.size, "offload": device if self.offload else None, "progress": False}
        row, result = measured_cost(lambda: shrink(model, [tokens], batch_size=self.batch_size, **how), device)
        weights = {"weights": result.after.weights, "weights_before": result.before.weights}
        parts = result.cost.parts | {"other": row["seconds"] - sum(result.cost.parts.values())}
        in_words = "; ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
        return row | weights | {"removed": ", ".join(result.removed), "parts": in_words}

    def _selection(self, device: torch.device) -> Row:
        """The removal of a third of the neurons of one wide layer, by itself."""
        num, num_outputs, share, _ = SELECTION if device.type == "cuda" else (96, 32, 1 / 3, 1.0)
        torch.manual_seed(0)
        weight, inputs = torch.randn(num_outputs, num, device=device), torch.randn(2 * num, num, device=device)
        inverse = torch.linalg.inv(inputs.T @ inputs)
        places, removed = torch.arange(num, device=device)[:, None], int(share * num)
        seconds = min(timed(lambda: cheapest(weight, inverse, places, removed), device)[0] for _ in range(2))
        return {"blocks": None, "removed": f"{removed:,} of {num:,} neurons of one layer, chosen", "seconds": seconds}


@dataclass(frozen=True, kw_only=True)
class ShrunkSpeed(Benchmark):
    """Write text with a random model of 1 B weights, dense and shrunk: tokens a second beside the bytes."""

    blocks: int = 16  # of the model
    sizes: tuple[float, ...] = (0.7, 0.5)  # shares of the blocks' weights that stay
    multiples: tuple[int, ...] = (1, 64)  # that neurons are rounded down to
    layers: tuple[int, ...] = (5,)  # layers dropped instead
    batches: tuple[int, ...] = (1, 8)  # texts at a time
    ways: tuple[Literal["decoder", "compiled", "generate", "static"], ...] = ("generate", "decoder")  # to run the model
    new_tokens: int = 136  # of each text
    repeat: int = 5  # rounds that the median is taken over
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        settings = {"weights": "Llama-3.2-1B's shape", "blocks": self.blocks, "prompt": PROMPT}
        settings |= {"new_tokens": self.new_tokens, "repeat": self.repeat}
        dense, ids = random_llama(LLAMA_1B, self.blocks, (max(self.batches), PROMPT), device_of(self.device))
        dense.generation_config.eos_token_id = None
        models = {"dense": dense} | dict(self._shrunk(dense, ids))
        rows: list[Row] = []
        for way in self.ways:
            for batch in self.batches:
                rows += self._rows(models, WAYS[way], ids[:batch])
                write_record("shrink speed", settings, rows, self.results)  # a run that is killed keeps what it has
            decoder_of.cache_clear()
        return "shrink speed", settings, rows

    def _shrunk(self, dense: Any, ids: Tensor) -> Iterator[tuple[str, Any]]:
        """Smaller copies: which units are gone plays no part in their speed."""
        by_size = [Wanted(size, multiple=multiple) for size in self.sizes for multiple in self.multiples]
        for wanted in [*by_size, *(Wanted(layers=num) for num in self.layers)]:
            model = deepcopy(dense)
            Shrinking(model, [ids[:1]], score=UNIT_SCORES["norm"], refit=False).run(wanted)
            multiple = f", neurons a multiple of {wanted.multiple}" if wanted.multiple > 1 else ""
            yield f"size {wanted.size:g}{multiple}" if wanted.size else f"{wanted.layers} layers fewer", model

    def _rows(self, models: dict[str, Any], way: str, ids: Tensor) -> Iterator[Row]:
        times = step_times(models, way, ids, self.new_tokens, self.repeat)
        bytes_of = {name: model_bytes(model) for name, model in models.items()}
        for name, (_, _, step) in times.items():
            faster, promised = times["dense"][2] / step, bytes_of["dense"] / bytes_of[name]
            row = {"way": way, "model": name, "batch": len(ids), "tokens_s": len(ids) / step, "times_faster": faster}
            row |= {"bytes": bytes_of[name] / bytes_of["dense"], "promised": promised, "of_bytes": faster / promised}
            print(f"{way}, {name}, batch {len(ids)}: {row['tokens_s']:,.0f} tokens/s, {faster:.2f} times", flush=True)
            yield row


def extrapolated(record: Record) -> str:
    """The estimate for all blocks from the two largest numbers of them, with its arithmetic."""
    rows = [row for row in record["rows"] if row.get("blocks")]
    lines = []
    if rows and rows[-1]["blocks"] == WHOLE:
        whole = rows[-1]
    elif len(rows) > 1:
        few, many = rows[-2:]
        num = many["blocks"] - few["blocks"]
        each = {key: (many[key] - few[key]) / num for key in TIME_GOALS}
        more = WHOLE - many["blocks"]
        whole = {key: many[key] + more * each[key] for key in TIME_GOALS}
        for key, unit in (("seconds", "s"), ("peak_gib", "GiB")):
            sums = f"{many[key]:.2f} + {more} x ({many[key]:.2f} - {few[key]:.2f}) / {num}"
            lines.append(f"- {WHOLE} blocks, estimated: {sums} = {whole[key]:.1f} {unit}")
    else:
        return ""
    for key, unit in (("seconds", "s"), ("peak_gib", "GiB")):
        if key == "peak_gib" and not record["settings"]["offload"]:
            continue
        goal = TIME_GOALS[key]
        if record["settings"]["windows"] < GOAL_WINDOWS:
            lines.append(f"- the goal, at most {goal:g} {unit}, is for {GOAL_WINDOWS} windows; these were fewer")
            continue
        outcome = "met" if whole[key] <= goal else f"**missed by {whole[key] / goal - 1:.0%}**"
        lines.append(f"- goal for {WHOLE} blocks: at most {goal:g} {unit}; {outcome}: {whole[key]:.1f} {unit}")
    return "\n\n" + "\n".join(lines)


def with_goal(row: Row, record: Record) -> Row:
    return {"goal": OF_BYTES} if row["model"] != "dense" else {}


TABLES = {
    "shrink time": RecordTable(
        "blocks | removed | s = seconds:.2f | CPU s = cpu_seconds:.1f | peak GiB = peak_gib:.1f | s by part = parts",
        below=extrapolated,
    ),
    "shrink speed": RecordTable(
        "way | model | batch | tokens/s = tokens_s:,.0f | times faster = times_faster:.2f | bytes = bytes:.1%"
        " | bytes promise = promised:.2f | share of it = of_bytes:.2f | goal:g",
        with_goal,
    ),
}
