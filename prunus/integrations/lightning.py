"""Pruning under the ``Trainer`` of Lightning: ``Trainer(..., callbacks=[PruneCallback(schedule=...)])``."""

import math
from typing import TYPE_CHECKING, Any

from .pruner_options import PruneCallbackBase

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "prunus.integrations.lightning needs lightning or pytorch_lightning: pip install prunus[lightning]"
            ) from error


class PruneCallback(PruneCallbackBase, Callback):
    """Prunes the module while the Trainer trains it; takes the options of ``Pruner``.

    Steps of the schedule may be fractions of the run. The state is saved in the Trainer's checkpoints.
    """

    _state: dict[str, Any] | None = None  # loaded, until the training starts

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"PruneCallback needs exactly one optimizer, but there are {len(trainer.optimizers)}")
        step, total, state = trainer.global_step, trainer.estimated_stepping_batches, self._state
        if not state and self.pruner and step:  # a second fit
            state = self.pruner.state_dict()
        num_steps = int(total) if 0 <= total < math.inf else None
        how = {"strategy": type(trainer.strategy).__name__, "num_steps": num_steps, "step": step, "state": state}
        pruner = self.begin(pl_module, trainer.optimizers[0], **how)
        if state:
            pruner.load_state_dict(state)
        self._state = None

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = getattr(trainer, "log_every_n_steps", 1) or 1  # counting zeros is a pass over the weights
        if self.pruner and trainer.global_step % every == 0:
            pl_module.log("sparsity", self.pruner.sparsity, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self.warn_if_unfinished()

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict() if self.pruner else self._state or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
