"""What masks cost a merge of LoRA adapters; a minute on one core.

A small GPT-2 of bytes learns Python's standard library while it is pruned to 50 %; then it is tuned on the English
of its manual (``pydoc_data.topics``), by LoRA and by other ways, and measured on a held-out tenth of that.
"""

import math
import pydoc_data.topics
import statistics
import sysconfig
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from prunus import Pruner, Ramp

from .benchmark import Benchmark, Measured, Section

CONTEXT, BATCH, TARGETS = 64, 8, ["c_attn", "c_fc", "c_proj"]
RANK = 8


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


def tokens_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batches(data: Tensor, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT, (count, BATCH, 1), generator=generator)
    return list(data[starts + torch.arange(CONTEXT)])


def train(model: nn.Module, data: Tensor, steps: int, seed: int, pruned: dict | None = None) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    _pruner = Pruner(model, optimizer, **pruned) if pruned else None
    for step, batch in enumerate(batches(data, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        model(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss(model: nn.Module, data: Tensor) -> float:
    return statistics.fmean(float(model(input_ids=b, labels=b).loss) for b in batches(data, 20, seed=12345))


def sparsity(model: nn.Module) -> float:
    weights = [p for name, p in model.named_parameters() if p.ndim > 1 and any(f".{t}." in name for t in TARGETS)]
    return sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)


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

    def measured(model: nn.Module) -> tuple[float, float]:
        return loss(model, held_out), sparsity(model)

    found = {"sparse model, not tuned": measured(base)}
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS, fan_in_fan_out=True)
    lora = peft.get_peft_model(deepcopy(base), config)
    train(lora, data, steps, seed)
    found["LoRA, before the merge"] = (loss(lora, held_out), sparsity(base))  # and a dense update
    found["LoRA, plain merge"] = measured(deepcopy(lora).merge_and_unload())
    merged = merge(lora)
    found["LoRA, merge under masks"] = measured(merged.model)
    print(f"seed {seed}: {merged}", flush=True)
    masked = deepcopy(base).requires_grad_(False)
    adapted = [module for name, module in masked.named_modules() if name.rpartition(".")[2] in TARGETS]
    for module in adapted:
        parametrize.register_parametrization(module, "weight", MaskedUpdate(module.get_parameter("weight")))
    train(masked, data, steps, seed)
    for module in adapted:
        parametrize.remove_parametrizations(module, "weight")
    found["LoRA that learns under the masks"] = measured(masked)
    whole = deepcopy(base)
    train(whole, data, steps, seed, {"masks": "zeros"})
    found['all kept weights, `Pruner(masks="zeros")`'] = measured(whole)
    return found


LORA = """A small GPT-2 of bytes learns the source of Python's standard library in {steps} steps while it is pruned to \
50 %, then {tuning} steps of the English of its manual, by LoRA of rank {rank} and by other ways at one learning rate; \
held-out loss, mean and deviation of {seeds} seeds of the tuning, by `python -m benchmarks lora`. Sparsity is of the \
weights the adapters stand on; before the merge a dense update stands beside them.
"""
SECTIONS = {
    "lora": Section(
        "Merging adapters under masks",
        LORA,
        {"way": "way", "loss": "mean", "sparsity": "sparsity:.2%"},
        lambda row, record: {"mean": f"{row['loss']:.3f} ± {row['spread']:.3f}"},
    )
}
