"""What dropping whole experts costs: small Mixtrals of bytes that are trained here, some minutes on one core.

The experts that go are chosen by REAP, by how few tokens reach them, and at random; beside that, single weights inside
the experts go, as many as the dropped experts had. Every model learned Python's standard library, and is measured on
files of it that it never saw.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunus import prune
from prunus.eligible import eligible
from prunus.lab.data.datasets import read_stdlib
from prunus.oneshot.drop_experts import without_experts
from prunus.oneshot.fewer_experts import fewer_experts
from prunus.trained.quality import token_quality

from .benchmark import Benchmark, Measured, Record, Row, Section, newest_records, table_of

WHAT, CONTEXT, BATCH = "experts", 64, 16
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
INSIDE: dict[str, dict[str, Any]] = {
    "weights inside, WANDA": {"score": "wanda", "repair": None},
    "weights inside, repaired": {},
}


@dataclass(frozen=True, kw_only=True)
class Experts(Benchmark):
    """Train small models with experts, drop some of these, and compare with other ways to be as small."""

    steps: int = 500  # of training, of each model
    models: int = 3  # trained from different random weights
    draws: int = 5  # of random experts, for each model
    fractions: tuple[int, ...] = (25, 50)  # percent of the experts of each layer
    windows: int = 128  # for calibration
    eval_windows: int = 512  # held out

    def measure(self) -> Measured:
        library, unseen = (torch.from_numpy(part.astype("int64")) for part in read_stdlib())
        held_out, rows = windows(unseen, self.eval_windows, 0), []
        settings = {"weights": "a Mixtral of bytes", "steps": self.steps, "models": self.models, "draws": self.draws}
        for number in range(self.models):
            model = trained(library, self.steps, number)
            settings["parameters"] = sum(p.numel() for p in model.parameters())
            calibration = [windows(library, self.windows, 1000 + number)]
            for percent, way in states(model, calibration, self.fractions, self.draws):
                row = {"model": number, "dropped": percent, "way": way}
                row |= {"parameters": sum(int(p.count_nonzero()) for p in model.parameters())}
                rows.append(row | {"perplexity": token_quality(model, held_out).perplexity})
                print("model {model}, {dropped} %, {way}: {perplexity:.4f}".format(**rows[-1]), flush=True)
        return WHAT, settings | {"windows": self.windows, "held_out": self.eval_windows, "context": CONTEXT}, rows


def windows(data: Tensor, num: int, seed: int) -> Tensor:
    starts = torch.randint(len(data) - CONTEXT, (num, 1), generator=torch.Generator().manual_seed(seed))
    return data[starts + torch.arange(CONTEXT)]


def trained(data: Tensor, steps: int, seed: int) -> Any:
    """A Mixtral that learned ``data``, with the usual loss that balances its experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(vocab_size=256, max_position_embeddings=CONTEXT, router_aux_loss_coef=0.02, **SHAPE)
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for step, batch in enumerate(windows(data, steps * BATCH, seed).split(BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        model(batch, labels=batch, output_router_logits=True, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def states(
    model: Any, calibration: Sequence[Tensor], fractions: Sequence[int], draws: int
) -> Iterator[tuple[int, str]]:
    """Percent dropped and name of each state in which the model is while the caller has it; then it is dense again."""
    yield 0, "dense"
    num_dense = sum(p.numel() for p in model.parameters())
    for percent in fractions:
        result = prune(model, calibration, experts=percent / 100)
        assert result.experts is not None
        layers, removed = result.experts.layers, num_dense - sum(p.numel() for p in model.parameters())
        yield percent, "experts by REAP"
        result.undo_()

        orders = {"experts with fewest tokens": [torch.tensor(layer.num_tokens).argsort() for layer in layers]}
        for draw in range(draws):
            generator = torch.Generator().manual_seed(draw)
            orders[f"random experts, draw {draw}"] = [
                torch.randperm(len(layer.importance), generator=generator) for layer in layers
            ]
        plan = fewer_experts(model, percent / 100)
        for way, order in orders.items():
            chosen = [sorted(each[: plan.num_dropped].tolist()) for each in order]
            others = [replace(layer, dropped=tuple(those)) for layer, those in zip(layers, chosen, strict=True)]
            dropped = without_experts(model, plan, others)
            dropped.apply_()
            yield percent, way
            dropped.undo_()

        inside = {weight.name: weight.parameter.numel() for weight in eligible(model).weights}
        outside = [name for name in inside if ".experts." not in name]
        num_inside = sum(num for name, num in inside.items() if name not in outside)
        for way, how in INSIDE.items():
            result = prune(model, calibration, removed / num_inside, exclude=outside, **how)
            yield percent, way
            result.undo_()


# The page

INTRODUCTION = """# Dropping whole experts

`prune(model, batches, experts=0.25)` and `prunus prune FOLDER ... --experts 0.25` remove a quarter of the experts of \
each layer, with the router's rows: `round(0.25 E)` of E, those that matter least by REAP \
([Lasby et al. 2025](https://arxiv.org/abs/2510.13999)): the mean, over the tokens that the router sends to an expert, \
of the router's weight times the norm of the expert's output. What is written is an ordinary smaller folder, whose \
config says the new number, and which plain transformers loads. Each token still goes to as many experts as before, so \
that a pass multiplies as much, but less memory is taken and read. With `--sparsity` the experts that stay are then \
pruned inside. Shared experts stay. Where routing chooses among groups of experts (DeepSeek-V3), each group loses as \
many. `result.experts` in Python, `result.json` and the table that is printed say which experts went, and the \
importance of every one.

Families whose experts are stacked in one tensor are supported, which is most of transformers 5; others are refused in \
one line. Nothing is known about a family but its config: the model is built twice without memory, with the old number \
of experts and with the new one, and what differs is cut.

The rest of this page is made by `python -m benchmarks page` from the JSON files in `benchmarks/results/`; no figure \
in it is typed.
"""
TEXT = """{models} models of {parameters:,} parameters, each trained for {steps} steps on the bytes of Python's \
standard library: 2 layers, 8 experts a layer, of which each token uses 2. Perplexity of a byte on {held_out} windows \
of {context} bytes of files that were held out; calibrated on {windows} windows of the training files. "Weights \
inside" are single weights of the experts, as many as the dropped experts and their router rows have: they are zeros \
in tensors of the old shape, where dropped experts are gone. Random experts are drawn {draws} times for each model. \
Means over models and draws, the smallest and the largest; "worse" is the mean ratio to the same model, dense.

REAP is a mean over an expert's own tokens: how many they are does not count; for the experts with fewest tokens \
nothing else does. Repeat it with `python -m benchmarks experts`.
"""
COLUMNS = {"experts dropped": "dropped", "way": "way", "parameters not zero": "parameters:,", "perplexity": "mean:.3f",
           "range": "range", "worse than dense": "worse:+.1%"}  # fmt: skip


def page(folder: Path) -> str | None:
    """The page; None where nothing was measured."""
    records = [record for record in newest_records(folder) if record["what"] == WHAT]
    if not records:
        return None
    return "\n".join([INTRODUCTION, *(_section(record) for record in records)])


def _section(record: Record) -> str:
    return Section("What it costs", TEXT, {}, below=_table)(record)


def _table(record: Record) -> str:
    dense = {row["model"]: row["perplexity"] for row in record["rows"] if row["way"] == "dense"}
    ways: dict[tuple[int, str], list[Row]] = {}
    for row in record["rows"]:
        ways.setdefault((row["dropped"], row["way"].partition(", draw")[0]), []).append(row)
    lines = []
    for (dropped, way), rows in ways.items():
        found = [row["perplexity"] for row in rows]
        num = round(statistics.fmean(row["parameters"] for row in rows))
        line = {"dropped": f"{dropped} %", "way": way, "parameters": num}
        line |= {"mean": statistics.fmean(found), "range": f"{min(found):.3f} to {max(found):.3f}"}
        lines.append(line | {"worse": statistics.fmean(r["perplexity"] / dense[r["model"]] for r in rows) - 1})
    return "\n".join([table_of(lines, COLUMNS), "", *_verdicts(record["rows"])]) + "\n"


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """How often REAP is better than each other way on the same model."""
    reap = {(row["model"], row["dropped"]): row["perplexity"] for row in rows if row["way"] == "experts by REAP"}
    for dropped in dict.fromkeys(row["dropped"] for row in rows if row["dropped"]):
        others: dict[str, list[bool]] = {}
        for row in rows:
            if row["dropped"] == dropped and row["way"] != "experts by REAP":
                is_better = reap[row["model"], dropped] < row["perplexity"]
                others.setdefault(row["way"].partition(", draw")[0], []).append(is_better)
        counts = ", ".join(f"{way} in {sum(found)} of {len(found)}" for way, found in others.items())
        yield f"- {dropped} % dropped: REAP is better than {counts}."
