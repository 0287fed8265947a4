"""What the callbacks of all trainers share: a Pruner's options, until the model and the length of the run are known."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..masking import unwrapped
from ..pruner import Event, Pruner
from ..rate import Rate
from ..regrow import Regrow
from ..schedule import Schedule
from ..select import Global, Selector
from ..validation import check_options, explained

SHARDING = ("FSDP", "DEEPSPEED", "DeepSpeed", "MEGATRON", "ModelParallel")


class PruneCallbackBase:
    """A callback that takes the options of ``Pruner``; wrong ones are refused here, not when the training begins."""

    @explained
    def __init__(
        self,
        *,
        score: str | Callable[..., Tensor] = "bitter7",
        select: Selector = Global(),
        schedule: Schedule | None = None,
        every: int | None = None,
        regrow: Regrow | None = None,
        rate: Rate | None = None,
        masks: Mapping[str, Tensor] | Literal["zeros"] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        only: str | Sequence[str] = (),
        reloaded: Literal["zero", "raise"] = "zero",
        no_gradient: Literal["raise", "dense"] = "raise",
        score_options: Mapping[str, Any] | None = None,
        score_dtype: torch.dtype = torch.float32,
        on_event: Callable[[Event], None] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.options: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        check_options(self.options)
        self.pruner: Pruner | None = None

    def begin(
        self, model: nn.Module, optimizer: Optimizer, *, strategy: str, num_steps: int | None, step: int, state: object
    ) -> Pruner:
        """A new Pruner for a run of ``num_steps``; it keeps the masks of the last if that had the same optimizer.

        A ``strategy`` that shards weights is refused, since its checkpoints would not restore the masks, and so is a
        run that goes on at ``step`` without the ``state`` of a pruner, since its zeros would grow back.
        """
        if any(name in strategy for name in SHARDING):
            raise ValueError(
                f"PruneCallback works on one device or with DDP, but the trainer uses {strategy}; for sharded weights, "
                "use Pruner in your own loop"
            )
        if step and not state:
            raise ValueError(
                f"the checkpoint of step {step} has no pruner state, so its zeros would fill; resume from a full "
                "checkpoint of a run with PruneCallback, or start a new run from its weights"
            )
        options = dict(self.options)
        if options["schedule"] is not None:
            options["schedule"] = options["schedule"].over(num_steps)
        if self.pruner is not None:
            if self.pruner.optimizer is unwrapped(optimizer):
                options["masks"] = dict(self.pruner.masks)
            self.pruner.remove()
        self.pruner = Pruner(model, optimizer, **options)
        return self.pruner

    def warn_if_unfinished(self) -> None:
        """Warn if the training ended before the schedule: the model is denser than the schedule's final sparsity."""
        pruner = self.pruner
        if pruner and pruner.schedule and pruner.step < pruner.schedule.end:
            warnings.warn(
                f"training ended at step {pruner.step}, before the last event at {pruner.schedule.end}: sparsity is "
                f"{pruner.sparsity:.2%}, not {pruner.schedule.final:.2%}",
                stacklevel=3,
            )
