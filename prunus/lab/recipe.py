"""From the fields of a run to data, learning rate, optimizer, pruner and replayed factors on learning rates."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ..eligible import Weight, eligible
from ..optim import AdamWPrune, Spam
from ..pruner import Event, Pruner
from ..ranks import is_dtensor
from ..rate import Rate, lr_factors_of, parameter_groups
from ..regrow import Regrow
from ..select import SELECTORS, Shape
from .data import ImageData, TokenData, load
from .run import Run
from .run_files import read_metrics

Data = TokenData | ImageData


def data_of(run: Run) -> Data:
    return load(
        run.data,
        context=run.context,
        validation=run.validation,
        vocab_size=run.vocab_size,
        augment=run.augment,
    )


def lr_at(run: Run, step: int) -> float:
    """The learning rate of a step: linear warm-up to ``lr``, then down to ``min_lr`` of it at the end of the run.

    By a cosine or in a line from the warm-up on, or, for "wsd", in a line over the last ``decay_steps`` alone.
    """
    warmup = run.step_of(run.warmup)
    if step < warmup:
        return run.lr * (step + 1) / warmup
    start = run.total_steps - run.decay_steps
    progress = max(0, step - start) / max(1, run.decay_steps)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if run.lr_schedule == "cosine" else 1 - progress
    return run.lr * (run.min_lr + (1 - run.min_lr) * left)


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer, which decays matrices and leaves norms and biases alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if (run.rate_power or run.replay) and run.optimizer != "adamwprune":
        groups = parameter_groups(model, weight_decay=run.weight_decay, **run.choice)
    betas = (run.beta1, run.beta2)
    if run.optimizer == "adamwprune":
        spam = Spam() if run.spam else None
        return AdamWPrune(groups, lr=run.lr, betas=betas, max_norm=run.clip or None, spam=spam)
    if run.optimizer in ("adamw", "adam"):
        kind = torch.optim.AdamW if run.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, lr=run.lr, betas=betas, fused=True)
    if run.optimizer == "nadam":
        return torch.optim.NAdam(groups, lr=run.lr, betas=betas, decoupled_weight_decay=True)
    fused = not any(map(is_dtensor, parameters))  # the fused one takes no DTensor
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9, fused=fused)


def make_pruner(run: Run, model: nn.Module, optimizer: Optimizer, on_event: Callable[[Event], None]) -> Pruner | None:
    if run.score == "none":
        return None
    options = {"eps": run.eps, "q": run.exponent}
    return Pruner(
        model,
        optimizer,
        score=run.score,
        select=SELECTORS[run.allocate],
        schedule=run.sparsity_schedule(),
        every=run.every,
        rate=Rate(run.rate_power) if run.rate_power else None,
        regrow=Regrow(run.regrow, run.regrow_by) if run.regrow else None,
        **run.choice,
        score_options={name: value for name, value in options.items() if value is not None}
        | ({"seed": run.seed} if run.score == "random" else {}),
        on_event=on_event,
    )


def num_asked(run: Run, weights: Sequence[Weight]) -> int:
    """How many weights a run is to remove: of all, or of each layer or row, rounded there."""
    if run.score == "none":
        return 0
    shapes = [Shape(weight.name, tuple(weight.parameter.shape), weight.outputs) for weight in weights]
    return sum(quota.num * quota.num_drop for quota in SELECTORS[run.allocate].quota(shapes, run.sparsity))


def device_named(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def recorded_rates(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Steps at which the rates of the pruned run changed, and the factor of each weight from then on."""
    beside = run.out.parent / run.replayed
    folder = beside if beside.is_dir() else Path(run.replayed)
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} has no metrics.jsonl; replay takes the folder of an earlier, pruned run")
    if not (folder / "result.json").is_file():
        raise ValueError(f"the run in {folder} has not finished; replay its rates when it has")
    lines = read_metrics(folder)
    names = next((list(line["layers"]) for line in lines if isinstance(line.get("layers"), dict)), [])
    events = [(line["step"], line["event"].get("rates")) for line in lines if isinstance(line.get("event"), dict)]
    rows = [(step, rates) for step, rates in events if isinstance(rates, list) and len(rates) == len(names) > 0]
    if any(not isinstance(rate, float | int) for _, rates in rows for rate in rates):
        raise ValueError(f"{folder / 'metrics.jsonl'} has rates that are not numbers")
    changes = [(step, dict(zip(names, rates, strict=True))) for step, rates in rows]
    if not changes:
        raise ValueError(f"the run in {folder} has no rates to replay; it must use --rate-power above 0")
    return changes


class Replay:
    """Sets, before each step of a dense run, the factors that the pruned run had in that step.

    This control tells a better network from a better schedule.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer) -> None:
        self.changes = recorded_rates(run)
        weights = {weight.name: weight.parameter for weight in eligible(model, **run.choice).weights}
        if unknown := sorted(set(self.changes[0][1]) ^ set(weights)):
            raise ValueError(f"the run to replay pruned weights that this one lacks: {unknown[0]}")
        self.rates = lr_factors_of(optimizer, weights)
        self.rates.attach()

    def before(self, step: int) -> None:
        """Factors for the step that follows ``step`` others."""
        now = [factors for changed, factors in self.changes if changed <= step]
        factors = now[-1] if now else dict.fromkeys(self.rates.factors, 1.0)
        if factors != self.rates.factors:
            self.rates.set(factors)
