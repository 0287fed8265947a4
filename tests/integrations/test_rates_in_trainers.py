"""Rates that follow the density, under every trainer: as in the bare loop, and after a resume to the bit."""

import pytest
import torch
from accelerate import Accelerator
from covering import quickly
from test_huggingface_trainer import StopAt
from tiny import BATCH, Some, batch, gpt2, same_weights, weights
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from prunus import AdamWPrune, Pruner, Ramp, Rate, parameter_groups
from prunus.integrations.huggingface import PruneCallback

STEPS = 12
OPTIONS = {"score": "magnitude", "schedule": Ramp(0.75, 2, 8), "every": 3, "rate": Rate(power=1)}
MAKE = {
    "its own step": lambda model: AdamWPrune(model.parameters(), lr=1e-2),
    "split groups": lambda model: torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-2),
    "one group": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def trainer_of(folder, make, *more):
    model, callback = gpt2(), PruneCallback(**OPTIONS)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, lr_scheduler_type="linear",
        max_grad_norm=0.5, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=6,
        logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    optimizers = (make(model), None) if make else (None, None)
    return Trainer(model, arguments, train_dataset=Some(40), optimizers=optimizers, callbacks=[callback, *more])


def factors_follow(pruner):
    rates = {layer.name: layer.lr_factor for layer in pruner.report().layers if layer.name in pruner.masks}
    densities = {name: mask.float().mean().item() for name, mask in pruner.masks.items()}
    return (
        rates == pytest.approx({name: 1 / density for name, density in densities.items()}) and max(rates.values()) > 2
    )


@pytest.mark.parametrize("make", quickly([*MAKE.values(), None], None), ids=[*MAKE, "the trainer's own"])
def test_a_trainer_of_hugging_face_resumes_rates_to_the_same_bits(tmp_path, make):
    whole = trainer_of(tmp_path / "whole", make)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "broken", make, StopAt(7)).train()
    resumed = trainer_of(tmp_path / "broken", make)
    resumed.train(resume_from_checkpoint=True)
    [pruner] = [c.pruner for c in resumed.callback_handler.callbacks if isinstance(c, PruneCallback)]
    assert factors_follow(pruner) and pruner.sparsity == 0.75
    assert same_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("way", MAKE)
def test_a_trainer_of_lightning_ends_as_the_bare_loop(tmp_path, way):
    lightning = pytest.importorskip("lightning.pytorch")
    from test_lightning_trainer import module_of

    from prunus.integrations.lightning import PruneCallback as Callback

    trainer = lightning.Trainer(
        max_steps=STEPS, gradient_clip_val=0.5, accelerator="cpu", enable_progress_bar=False, logger=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(tmp_path),
        callbacks=[callback := Callback(**OPTIONS)],
    )  # fmt: skip
    batches = DataLoader([batch(number) for number in range(STEPS)], batch_size=None)
    trainer.fit(module := module_of(lightning, MAKE[way]), batches)
    bare = gpt2()
    pruner = Pruner(bare, optimizer := MAKE[way](bare), **OPTIONS)
    for number in range(STEPS):
        bare(**batch(number)).loss.backward()
        # Lightning adds up the norm in the order of the groups
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert factors_follow(callback.pruner) and same_weights(weights(module.model), weights(pruner.model))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "prepared_first"), zip(MAKE, (True, False, False), strict=True))
def test_a_loop_of_accelerate_resumes_rates_to_the_same_bits(tmp_path, way, prepared_first):
    def run(numbers, folder=None):
        accelerator = Accelerator(cpu=True)
        model = gpt2()
        optimizer = MAKE[way](model)
        if prepared_first:
            model, optimizer = accelerator.prepare(model, optimizer)
        pruner = Pruner(model, optimizer, **OPTIONS)
        if not prepared_first:
            model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(pruner)
        if folder:
            accelerator.load_state(folder)
        for number in numbers:
            accelerator.backward(model(**batch(number)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator, model, pruner

    _, whole, _ = run(range(STEPS))
    accelerator, _, _ = run(range(7))
    accelerator.save_state(tmp_path)
    _, resumed, pruner = run(range(7, STEPS), tmp_path)
    assert factors_follow(pruner) and same_weights(weights(resumed), weights(whole))
