"""Pruning under the ``Trainer`` of Hugging Face: ``Trainer(..., callbacks=[PruneCallback(schedule=...)])``."""

from typing import Any

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "prunus.integrations.huggingface needs transformers and accelerate: pip install prunus[hf]"
    ) from error

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..masking import unwrapped
from ..pruner import Event
from .pruner_options import PruneCallbackBase

KEY = "pruner"  # in the optimizer's first parameter group, the only place that loading does not cast


class PruneCallback(PruneCallbackBase, TrainerCallback):
    """Prunes the model while the Trainer trains it; takes the options of ``Pruner``.

    Steps of the schedule may be fractions of the run. The state is saved with the optimizer. The search for the best
    model (``load_best_model_at_end``) restarts after every event, so that the best model has the final masks.
    """

    _saving: RemovableHandle | None = None
    _masks_changed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        optimizer, strategy = unwrapped(parts["optimizer"]), str(AcceleratorState().distributed_type)
        pruner_state = optimizer.param_groups[0].pop(KEY, None)
        how = {"strategy": strategy, "num_steps": state.max_steps, "step": state.global_step, "state": pruner_state}
        pruner = self.begin(parts["model"], optimizer, **how)
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
        if state.global_step:  # otherwise a new run, whose optimizer may have trained before
            pruner.load_state_dict(pruner_state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._masks_changed:  # the metric of a denser model is not comparable
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        self._masks_changed = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        if self.pruner:
            parts["logs"]["sparsity"] = state.log_history[-1]["sparsity"] = self.pruner.sparsity

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.warn_if_unfinished()
