"""Pruning under the ``Trainer`` of Lightning: ``Trainer(..., callbacks=[PruneCallback(schedule=...)])``."""

import math
from typing import TYPE_CHECKING, Any

from ..pruner import Pruner
from .pruner_options import PrunerOptions, check_resumable, refuse_sharding, warn_if_unfinished

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


class PruneCallback(Callback):
    """Prunes the module while the Trainer trains it; options are those of ``Pruner``.

    Steps of the schedule may be fractions of the run. The state is saved in the Trainer's checkpoints.
    """

    def __init__(self, **options: Any) -> None:
        self.options = PrunerOptions(options)
        self.pruner: Pruner | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        refuse_sharding(type(trainer.strategy).__name__)
        if len(trainer.optimizers) != 1:
            raise ValueError(f"PruneCallback works with one optimizer, but there are {len(trainer.optimizers)}")
        state = self._state or (self.pruner.state_dict() if self.pruner and trainer.global_step else {})  # a second fit
        check_resumable(state, trainer.global_step)
        total = trainer.estimated_stepping_batches
        num_steps = int(total) if 0 <= total < math.inf else None
        self.pruner = self.options.begin(pl_module, trainer.optimizers[0], num_steps, self.pruner)
        if state:
            self.pruner.load_state_dict(state)
        self._state = {}

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = getattr(trainer, "log_every_n_steps", 1) or 1  # counting zeros is a pass over the weights
        if self.pruner and trainer.global_step % every == 0:
            pl_module.log("sparsity", self.pruner.sparsity, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        warn_if_unfinished(self.pruner)

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict() if self.pruner else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
