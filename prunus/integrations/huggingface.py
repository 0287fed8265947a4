"""Pruning under the ``Trainer`` of Hugging Face: ``Trainer(..., callbacks=[PruneCallback(schedule=...)])``."""

from typing import Any

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "prunus.integrations.huggingface needs transformers and accelerate: pip install prunus[hf]"
    ) from error

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..masking import unwrapped
from ..pruner import Event, Pruner
from .pruner_options import PrunerOptions, check_resumable, refuse_sharding, warn_if_unfinished

KEY = "pruner"  # in the optimizer's first parameter group, the only place that loading does not cast


class PruneCallback(TrainerCallback):
    """Prunes the model while the Trainer trains it; options are those of ``Pruner``.

    Steps of the schedule may be fractions of the run. The state is saved with the optimizer. The search for the best
    model (``load_best_model_at_end``) restarts after every event, so that it has the final masks.
    """

    def __init__(self, **options: Any) -> None:
        self.options = PrunerOptions(options)
        self.pruner: Pruner | None = None
        self._saving: RemovableHandle | None = None
        self._masks_changed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        refuse_sharding(str(AcceleratorState().distributed_type))
        model, optimizer = parts["model"], unwrapped(parts["optimizer"])
        pruner_state = optimizer.param_groups[0].pop(KEY, None)
        check_resumable(pruner_state, state.global_step)
        self.pruner = self._begin(model, optimizer, state.max_steps)
        if state.global_step:  # otherwise a new run, whose optimizer may have trained before
            self.pruner.load_state_dict(pruner_state)

    def _begin(self, model: nn.Module, optimizer: Optimizer, num_steps: int) -> Pruner:
        pruner = self.options.begin(model, optimizer, num_steps, self.pruner)
        users_own = pruner.on_event

        def on_event(event: Event) -> None:
            self._masks_changed = True
            if users_own:
                users_own(event)

        def add_state(_: Optimizer, state_dict: dict[str, Any]) -> None:
            state_dict["param_groups"][0][KEY] = pruner.state_dict()

        pruner.on_event = on_event
        if self._saving:
            self._saving.remove()
        self._saving = optimizer.register_state_dict_post_hook(add_state)
        return pruner

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._masks_changed:  # the metric of a denser model is not comparable
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        self._masks_changed = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if self.pruner:
            parts["logs"]["sparsity"] = state.log_history[-1]["sparsity"] = self.pruner.sparsity

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        warn_if_unfinished(self.pruner)
