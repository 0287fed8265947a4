"""Tokens a second of a pruned or shrunk language model, the way people run it: our decoder, and ``model.generate``.

The models are random, and so are their zeros: speed depends on where they are as little as on the weights. Every arm of
a batch size is run in turns, dense and sparse, so that what else the machine does falls on all.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from prunus.grids import OnGrid, grid_of, put_on_grid_
from prunus.lab.profile.measure import bytes_held
from prunus.oneshot.shrink import Shrinking
from prunus.oneshot.shrink_step import UNIT_SCORES
from prunus.oneshot.units import Wanted
from prunus.ops.grid import Grid
from prunus.ops.machine import device_of
from prunus.sparse import Decoder, SparseLinear, sparsify_, unsparsify_
from prunus.sparse.choose import forms_of
from prunus.sparse.model_layers import chosen, linear_weight
from prunus.sparse.times import kind_of, rounded_to_grid, scales_of_codes

from .benchmark import Benchmark, Measured, Record, RecordTable, Row, random_llama, write_record
from .clocks import in_turns, timed
from .matvec import Int4Linear

LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
LLAMA_1B: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 4096}
LLAMA_1B |= {"tie_word_embeddings": True}
PROMPT = 32  # tokens
FIRST = 8  # tokens whose time, and that of the prompt, is not counted
GOALS = {  # times faster than dense, by way, zeros and batch
    ("decoder", "50%"): {1: 1.25, 4: 1.0, 8: 1.0, 16: 1.0},
    ("decoder", "80%"): {1: 2.0, 4: 1.5, 8: 1.3, 16: 1.1},
    ("decoder", "50%, 4 bits"): {1: 1.8, 8: 1.3},
    ("decoder", "80%, 4 bits"): {1: 2.2, 8: 1.5},
    ("generate", "50%"): {1: 1.0},
    ("generate", "80%"): {1: 1.0},
    ("generate, static cache", "50%"): {1: 1.1},
    ("generate, static cache", "80%"): {1: 1.4},
}
STATIC_GOAL = 1.5  # times faster that our dense decoder is than model.generate with a static cache
SMALLER = {
    "50%": 0.68,
    "80%": 0.36,
    "50%, 4 bits": 0.32,
    "80%, 4 bits": 0.26,
}  # goals of the memory of the whole model over dense
WAYS = {"decoder": "decoder", "compiled": "decoder, compiled", "generate": "generate"}
WAYS |= {"static": "generate, static cache"}
WayName = Literal[tuple(WAYS)]  # pyrefly: ignore[invalid-literal]


@dataclass(frozen=True, kw_only=True)
class Decode(Benchmark):
    """Write text with a random pruned model of Llama-3-8B's shape: tokens a second, sparse beside dense."""

    blocks: int = 32  # of the model
    # shares of zeros; kept weights may be in 4 bits, and "int4" is torch's own dense int4
    zeros: tuple[str, ...] = ("50%", "80%", "50%, 4 bits", "80%, 4 bits", "int4")
    batches: tuple[int, ...] = (1, 4, 8, 16)  # texts at a time
    ways: tuple[WayName, ...] = ("decoder", "compiled")  # to run the model
    new_tokens: int = 136  # of each text
    repeat: int = 3  # rounds that the median is taken over
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        settings = {"weights": f"{self.blocks} blocks of Llama-3-8B's shape", "shape": LLAMA, "blocks": self.blocks}
        settings |= {"new_tokens": self.new_tokens, "prompt": PROMPT}
        dense, ids = random_llama(LLAMA, self.blocks, (max(self.batches), PROMPT), device_of(self.device))
        dense.requires_grad_(False)
        models = {"none": dense} | {zeros: pruned_model(dense, zeros) for zeros in self.zeros}
        rows: list[Row] = []
        for batch in self.batches:  # layers are packed anew for each
            for way in self.ways:
                if not WAYS[way].startswith("decoder") and batch > 1:  # model.generate has goals for one text alone
                    continue
                turns = in_turns_with(models, way)
                for row in chain.from_iterable(self._rows(some, WAYS[way], ids[:batch]) for some in turns):
                    speed = f"{row['tokens_s']:,.0f} tokens/s, {row['times_faster']:.2f} times faster than dense"
                    print(f"{row['way']}, zeros {row['zeros']}, batch {batch}: {speed}", flush=True)
                    rows.append(row)
                write_record("decode", settings, rows, self.results)  # a run that is killed keeps what it has
        return "decode", settings, rows

    def _rows(self, models: dict[str, Any], way: str, ids: Tensor) -> Iterator[Row]:
        """A row for each model, the dense one first."""
        batch = len(ids)
        for model in (model for zeros, model in models.items() if zeros.partition("%")[1]):
            sparsify_again(model, batch)
        times = step_times(models, way, ids, self.new_tokens, self.repeat)
        bytes_of = {zeros: bytes_held([*m.parameters(), *m.buffers()], ids.device) for zeros, m in models.items()}
        for zeros, (first, prompt, step) in times.items():
            layers = [m for m in models[zeros].modules() if isinstance(m, (SparseLinear, torch.nn.Linear, Int4Linear))]
            yield {
                "way": way,
                "zeros": zeros,
                "batch": batch,
                "tokens_s": batch / step,
                "times_faster": times["none"][2] / step,
                "goal": GOALS.get((way.removesuffix(", compiled"), zeros), {}).get(batch),
                "first_s": first,
                "prompt_ms": 1e3 * prompt,
                "sparse_layers": sum(isinstance(layer, SparseLinear) for layer in layers),
                "layers": len(layers),
                "memory": bytes_of[zeros] / bytes_of["none"],
                "memory_goal": SMALLER.get(zeros),
            }


def in_turns_with(models: dict[str, Any], way: str) -> Iterator[dict[str, Any]]:
    """Models that are run in turns: all, or each sparse one with the dense one where whole models are compiled.

    torch.compile leaves sizes open that it sees change from one sparse model to the next of a process, and the second
    one then takes its sizes as hundreds of inputs, which is slower.
    """
    names = [zeros for zeros in models if zeros != "none"]
    for chosen_names in [[name] for name in names] if way == "static" and names else [names]:
        if way == "static":
            torch.compiler.reset()
        yield {"none": models["none"]} | {name: models[name] for name in chosen_names}


@torch.no_grad()
def pruned_model(dense: Any, zeros: str) -> Any:
    """A copy with random zeros in all linear layers but the head, and with what is kept in 4 bits if that is asked.

    With "int4" these layers are torch's own dense int4.
    """
    model, (share, _, bits) = deepcopy(dense), zeros.partition("%")
    generator = torch.Generator(model.device).manual_seed(1)
    for name, layer in chosen(model, exclude="lm_head*").items():
        weight = linear_weight(layer)
        if zeros == "int4":
            model.set_submodule(name, Int4Linear(*rounded_to_grid(weight)))
            continue
        draw = torch.rand(weight.shape, generator=generator, device=weight.device)
        weight.masked_fill_(draw < float(share) / 100, 0)
        if bits:
            rounded, scales = rounded_to_grid(weight)
            weight.copy_(rounded)
            put_on_grid_(layer, "weight", OnGrid(Grid(4), scales))
    return model


def sparsify_again(model: Any, batch: int) -> None:
    """The forms that are best for this batch size; a model that has them stays as it is."""
    if not hasattr(model, "kinds"):
        layers = chosen(model, exclude="lm_head*")
        weights = {name: (linear_weight(layer), grid_of(layer)) for name, layer in layers.items()}
        model.kinds = {name: kind_of(pair[0], scales_of_codes(*pair)) for name, pair in weights.items()}
        model.forms = None
    forms = forms_of(model.kinds, batch, model.device, None)
    if forms != model.forms:
        unsparsify_(model)
        sparsify_(model, vectors=batch, exclude="lm_head*")
        model.forms = forms


@cache
def decoder_of(model: Any, compile: bool) -> Decoder:
    return Decoder(model, compile=compile)


def step_times(
    models: dict[str, Any], way: str, ids: Tensor, new_tokens: int, repeat: int
) -> dict[str, tuple[float, float, float]]:
    """Seconds of each model's first text, of its prompt and of a step, medians over rounds in turns."""
    clocks = {zeros: TokenClock() for zeros in models}
    arms = {zeros: writer(model, way, ids, new_tokens, clocks[zeros]) for zeros, model in models.items()}
    first = {zeros: timed(write, ids.device)[0] for zeros, write in arms.items()}
    if way.startswith("decoder"):  # what few tokens take is taken off
        arms |= {f"{zeros}, few": writer(model, way, ids, FIRST, TokenClock()) for zeros, model in models.items()}
    turns = {arm: statistics.median(turn.seconds) for arm, turn in in_turns(arms, repeat, ids.device).items()}
    times = {}
    for zeros, clock in clocks.items():
        rests = clock.rests()[-repeat:]
        rest = statistics.median(rests) if rests else turns[zeros] - turns[f"{zeros}, few"]
        step = max(1e-9, rest) / (new_tokens - FIRST)
        times[zeros] = first[zeros], turns[zeros] - (new_tokens - 1) * step, step
    return times


class TokenClock:
    """Reads the time at every token of ``model.generate``, which calls it to ask whether the text ends.

    A text with a new static cache has its graphs recorded anew, which takes as long as many tokens. So the time of the
    tokens behind the first ones is read within a text, and not from the times of a long and a short one.
    """

    def __init__(self) -> None:
        self.rounds: list[list[float]] = []

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.rounds[-1].append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def rests(self) -> list[float]:
        """Seconds of each text from its first tokens to its last."""
        return [times[-1] - times[FIRST - 1] for times in self.rounds]


def writer(model: Any, way: str, ids: Tensor, new_tokens: int, clock: TokenClock) -> Callable[[], Tensor]:
    """A call that writes texts, of the same number of tokens in every arm."""
    if way.startswith("decoder"):
        decoder = decoder_of(model, way == "decoder, compiled")
        return lambda: decoder.generate(ids, max_new_tokens=new_tokens, eos_token_id=-1)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    if way == "generate, static cache":
        options["cache_implementation"] = "static"

    def write() -> Tensor:
        clock.rounds.append([])
        return model.generate(ids, stopping_criteria=[clock], **options)

    return write


# Shrunk models


OF_BYTES = 0.9  # goal: the share of the speed that fewer bytes promise


@dataclass(frozen=True, kw_only=True)
class ShrunkSpeed(Benchmark):
    """Write text with a random model of 1 B weights, dense and shrunk: tokens a second beside the bytes."""

    blocks: int = 16  # of the model
    sizes: tuple[float, ...] = (0.7, 0.5)  # shares of the blocks' weights that stay
    multiples: tuple[int, ...] = (1, 64)  # that neurons are rounded down to
    layers: tuple[int, ...] = (5,)  # layers dropped instead
    batches: tuple[int, ...] = (1, 8)  # texts at a time
    ways: tuple[WayName, ...] = ("generate", "decoder")  # to run the model
    new_tokens: int = 136  # of each text
    repeat: int = 5  # rounds that the median is taken over
    device: str = "cuda"  # cpu or cuda

    def measure(self) -> Measured:
        of = f", {self.ways[0]}" if len(self.ways) == 1 else ""
        settings = {"weights": f"Llama-3.2-1B's shape{of}", "blocks": self.blocks, "prompt": PROMPT}
        settings |= {"new_tokens": self.new_tokens, "repeat": self.repeat}
        dense, ids = random_llama(LLAMA_1B, self.blocks, (max(self.batches), PROMPT), device_of(self.device))
        models, rows = {"dense": dense} | dict(self._shrunk(dense, ids)), []
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
        bytes_of = {name: bytes_held([*m.parameters(), *m.buffers()], ids.device) for name, m in models.items()}
        for name, (_, _, step) in times.items():
            faster, promised = times["dense"][2] / step, bytes_of["dense"] / bytes_of[name]
            row = {"way": way, "model": name, "batch": len(ids), "tokens_s": len(ids) / step, "times_faster": faster}
            row |= {"bytes": bytes_of[name] / bytes_of["dense"], "promised": promised, "of_bytes": faster / promised}
            print(f"{way}, {name}, batch {len(ids)}: {row['tokens_s']:,.0f} tokens/s, {faster:.2f} times", flush=True)
            yield row


# The page


COLUMNS = (
    "way | zeros | batch | tokens/s = tokens_s:,.0f | times faster = times_faster:.2f | goal:.2f | "
    "sparse layers = sparse_layers | prompt ms = prompt_ms:.1f | first call s = first_s:.1f | memory:.2f | "
    "goal = memory_goal:.2f | times generate, static cache = times_static:.2f | goal = static_goal"
)


def beside_static(row: Row, record: Record) -> Row:
    """How many times faster our dense decoder is than ``model.generate`` with a static cache at the same batch."""
    static = [
        other["tokens_s"]
        for other in record["rows"]
        if (other["way"], other["zeros"], other["batch"]) == (WAYS["static"], "none", row["batch"])
    ]
    is_ours = row["zeros"] == "none" and row["way"].startswith("decoder")
    return {"times_static": row["tokens_s"] / static[0], "static_goal": STATIC_GOAL} if static and is_ours else {}


TABLES = {"decode": RecordTable(COLUMNS, beside_static)}
SHRUNK_TABLE = RecordTable(
    "way | model | batch | tokens/s = tokens_s:,.0f | times faster = times_faster:.2f | bytes = bytes:.1%"
    " | bytes promise = promised:.2f | share of it = of_bytes:.2f | goal:g",
    lambda row, record: {"goal": OF_BYTES} if row["model"] != "dense" else {},
)
