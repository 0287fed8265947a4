"""The parts of a training step: where they begin, and how those inside the pruner are seen from outside."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ...ops.machine import wait_for
from ...optim import AdamWPrune
from ..trainer import Training
from .trace import part

PARTS = {
    "data": "batches from the data set",
    "forward": "the model and its loss, with the copy of the batch to the device",
    "backward": "gradients",
    "gradient masking": "zeros in the gradients of pruned weights, by hooks",
    "clipping": "the norm of all gradients, and scaling by it",
    "optimizer": "the update of the weights",
    "score and select": "which weights stay: one pass computes scores and cuts, so there is no line between the two",
    "apply": "new masks, zeros in weights and moments",
    "waiting for the device": "at the end of the steps measured",
    "other": "everything else: learning rate, hooks, zeroing gradients",
    "idle": "the device had nothing to do",
}


class Marks:
    """Called with the part that begins, which ends the one before."""

    def __init__(self) -> None:
        self._now: AbstractContextManager[Any] | None = None

    def __call__(self, name: str) -> None:
        if self._now is not None:
            self._now.__exit__(None, None, None)
        self._now = None if name == "other" else part(name)
        if self._now is not None:
            self._now.__enter__()


def instrument(training: Training) -> None:
    """Let the training's parts be seen in traces; it computes what it did."""
    training.mark = Marks()
    pruner = training.pruner
    if pruner is None:
        return
    masked, held, updated = pruner._gradients.mask, pruner._held.hold, pruner.update

    def update() -> None:
        wait_for(training.device)  # what the step has under way is not the event's
        with part("score and select"):
            updated()
            wait_for(training.device)

    pruner._gradients.mask = _inside("gradient masking", masked)
    pruner._held.hold = _inside("apply", held)
    pruner.update = update


def _inside(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def seen(*args: Any) -> Any:
        with part(name):
            return work(*args)

    return seen


def fused(training: Training) -> list[str]:
    """What happens inside the optimizer's step and cannot be told apart from it, in words."""
    optimizer, notes = training.optimizer, []
    if isinstance(optimizer, AdamWPrune):
        inside = [
            *(["gradient masking"] if training.pruner else []),
            *(["clipping"] if optimizer.max_norm else []),
            *(["SPAM"] if optimizer.spam else []),
        ]
        if inside:
            notes.append(f"{' and '.join(inside)} happen inside AdamWPrune's step: their time is the optimizer's")
    if training.run.regrow:
        notes.append("until the ramp ends, pruned weights are zeroed after each step: that time is the optimizer's")
    if training.pruner and training.pruner._inputs:
        notes.append("the step of an event collects inputs in its forward pass: that time is neither's")
    if training.run.compile:
        notes.append("compiled code computes gradients before it hands them over: until then they count as activations")
    return notes
