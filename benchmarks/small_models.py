"""Small models of bytes, trained here: what masks cost a merge of LoRA adapters, and what dropping experts costs.

``lora``: a GPT-2 learns Python's standard library while it is pruned to 50 %; then it is tuned on the English of its
manual (``pydoc_data.topics``), by LoRA and by other ways, and measured on a held-out tenth of that; one minute.

``experts``: Mixtrals learn the standard library. The experts that go are chosen by REAP, by how few tokens reach them,
and at random; beside that, single weights inside the experts go, as many as the dropped experts had. The models are
measured on files that they never saw; some minutes on one core.
"""

import math
import pydoc_data.topics
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from prunus import Pruner, Ramp, prune, shrink
from prunus.eligible import eligible
from prunus.lab.data.datasets import read_stdlib
from prunus.oneshot.drop_experts import fewer_experts, without_experts
from prunus.trained.quality import token_quality

from .benchmark import Benchmark, Measured, Record, RecordTable, Row, newest_records, table_of

CONTEXT = 64


def windows(data: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """Windows of ``CONTEXT`` bytes that begin anywhere."""
    starts = torch.randint(len(data) - CONTEXT, (*shape, 1), generator=torch.Generator().manual_seed(seed))
    return data[starts + torch.arange(CONTEXT)]


def learn(model: nn.Module, batches: Tensor, optimizer: torch.optim.Optimizer, warm_up: int, **forward: Any) -> None:
    """Train on every batch, with a rate that climbs and then falls to a tenth along a cosine."""
    lr, trained = optimizer.defaults["lr"], [p for p in model.parameters() if p.requires_grad]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / len(batches)))
        model(input_ids=batch, labels=batch, **forward).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


# Adapters

TARGETS, RANK = ["c_attn", "c_fc", "c_proj"], 8


@dataclass(frozen=True, kw_only=True)
class Lora(Benchmark):
    """Tune a pruned model by LoRA, merge under its masks, and compare with other ways."""

    steps: int = 400  # of the training in which the model is pruned
    tuning: int = 150  # steps of each tuning
    seeds: int = 3  # tunings of each way

    def measure(self) -> Measured:
        manual = tokens_of("\n".join(pydoc_data.topics.topics.values()))
        train_data, held_out = manual[: len(manual) * 9 // 10], manual[len(manual) * 9 // 10 :]
        base = sparse_model(self.steps)
        runs = [tuned(base, train_data, held_out, self.tuning, seed) for seed in range(1, self.seeds + 1)]
        rows = []
        for way in runs[0]:
            losses, sparsities = zip(*(run[way] for run in runs), strict=True)
            row = {"way": way, "loss": statistics.fmean(losses), "sparsity": statistics.fmean(sparsities)}
            rows.append(row | {"spread": statistics.stdev(losses) if self.seeds > 1 else 0.0})
        return "lora", {"steps": self.steps, "tuning": self.tuning, "seeds": self.seeds, "rank": RANK}, rows


def tokens_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def train(model: nn.Module, data: Tensor, steps: int, seed: int, pruned: dict | None = None) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0)
    _pruner = Pruner(model, optimizer, **pruned) if pruned else None
    learn(model, windows(data, (steps, 8), seed), optimizer, 20)


def sparse_model(steps: int) -> nn.Module:
    """The GPT-2 of bytes, pruned while it learned Python's standard library."""
    from transformers import GPT2Config, GPT2LMHeadModel

    library = "".join(p.read_text() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    torch.manual_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, use_cache=False,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    )  # fmt: skip
    schedule = Ramp(0.5, steps // 10, max(1, steps * 85 // 100))
    every = max(1, min(10, steps // 10))
    train(base, tokens_of(library), steps, 0, {"score": "bitter7", "schedule": schedule, "every": every})
    return base


@torch.no_grad()
def loss_and_sparsity(model: nn.Module, data: Tensor) -> tuple[float, float]:
    """Loss on held-out windows, and the zeros of the weights that adapters stand on."""
    losses = [float(model(input_ids=batch, labels=batch).loss) for batch in windows(data, (20, 8), seed=12345)]
    weights = [p for name, p in model.named_parameters() if p.ndim > 1 and any(f".{t}." in name for t in TARGETS)]
    return statistics.fmean(losses), sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)


class MaskedUpdate(nn.Module):
    """``W + mask * (A B)``: LoRA that learns under the mask, so that nothing is dropped when it is merged."""

    def __init__(self, weight: Tensor, rank: int = RANK) -> None:
        super().__init__()
        self.register_buffer("mask", weight != 0)
        self.a = nn.Parameter(torch.randn(weight.shape[0], rank) / math.sqrt(weight.shape[0]))
        self.b = nn.Parameter(torch.zeros(rank, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.mask * (self.a @ self.b) * 2


def tuned(base: nn.Module, data: Tensor, held_out: Tensor, steps: int, seed: int) -> dict[str, tuple[float, float]]:
    """Loss and sparsity of every way, from the same base and the same batches."""
    import peft

    from prunus.integrations.peft import merge

    measured = {"sparse model, not tuned": loss_and_sparsity(base, held_out)}
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS, fan_in_fan_out=True)
    lora = peft.get_peft_model(deepcopy(base), config)
    train(lora, data, steps, seed)
    sparsity = measured["sparse model, not tuned"][1]  # a dense update stands beside it
    measured["LoRA, before the merge"] = loss_and_sparsity(lora, held_out)[0], sparsity
    measured["LoRA, plain merge"] = loss_and_sparsity(deepcopy(lora).merge_and_unload(), held_out)
    merged = merge(lora)
    measured["LoRA, merge under masks"] = loss_and_sparsity(merged.model, held_out)
    print(f"seed {seed}: {merged}", flush=True)
    masked = deepcopy(base).requires_grad_(False)
    adapted = [module for name, module in masked.named_modules() if name.rpartition(".")[2] in TARGETS]
    for module in adapted:
        parametrize.register_parametrization(module, "weight", MaskedUpdate(module.get_parameter("weight")))
    train(masked, data, steps, seed)
    for module in adapted:
        parametrize.remove_parametrizations(module, "weight")
    measured["LoRA that learns under the masks"] = loss_and_sparsity(masked, held_out)
    whole = deepcopy(base)
    train(whole, data, steps, seed, {"masks": "zeros"})
    measured['all kept weights, `Pruner(masks="zeros")`'] = loss_and_sparsity(whole, held_out)
    return measured


TABLES = {"lora": RecordTable("way | loss = {loss:.3f} ± {spread:.3f} | sparsity:.2%")}


# Experts

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
REAP = "experts by REAP"


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
        held_out, rows = windows(unseen, (self.eval_windows,), 0), []
        settings = {"weights": "a Mixtral of bytes", "steps": self.steps, "models": self.models, "draws": self.draws}
        for number in range(self.models):
            model = mixtral(library, self.steps, number)
            settings["parameters"] = sum(p.numel() for p in model.parameters())
            calibration = [windows(library, (self.windows,), 1000 + number)]
            for percent, way in states(model, calibration, self.fractions, self.draws):
                row = {"model": number, "dropped": percent, "way": way}
                row |= {"parameters": sum(int(p.count_nonzero()) for p in model.parameters())}
                rows.append(row | {"perplexity": token_quality(model, held_out).perplexity})
                print("model {model}, {dropped} %, {way}: {perplexity:.4f}".format(**rows[-1]), flush=True)
        return "experts", settings | {"windows": self.windows, "held_out": self.eval_windows, "context": CONTEXT}, rows


def mixtral(data: Tensor, steps: int, seed: int) -> Any:
    """A Mixtral that learned ``data``, with the usual loss that balances its experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(vocab_size=256, max_position_embeddings=CONTEXT, router_aux_loss_coef=0.02, **SHAPE)
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    learn(model, windows(data, (steps, 16), seed), optimizer, 50, output_router_logits=True, use_cache=False)
    return model.eval()


def states(
    model: Any, calibration: Sequence[Tensor], fractions: Sequence[int], draws: int
) -> Iterator[tuple[int, str]]:
    """Percent dropped and name of each state in which the model is while the caller has it; then it is dense again."""
    yield 0, "dense"
    num_dense = sum(p.numel() for p in model.parameters())
    for percent in fractions:
        result = shrink(model, calibration, experts=percent / 100)
        layers, removed = result.experts, num_dense - sum(p.numel() for p in model.parameters())
        yield percent, REAP
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
            cuts = without_experts(model, plan, others)
            cuts.apply_()
            yield percent, way
            cuts.undo_()

        inside = {weight.name: weight.parameter.numel() for weight in eligible(model).weights}
        outside = [name for name in inside if ".experts." not in name]
        num_inside = sum(num for name, num in inside.items() if name not in outside)
        ways: dict[str, dict[str, Any]] = {"WANDA": {"score": "wanda", "repair": None}, "repaired": {}}
        for way, options in ways.items():
            result = prune(model, calibration, removed / num_inside, exclude=outside, **options)
            yield percent, f"weights inside, {way}"
            result.undo_()


COLUMNS = (
    "experts dropped = {dropped} % | way | parameters not zero = parameters:, | perplexity = mean:.3f | "
    "range = {least:.3f} to {most:.3f} | worse than dense = worse:+.1% | REAP is better in = {num_better} of {num}"
)


def parts(folder: Path) -> dict[str, str]:
    """What ``docs/experts.md`` shows between its marks."""
    return {"experts": "\n".join(map(RecordTable("", below=_table), newest_records(folder, "experts")))}


def _table(record: Record) -> str:
    by_model = {(row["way"], row["dropped"], row["model"]): row["perplexity"] for row in record["rows"]}
    ways: dict[tuple[int, str], list[Row]] = {}
    for row in record["rows"]:
        ways.setdefault((row["dropped"], row["way"].partition(", draw")[0]), []).append(row)
    lines = []
    for (dropped, way), rows in ways.items():
        values = [row["perplexity"] for row in rows]
        num = round(statistics.fmean(row["parameters"] for row in rows))
        line = {"dropped": dropped, "way": way, "parameters": num, "num": len(rows)}
        line |= {"mean": statistics.fmean(values), "least": min(values), "most": max(values)}
        line |= {"worse": statistics.fmean(r["perplexity"] / by_model["dense", 0, r["model"]] for r in rows) - 1}
        if dropped and way != REAP:
            line["num_better"] = sum(by_model[REAP, dropped, row["model"]] < row["perplexity"] for row in rows)
        lines.append(line)
    return table_of(lines, COLUMNS)
