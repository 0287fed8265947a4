"""What the callbacks of all trainers share: a Pruner's options, until the model and the length of the run are known."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..masking import unwrapped
from ..pruner import Pruner
from ..validation import check_call, check_options

SHARDING = ("FSDP", "DEEPSPEED", "DeepSpeed", "MEGATRON", "ModelParallel")


@dataclass(frozen=True)
class PrunerOptions:
    """Options of a ``Pruner``; wrong ones are refused here, not when the training begins."""

    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_call(Pruner.__init__, None, None, None, **self.options)
        check_options(self.options)

    def begin(
        self, model: nn.Module, optimizer: Optimizer, num_steps: int | None, last: Pruner | None = None
    ) -> Pruner:
        """A Pruner for a run of ``num_steps``; it keeps the masks of ``last`` if that had the same optimizer."""
        options = dict(self.options)
        if options.get("schedule") is not None:
            options["schedule"] = options["schedule"].over(num_steps)
        if last is not None:
            if last.optimizer is unwrapped(optimizer):
                options["masks"] = dict(last.masks)
            last.remove()
        return Pruner(model, optimizer, **options)


def refuse_sharding(strategy: str) -> None:
    """Refuse a trainer that shards weights, whose checkpoints would not restore the masks."""
    if any(name in strategy for name in SHARDING):
        raise ValueError(
            f"PruneCallback works on one device and with DDP, but the trainer uses {strategy}; "
            "for sharded weights use Pruner in a loop of your own"
        )


def check_resumable(state: object, step: int) -> None:
    """Refuse to resume from a checkpoint without a pruner's state: its zeros would grow back."""
    if step and not state:
        raise ValueError(
            f"the checkpoint of step {step} has no state of a pruner, so its zeros would not be held; resume from one "
            "that was saved whole by a run with PruneCallback, or begin a new run from its weights"
        )


def warn_if_unfinished(pruner: Pruner | None) -> None:
    """Warn if the training ended before the schedule: the model is denser than the schedule's final sparsity."""
    if pruner and pruner.schedule and pruner.step < pruner.schedule.end:
        warnings.warn(
            f"the training ended at step {pruner.step}, before the last event at {pruner.schedule.end}: "
            f"sparsity is {pruner.sparsity:.2%}, not {pruner.schedule.final:.2%}",
            stacklevel=3,
        )
