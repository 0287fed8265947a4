"""One training, one loop: ``train(run) -> RunResult``."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..eligible import eligible
from ..files.atomic import is_part
from ..files.lock import lock_folder
from ..files.one_line import in_one_line
from ..ops.machine import device_of
from ..optim import AdamWPrune
from ..pruner import Event
from ..ranks import ranks_of
from ..sparsity_report import report
from ..trained.quality import Quality, held_out_words
from .arithmetic import fixed_arithmetic, restore_onednn
from .checkpoint import resume, save
from .data import TokenData
from .evaluate import counted, loss_of, measured, summed
from .interruption import Interrupted, SignalWatch
from .models import build
from .parallel import Team, team_of
from .recipe import Data, Replay, data_of, device_named, lr_at, make_optimizer, make_pruner, num_asked
from .run import Run, is_launched, read_run
from .tracking import Tracker, check_installed, peak_memory, reset_peak_memory

Progress = Callable[[int, dict[str, Any]], None]  # called after each step with what is known then


@dataclass(frozen=True)
class DenseStart:
    """A dense training some steps on, which a run that is equal until then may begin from."""

    state: dict[str, Any]  # ``Training.state`` without a Pruner's
    lines: list[dict[str, Any]]  # of metrics.jsonl, with the zeros that a pruned run counts
    wall_seconds: float = 0.0  # with evaluations


@dataclass(frozen=True)
class RunResult:
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
    num_asked: int = 0  # prunable weights that were to be removed


class Training:
    """All that a run needs, built and checked before anything is written; what only evaluates has no pruner."""

    def __init__(self, run: Run, data: Data | None = None, team: Team = Team(), *, trains: bool = True) -> None:
        self.run, self.team = run, team
        self.device = team.place(device_of(device_named(run.device)))
        reset_peak_memory(self.device)
        self.data: Data = data or team.each(lambda: data_of(run))
        torch.manual_seed(run.seed)
        self.model = build(run.model, self.data.shape, run.width, run.layers).to(self.device)
        self.wrapped = team.wrap(self.model, self.device)
        self.optimizer = make_optimizer(run, self.model)
        self.events: list[Event] = []
        self.pruner = make_pruner(run, self.model, self.optimizer, self.events.append) if trains else None
        self.replay = Replay(run, self.model, self.optimizer) if trains and run.replay else None
        # the loss is compiled too: by itself it would read and write the logits in float32 several times over
        self.loss: Callable[..., torch.Tensor] = torch.compile(self._loss) if run.compile else self._loss
        self.step = 0
        self.seconds = 0.0
        self.mark: Callable[[str], None] = lambda part: None  # called as each part of a step begins

    def autocast(self) -> Any:
        if self.run.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            logits = self.wrapped(inputs)
        return loss_of(logits, targets)

    def train_step(self) -> tuple[torch.Tensor, float]:
        """One optimizer step; its mean loss, still on the device, and the learning rate used."""
        run = self.run
        lr = lr_at(run, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        lr *= getattr(self.optimizer, "lr_scale", 1.0)
        if self.replay:
            self.replay.before(self.step)
        total = torch.zeros((), device=self.device)
        for part in range(run.accumulate):
            self.mark("data")
            number = self.step * run.accumulate + part  # of the global batch, of which this rank takes its part
            own = (number * self.team.size + self.team.rank, run.batch // self.team.size)
            inputs, targets = self.data.train.batch(*own, run.seed)
            self.mark("forward")
            inputs, targets = (x.to(self.device, non_blocking=True) for x in (inputs, targets))
            with self.team.syncing(self.wrapped, last=part == run.accumulate - 1):
                loss = self.loss(inputs, targets) / run.accumulate
                self.mark("backward")
                loss.backward()
            total += loss.detach()
        if run.clip and not isinstance(self.optimizer, AdamWPrune):
            self.mark("clipping")
            nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
        self.mark("optimizer")
        self.optimizer.step()
        self.mark("other")
        self.optimizer.zero_grad()
        self.step += 1
        return total, lr

    def evaluate(self, report: Callable[[int, int, str], None] | None = None) -> Quality:
        """Quality on held-out data; ranks share the batches, and every number is that of one process."""
        self.team.average_buffers_(self.model)
        batches = self.data.validation(self.run.batch, self.run.eval_size or None)
        if report:
            num = min(self.run.eval_size or self.data.num_held_out, self.data.num_held_out)
            batches = counted(batches, -(-num // self.run.batch), report)
        return summed(self.team.shared(batches, lambda own: measured(self.model, own, self.device, self.autocast())))

    @property
    def held_out(self) -> str:
        total, unit = self.data.num_held_out, "windows" if isinstance(self.data, TokenData) else "images"
        return held_out_words(self.run.eval_size or total, total, unit, "the first")

    def zeros(self, *, of_dense: bool = False) -> dict[str, Any]:
        """Sparsity now and the zeros of each prunable layer, counted; of a dense run only on request."""
        if not self.pruner and not of_dense:
            return {"sparsity": 0.0}
        prunable = eligible(self.model, **self.run.choice)
        counted = self.pruner.report() if self.pruner else report(self.model, prunable)
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
            "cuda_rng": [torch.cuda.get_rng_state(device) for device in self.team.gpus(self.device)],
        }

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with in_one_line(f"the weights do not fit {self.run.model} on {self.run.data}", RuntimeError, TypeError):
            self.model.load_state_dict(tensors)

    def load(self, state: dict[str, Any]) -> None:
        self.load_weights(state["model"])
        unfit = (RuntimeError, KeyError, TypeError, ValueError)
        with in_one_line(f"the state does not fit the optimizer {self.run.optimizer}", *unfit):
            self.optimizer.load_state_dict(state["optimizer"])
        if self.pruner and state["pruner"] is None:
            self.pruner.step = state["step"]  # a dense start: the pruner has only counted steps
        elif self.pruner:
            self.pruner.load_state_dict(state["pruner"])
        self.step, self.seconds = state["step"], state["seconds"]
        torch.set_rng_state(state["rng"])
        for device, rng in zip(self.team.gpus(self.device), state["cuda_rng"], strict=False):
            torch.cuda.set_rng_state(rng, device)


def train(
    run: Run,
    progress: Progress = lambda step, values: None,
    *,
    data: Data | None = None,
    start: DenseStart | None = None,
    after_step: Callable[[Training], None] = lambda training: None,
    finish: Callable[[Training], None] | None = None,
) -> RunResult:
    """Train as ``run`` says, or continue it, and leave its folder complete.

    ``data`` is what ``data_of(run)`` gave, for many runs that share it; a new run begins at ``start`` if
    there is one. ``finish`` gets the trained model and is called in place of writing the last checkpoint.
    """
    if run.resume:
        run = run.continuing(read_run(run.out))
    check_installed(run.track)
    with team_of(run) as team, ExitStack() as stack:
        run = team.first(lambda: _begun(run))
        stack.enter_context(fixed_arithmetic(run, team))
        training = Training(run, data, team)
        if team.is_first:
            stack.enter_context(lock_folder(run.out))
            _begun(run)  # another process may have used the folder meanwhile
        if run.resume:
            resume(training)
        tracker = Tracker.open(run, training.step) if team.is_first else Tracker()
        if not training.step and training.pruner:
            tracker.log(step=0, layers=training.layers())
        if start and not training.step:
            training.load(deepcopy(start.state))  # an optimizer keeps and changes the tensors that it loads
            for line in map(dict, start.lines):
                if training.pruner is None and line.pop("zeros", None):
                    line["sparsity"] = 0.0
                tracker.log(**line)

        def stepped(step: int, values: dict[str, Any]) -> None:
            after_step(training)
            progress(step, values)

        quality = _loop(training, tracker, stepped, saves_last=finish is None) or training.evaluate()
        if finish:
            finish(training)
        result = _result(training, quality)
        tracker.result(asdict(result))
    return result


def _begun(run: Run) -> Run:
    """The run, resumed if torchrun restarts it; a folder that holds something else is refused."""
    if run.resume or not run.out.exists() or all(map(is_part, run.out.iterdir())):
        return run
    is_restarted = is_launched() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_restarted and read_run(run.out).to_json() == run.to_json():
        return replace(run, resume=True)
    raise ValueError(f"{run.out} is not empty; pass --resume to continue the run in it, or choose another --out")


def _loop(training: Training, tracker: Tracker, progress: Progress, *, saves_last: bool) -> Quality | None:
    """Step until the budget is spent; the quality at the end, if there was a step to take."""
    run, quality = training.run, None
    onednn = bool(torch.backends.mkldnn.enabled)
    with SignalWatch(training.team) as signals:
        while training.step < run.total_steps:
            started = time.perf_counter()
            loss, lr = training.train_step()
            restore_onednn(onednn)
            step, last = training.step, training.step == run.total_steps
            values: dict[str, Any] = {}
            for event in training.events:
                tracker.log(step=step, event={name: value for name, value in asdict(event).items() if value != ()})
            training.events.clear()
            if step % run.log_every == 0 or last:
                mean = training.team.rows(loss.reshape(1)).mean().item()
                values = {"loss": mean, "lr": lr, "examples": step * run.batch * run.accumulate}
            training.seconds += time.perf_counter() - started
            if step % run.eval_every == 0 or last:
                quality = training.evaluate()
                values |= {**training.zeros(), "eval": asdict(quality) | {"perplexity": quality.perplexity}}
            if values:
                tracker.log(step=step, **values)
            signum = 0 if last else signals.agreed()
            if signum or (saves_last if last else run.save_every and step % run.save_every == 0):
                tracker.flush()
                save(training, last)
            progress(step, values)
            if signum:
                raise Interrupted(signum, run, step)
    return quality


def _result(training: Training, quality: Quality) -> RunResult:
    run = training.run
    ranks = ranks_of(dict(training.model.named_parameters())) if training.team.kind == "fsdp" else None
    prunable = eligible(training.model, **run.choice)
    counted = report(training.model, prunable, ranks)
    examples = training.step * run.batch * run.accumulate
    return RunResult(
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
        peak_memory=peak_memory(training.device),
        num_asked=num_asked(run, prunable.weights),
    )
