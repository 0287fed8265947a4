"""One training, one loop: ``train(run) -> Result``."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..eligible import eligible
from ..ops.device import device_of
from ..optim import AdamWPrune, Spam
from ..regrow import Regrow
from ..select import Global, NofM, PerLayer, PerRow, Selector
from ..summary import Report, report
from ..training import Event, Pruner
from . import memory
from .checkpoint import load_checkpoint, save_checkpoint
from .data import ImageData, TokenData, load
from .evaluate import Quality, evaluate, loss_of
from .models import build
from .run import Run
from .trackers import check_installed
from .tracking import Tracker, read_run

Progress = Callable[[int, dict[str, Any]], None]  # called after each step with what is known then
Data = TokenData | ImageData


@dataclass(frozen=True)
class Result:
    """What a run ended with; sparsity is counted from the zeros."""

    steps: int
    examples: int
    tokens: int
    loss: float
    perplexity: float
    accuracy: float
    sparsity: float
    num_prunable: int
    num_parameters: int
    seconds: float
    budget_scale: float
    digest: str | None
    peak_memory: int = 0  # bytes: allocated on the GPU, or held by the process on a CPU


class Training:
    """All that a run needs, built and checked before anything is written."""

    def __init__(self, run: Run, data: Data | None = None) -> None:
        self.run = run
        self.device = device_of(_device(run.device))
        memory.reset_peak(self.device)
        self.data: Data = data or data_of(run)
        torch.manual_seed(run.seed)
        self.model = build(run.model, self.data.shape).to(self.device)
        self.optimizer = make_optimizer(run, self.model)
        self.events: list[Event] = []
        self.pruner = make_pruner(run, self.model, self.optimizer, self.events.append)
        # the loss is compiled too: by itself it would read and write the logits in float32 several times over
        self.loss: Callable[..., torch.Tensor] = torch.compile(self._loss) if run.compile else self._loss
        self.step = 0
        self.seconds = 0.0

    def autocast(self) -> Any:
        if self.run.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            logits = self.model(inputs)
        return loss_of(logits, targets)

    def train_step(self) -> tuple[torch.Tensor, float]:
        """One optimizer step; its mean loss, still on the device, and the learning rate used."""
        run = self.run
        lr = learning_rate(run, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        lr *= getattr(self.optimizer, "lr_scale", 1.0)
        total = torch.zeros((), device=self.device)
        for part in range(run.accumulate):
            inputs, targets = self.data.train.batch(self.step * run.accumulate + part, run.batch, run.seed)
            inputs, targets = (x.to(self.device, non_blocking=True) for x in (inputs, targets))
            loss = self.loss(inputs, targets) / run.accumulate
            loss.backward()
            total += loss.detach()
        if run.clip and not isinstance(self.optimizer, AdamWPrune):
            nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total, lr

    def evaluate(self) -> Quality:
        batches = self.data.validation(self.run.batch, self.run.eval_size or None)
        return evaluate(self.model, batches, self.device, self.autocast())

    def sparsity(self) -> float:
        return self.pruner.sparsity if self.pruner else 0.0

    def zeros(self) -> dict[str, Any]:
        """Sparsity now and the zeros of each prunable layer, counted; a dense run has none to count."""
        if not self.pruner:
            return {"sparsity": 0.0}
        counted = self.pruner.report()
        return {"sparsity": counted.sparsity, "zeros": [layer.num_zeros for layer in counted.layers if not layer.dense]}

    def layers(self) -> dict[str, int]:
        """Number of weights of each prunable layer, in the order of ``zeros``."""
        layers = self.pruner.report().layers if self.pruner else []
        return {layer.name: layer.num_weights for layer in layers if not layer.dense}

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on; the order of the data is a function of seed and step."""
        return {
            "run": self.run.to_json(),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "pruner": self.pruner.state_dict() if self.pruner else None,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.pruner:
            self.pruner.load_state_dict(state["pruner"])
        self.step, self.seconds = state["step"], state["seconds"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])


def data_of(run: Run) -> Data:
    """The data that a run reads."""
    return load(
        run.data,
        context=run.context,
        validation=run.validation,
        vocab_size=run.vocab_size,
        augment=run.augment,
    )


def train(
    run: Run,
    progress: Progress = lambda step, values: None,
    *,
    data: Data | None = None,
    finish: Callable[[Training], None] | None = None,
) -> Result:
    """Train as ``run`` says, or continue it, and leave its folder complete.

    ``data`` is what ``data_of(run)`` gave, for many runs that share it. ``finish`` keeps what it wants of
    the trained model and is called in place of writing the last checkpoint.
    """
    checkpoint = run.out / "checkpoint.pt"
    if run.resume:
        run = run.continuing(read_run(run.out))
    elif run.out.exists() and any(run.out.iterdir()):
        raise ValueError(f"{run.out} is not empty; pass --resume to continue the run in it, or choose another --out")
    check_installed(run.track)
    training = Training(run, data)
    if run.resume and checkpoint.exists():
        training.load(load_checkpoint(checkpoint))
    tracker = Tracker.open(run, training.step)
    if not training.step and training.pruner:
        tracker.log(step=0, layers=training.layers())
    quality = _loop(training, tracker, checkpoint, progress, saves_last=finish is None) or training.evaluate()
    if finish:
        finish(training)
    result = _result(training, quality)
    tracker.result(asdict(result))
    return result


def evaluated(
    path: Path, data: str | None = None, validation: Path | None = None, eval_size: int = 0
) -> tuple[Quality, Report, int]:
    """Quality and sparsity of a checkpoint, on the run's own held-out data or another's, and its step."""
    state = load_checkpoint(path)
    run = replace(Run.from_json(state["run"]), eval_size=eval_size, compile=False)
    if data is not None:
        run = replace(run, data=data, validation=None)
    training = Training(run if validation is None else replace(run, validation=validation))
    training.load(state)
    return (
        training.evaluate(),
        report(training.model, eligible(training.model, run.include, run.exclude)),
        state["step"],
    )


def _loop(
    training: Training, tracker: Tracker, checkpoint: Path, progress: Progress, *, saves_last: bool
) -> Quality | None:
    """Step until the budget is spent; the quality at the end, if there was a step to take."""
    run, quality = training.run, None
    while training.step < run.total_steps:
        started = time.perf_counter()
        loss, lr = training.train_step()
        step, last = training.step, training.step == run.total_steps
        values: dict[str, Any] = {}
        for event in training.events:
            tracker.log(step=step, event=asdict(event))
        training.events.clear()
        if step % run.log_every == 0 or last:
            values = {"loss": loss.item(), "lr": lr, "examples": step * run.batch * run.accumulate}
        training.seconds += time.perf_counter() - started
        if step % run.eval_every == 0 or last:
            quality = training.evaluate()
            values |= {**training.zeros(), "eval": asdict(quality) | {"perplexity": quality.perplexity}}
        if values:
            tracker.log(step=step, **values)
        if saves_last if last else run.save_every and step % run.save_every == 0:
            save_checkpoint(checkpoint, training.state())
        progress(step, values)
    return quality


def _result(training: Training, quality: Quality) -> Result:
    run = training.run
    counted = report(training.model, eligible(training.model, run.include, run.exclude))
    examples = training.step * run.batch * run.accumulate
    return Result(
        steps=training.step,
        examples=examples,
        tokens=examples * run.context if isinstance(training.data, TokenData) else 0,
        loss=quality.loss,
        perplexity=quality.perplexity,
        accuracy=quality.accuracy,
        sparsity=counted.sparsity,
        num_prunable=counted.num_prunable,
        num_parameters=counted.num_parameters,
        seconds=training.seconds,
        budget_scale=run.budget_scale,
        digest=training.pruner.digest() if training.pruner else None,
        peak_memory=memory.peak(training.device),
    )


def learning_rate(run: Run, step: int) -> float:
    """Linear warm-up to ``lr``, then a cosine down to ``min_lr`` of it at the end of the run."""
    if step < run.warmup:
        return run.lr * (step + 1) / run.warmup
    progress = (step - run.warmup) / max(1, run.total_steps - run.warmup)
    return run.lr * (run.min_lr + (1 - run.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer, which decays matrices and leaves norms and biases alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
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
    return torch.optim.SGD(groups, lr=run.lr, momentum=0.9, fused=True)


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
        regrow=Regrow(run.regrow, run.regrow_by) if run.regrow else None,
        include=run.include,
        exclude=run.exclude,
        score_options={name: value for name, value in options.items() if value is not None}
        | ({"seed": run.seed} if run.score == "random" else {}),
        on_event=on_event,
    )


SELECTORS: dict[str, Selector] = {
    "global": Global(),
    "uniform": PerLayer("uniform"),
    "depth": PerLayer("depth"),
    "erk": PerLayer("erk"),
    "row": PerRow(),
    "2:4": NofM(2, 4),
}


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
