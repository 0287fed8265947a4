"""The dense start that arms share: runs of one recipe and seed are one computation until their first event.

The first run of a process trains it, and the others begin from its state: the same bits, sooner.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..replay import recorded_rates
from ..run import Run
from ..run_files import read_metrics
from ..trainer import DenseStart, Training
from .study_plan import dense_of, key_of

MOST = 4  # starts that are kept at a time: each is as large as a checkpoint
COLLECT = ("movement", "wanda")  # scores that collect from the first step on


def num_shared(run: Run) -> int:
    """Steps that a run shares with the dense run of its recipe, up to the first evaluation."""
    if run.parallel != "none" or run.optimizer == "adamwprune" or run.score in COLLECT:
        return 0
    before = run.total_steps
    if run.replay:
        try:
            before = recorded_rates(run)[0][0]
        except ValueError:  # the run to replay is not finished yet
            return 0
    if run.score != "none":
        schedule = run.sparsity_schedule()
        events = (step for step in range(1, before + 1) if schedule.is_event(step, run.every))
        before = next(events, before + 1) - 1
    return min(before, run.eval_every - 1)


def _recipe(run: Run) -> str:
    """Equal for runs whose dense starts are interchangeable: one computation, with the same groups in the optimizer."""
    return f"{key_of(dense_of(run))} {'alone' if run.rate_power or run.replay else 'together'}"


@dataclass
class Starts:
    """States, in main memory, that later runs will begin from, by recipe with seed and by step."""

    kept: dict[tuple[str, int], DenseStart] = field(default_factory=dict)

    def of(self, run: Run) -> DenseStart | None:
        """Where ``run`` may begin: the latest start there is for it."""
        recipe, most = _recipe(run), num_shared(run)
        steps = [step for key, step in self.kept if key == recipe and step <= most]
        return self.kept[recipe, max(steps)] if steps else None

    def recorder(self, run: Run, others: Iterable[Run]) -> "Recorder":
        """Keeps states of ``run`` that ``others`` can begin from; starts that none of them needs are dropped."""
        wanted = [(_recipe(other), num_shared(other)) for other in others]
        self.kept = {
            (key, step): start
            for (key, step), start in self.kept.items()
            if any(key == recipe and step <= most for recipe, most in wanted)
        }
        mine, most = _recipe(run), num_shared(run)
        return Recorder(self, mine, {min(step, most) for recipe, step in wanted if recipe == mine})


@dataclass
class Recorder:
    """Called after each step of a run: keeps its state at the steps that others will begin from."""

    starts: Starts
    recipe: str
    steps: set[int]
    first: tuple[int, float] | None = None  # step and seconds after the first one, which may have compiled

    def __call__(self, training: Training) -> None:
        step, kept = training.step, self.starts.kept
        self.first = self.first or (step, training.seconds)
        if step in self.steps and (self.recipe, step) not in kept and len(kept) < MOST:
            state = training.state() | {"pruner": None, "seconds": self._seconds(training)}
            lines = [line for line in read_metrics(training.run.out) if 0 < line["step"] <= step]
            kept[self.recipe, step] = DenseStart(_in_main_memory(state), lines)

    def _seconds(self, training: Training) -> float:
        """Training time so far, as it would be without what only the first run of a process pays."""
        step, seconds = self.first or (0, 0.0)
        if training.step == step:
            return training.seconds
        return (training.seconds - seconds) / (training.step - step) * training.step


def _in_main_memory(value: Any) -> Any:
    """A copy in which no tensor is shared with ``value``."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _in_main_memory(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_in_main_memory, value))
    return value
