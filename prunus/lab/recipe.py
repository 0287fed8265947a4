"""From the fields of a run to data, learning rate, optimizer and pruner."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..eligible import Weight
from ..optim import AdamWPrune, Spam
from ..pruner import Event, Pruner
from ..ranks import is_dtensor
from ..rate import Rate, parameter_groups
from ..regrow import Regrow
from ..select import SELECTORS, Shape
from .data import ImageData, TokenData, load
from .run import Run

Data = TokenData | ImageData


def data_of(run: Run) -> Data:
    """The data that a run reads."""
    return load(
        run.data,
        context=run.context,
        validation=run.validation,
        vocab_size=run.vocab_size,
        augment=run.augment,
    )


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up to ``lr``, then down to ``min_lr`` of it at the end of the run.

    By a cosine or in a line from the warm-up on, or, for "wsd", in a line over the last ``decay`` steps alone.
    """
    warmup = run.step_of(run.warmup)
    if step < warmup:
        return run.lr * (step + 1) / warmup
    start = warmup if run.decay is None else run.total_steps - run.step_of(run.decay)
    progress = max(0, step - start) / max(1, run.total_steps - start)
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
        groups = parameter_groups(model, weight_decay=run.weight_decay, include=run.include, exclude=run.exclude)
    betas = (run.beta1, run.beta2)
    if run.optimizer == "adamwprune":
        spam = Spam() if run.spam else None
        return AdamWPrune(groups, lr=run.lr, betas=betas, max_norm=run.clip or None, spam=spam)
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=run.lr, betas=betas, fused=True)
    if run.optimizer == "adam":
        return torch.optim.Adam(groups, lr=run.lr, betas=betas, fused=True)
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
        include=run.include,
        exclude=run.exclude,
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
    """The device that a run names; auto takes a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
