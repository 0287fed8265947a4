"""Under the Trainer of Lightning a module ends with the masks and weights of the bare loop, interrupted or not."""

import warnings

import pytest
import torch
from tiny import bare_steps, batch, gpt2, same_weights, weights

from prunus import Pruner, Ramp

pytest.importorskip("lightning")
from prunus.integrations.lightning import PruneCallback

STEPS, BATCHES = 15, 10  # batches an epoch
RAMP = Ramp(0.5, begin=0.2, end=0.8)  # of 15 steps: 3 and 12
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=PACKAGES)
def lightning(request):
    return pytest.importorskip(request.param)


class Batches:
    """A loader that knows where it was, as Lightning asks of one that is to resume within an epoch."""

    def __init__(self):
        self.epoch, self.next = 0, 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        while self.next < BATCHES:
            self.next += 1
            yield batch(self.epoch * BATCHES + self.next - 1)
        self.epoch, self.next = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state):
        self.epoch, self.next = state["epoch"], state["next"]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def module_of(lightning, make=adamw, stop=None):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch, _):
            if self.global_step == stop:
                raise InterruptedError
            return self.model(**batch).loss

        def configure_optimizers(self):
            return make(self.model)

    return Module()


def fit(lightning, folder, callback, stop=None, resume=None, more=(), **options):
    options = {
        "max_steps": STEPS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder), "logger": False,
        "log_every_n_steps": 1, "num_sanity_val_steps": 0,
    } | options  # fmt: skip
    saving = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = module_of(lightning, stop=stop)
    trainer = lightning.Trainer(callbacks=[callback, saving, *more], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(num_workers|torch.jit|isinstance|weights_only|LeafSpec).*")
        trainer.fit(module, Batches(), ckpt_path=resume)
    return module, trainer


def callback_of(**options):
    return PruneCallback(**{"score": "bitter7", "schedule": RAMP, "every": 3} | options)


def bare_loop(accumulate, bf16=False):
    model = gpt2()
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="bitter7", schedule=Ramp(0.5, 3, 12), every=3)
    bare_steps(model, optimizer, STEPS, accumulate, bf16)
    return pruner


@pytest.mark.parametrize(
    ("accumulate", "precision"), [(2, "32-true"), pytest.param(1, "bf16-mixed", marks=pytest.mark.slow)]
)
def test_a_training_ends_as_the_bare_loop_to_the_bit(lightning, tmp_path, accumulate, precision):
    callback, bare = callback_of(), bare_loop(accumulate, "bf16" in precision)
    module, trainer = fit(
        lightning, tmp_path, callback, accumulate_grad_batches=accumulate, precision=precision, max_epochs=-1
    )
    assert callback.pruner.step == STEPS and bare.sparsity == 0.5
    for name, mask in bare.masks.items():
        assert torch.equal(callback.pruner.masks[f"model.{name}"], mask)
    assert same_weights(weights(module.model), weights(bare.model))
    assert trainer.logged_metrics["sparsity"] == 0.5


@pytest.mark.slow
def test_a_run_interrupted_within_an_epoch_resumes_to_the_same_bits(tmp_path):
    lightning = pytest.importorskip(PACKAGES[0])
    undisturbed, stopped, callback = (callback_of(score="movement") for _ in range(3))
    whole, _ = fit(lightning, tmp_path / "whole", undisturbed)
    with pytest.raises(InterruptedError):
        fit(lightning, tmp_path / "broken", stopped, stop=8)
    resumed, trainer = fit(lightning, tmp_path / "broken", callback, resume=tmp_path / "broken" / "step=6.ckpt")
    assert trainer.global_step == callback.pruner.step == STEPS
    assert callback.pruner.digest() == undisturbed.pruner.digest() and callback.pruner.sparsity == 0.5
    assert same_weights(weights(resumed), weights(whole))


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    lightning = pytest.importorskip(PACKAGES[0])
    fit(lightning, tmp_path, lightning.Callback(), max_steps=4)
    with pytest.raises(ValueError, match=r"step 4.*zeros"):
        fit(lightning, tmp_path, callback_of(), resume=tmp_path / "step=4.ckpt")


def test_a_second_fit_goes_on_with_what_the_first_pruned(tmp_path):
    lightning = pytest.importorskip(PACKAGES[0])
    callback = callback_of(schedule=Ramp(0.5, 1, 6))
    module, trainer = fit(lightning, tmp_path, callback, max_steps=7)
    first = callback.pruner.digest()
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(module, Batches())
    assert callback.pruner.step == trainer.global_step == 10
    assert callback.pruner.digest() == first and callback.pruner.sparsity == 0.5


def test_a_training_that_ends_before_its_schedule_says_so(tmp_path):
    lightning = pytest.importorskip(PACKAGES[0])

    class Enough(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    with pytest.warns(UserWarning, match=r"before the last event at 12.*not 50"):
        fit(lightning, tmp_path, callback_of(), more=[Enough()])
