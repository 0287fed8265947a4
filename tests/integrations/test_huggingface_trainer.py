"""Under the Trainer of Hugging Face a model ends with the masks and weights of the bare loop, interrupted or not."""

import pytest
import torch
from tiny import BATCH, NUM_WEIGHTS, Sequences, Some, bare_steps, gpt2, same_weights, weights
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from prunus import AdamWPrune, Pruner, Ramp
from prunus.integrations.huggingface import PruneCallback

STEPS = 16
RAMP = Ramp(0.5, begin=0.125, end=0.75)  # of 16 steps: 2 and 12


class StopAt(TrainerCallback):
    """An interruption: nothing after it is run, not even the end of the training."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(folder, model, *callbacks, options=None, **arguments):
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "weight_decay": 0.1, "max_grad_norm": 0.5, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no", "dataloader_pin_memory": False,
    } | arguments  # fmt: skip
    options = {"train_dataset": Sequences()} | (options or {})
    trainer = Trainer(model=model, args=TrainingArguments(**arguments), callbacks=list(callbacks), **options)
    trainer.model_accepts_loss_kwargs = False  # a mean over each batch, as the bare loop has it
    return trainer


def callback_of(**options):
    return PruneCallback(**{"score": "bitter7", "schedule": RAMP, "every": 3} | options)


def bare_loop(model, accumulate=1, bf16=False):
    """What the Trainer does, in ten lines of plain torch."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    pruner = Pruner(model, optimizer, score="bitter7", schedule=Ramp(0.5, 2, 12), every=3)
    model.train()
    bare_steps(model, optimizer, STEPS, accumulate, bf16)
    return pruner


@pytest.mark.parametrize(("accumulate", "bf16"), [(3, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_training_ends_as_the_bare_loop_to_the_bit(tmp_path, accumulate, bf16):
    model, bare, callback = gpt2(), gpt2(), callback_of()
    trainer_of(tmp_path, model, callback, gradient_accumulation_steps=accumulate, bf16=bf16).train()
    pruner = bare_loop(bare, accumulate, bf16)
    assert callback.pruner.digest() == pruner.digest()
    assert same_weights(weights(model), weights(bare))
    assert sum(layer.num_zeros for layer in callback.pruner.report().layers) == NUM_WEIGHTS // 2


@pytest.mark.slow
def test_masks_from_inputs_are_the_same_where_layers_are_run_again(tmp_path):
    plain, again = callback_of(score="wanda"), callback_of(score="wanda")
    trainer_of(tmp_path, gpt2(), plain).train()
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer_of(tmp_path, gpt2(), again, **options).train()
    assert again.pruner.digest() == plain.pruner.digest()


KINDS = {
    "as it comes": {},
    "bfloat16 weights": {"dtype": torch.bfloat16, "gradient_accumulation_steps": 2},
    "movement": {"score": "movement"},
    "adamw prune": {"optimizer": True},
    "sparse from the start": {"masks": "zeros", "schedule": None},
}


def resumable(folder, kind, *callbacks, **arguments):
    """A run with dropout, shuffled data and a falling learning rate, and its callback."""
    asked = dict(KINDS[kind])
    options = {name: asked.pop(name) for name in ("score", "schedule", "masks") if name in asked}
    model, callback = gpt2(dropout=0.1, dtype=asked.pop("dtype", torch.float32)), callback_of(**options)
    if "masks" in options:
        for layer in model.transformer.h:
            layer.mlp.c_fc.weight.data[::2] = 0
    trained = {"train_dataset": Some(40)}
    if asked.pop("optimizer", False):
        trained["optimizer_cls_and_kwargs"] = (AdamWPrune, {"lr": 1e-2})
    arguments = {"save_strategy": "steps", "save_steps": 7, "lr_scheduler_type": "linear"} | asked | arguments
    return trainer_of(folder, model, callback, *callbacks, options=trained, **arguments), callback


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "as it comes"])
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, kind):
    whole, undisturbed = resumable(tmp_path / "whole", kind)
    whole.train()
    broken, _ = resumable(tmp_path / "broken", kind, StopAt(9))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed, callback = resumable(tmp_path / "broken", kind)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS == callback.pruner.step
    assert callback.pruner.sparsity == undisturbed.pruner.sparsity > 0.1
    assert callback.pruner.digest() == undisturbed.pruner.digest()
    assert same_weights(weights(resumed.model), weights(whole.model))


@pytest.mark.slow
def test_a_run_resumes_in_the_process_that_was_interrupted(tmp_path):
    whole, undisturbed = resumable(tmp_path / "whole", "as it comes")
    whole.train()
    trainer, callback = resumable(tmp_path / "broken", "as it comes", stop := StopAt(9))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(stop)
    trainer.train(resume_from_checkpoint=True)
    assert callback.pruner.digest() == undisturbed.pruner.digest()
    assert same_weights(weights(trainer.model), weights(whole.model))


@pytest.mark.slow
def test_what_a_first_training_pruned_stays_pruned_in_a_second(tmp_path):
    trainer = trainer_of(tmp_path, gpt2(), callback := callback_of())
    trainer.train()
    first = callback.pruner.digest()
    trainer.train()
    assert callback.pruner.digest() == first and callback.pruner.sparsity == 0.5


def test_a_checkpoint_without_masks_is_refused(tmp_path):
    trainer_of(tmp_path, gpt2(), save_strategy="steps", save_steps=7).train()
    with pytest.raises(ValueError, match=r"step 16.*zeros"):
        trainer_of(tmp_path, gpt2(), callback_of()).train(resume_from_checkpoint=True)


def test_the_saved_model_is_a_plain_one_with_exact_zeros(tmp_path):
    trainer = trainer_of(tmp_path / "run", gpt2(), callback := callback_of())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} <= {
        "config.json", "generation_config.json", "model.safetensors", "training_args.bin"
    }  # fmt: skip
    for name, mask in callback.pruner.masks.items():
        assert torch.equal(loaded.get_parameter(name) == 0, ~mask)


class Reporter(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **_):
        self.seen.append(dict(logs))


def test_sparsity_is_in_the_logs_and_reaches_reporters_behind_the_callback(tmp_path):
    arguments = {"logging_strategy": "steps", "logging_steps": 4}
    trainer = trainer_of(tmp_path, gpt2(), reporter := Reporter(), **arguments)
    trainer.callback_handler.callbacks.insert(0, callback_of())
    trainer.train()
    logged = {row["step"]: row["sparsity"] for row in trainer.state.log_history}
    assert logged == {4: 0.0, 8: logged[8], 12: 0.5, 16: 0.5} and 0 < logged[8] < 0.5
    assert [row["sparsity"] for row in reporter.seen][:4] == list(logged.values())


@pytest.mark.slow
def test_the_best_model_is_one_that_has_the_final_masks(tmp_path):
    falling = iter(range(100, 0, -1))  # by this metric the first model, which is dense, is the best of all
    trainer = trainer_of(
        tmp_path, gpt2(), callback := callback_of(),
        options={"eval_dataset": Some(4), "compute_metrics": lambda _: {"rank": next(falling)}},
        load_best_model_at_end=True, metric_for_best_model="rank", greater_is_better=True,
        save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1, save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 12
    for name, mask in callback.pruner.masks.items():
        assert torch.equal(trainer.model.get_parameter(name) == 0, ~mask)


def test_a_training_that_ends_before_its_schedule_says_so(tmp_path):
    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 6

    with pytest.warns(UserWarning, match=r"step 6, before the last event at 12.*not 50"):
        trainer_of(tmp_path, gpt2(), callback_of(), Enough()).train()


def test_two_callbacks_on_the_same_weights_are_refused_before_the_first_step(tmp_path):
    model = gpt2()
    before = weights(model)
    with pytest.raises(ValueError, match=r"c_attn\.weight.*\.remove\(\)"):
        trainer_of(tmp_path, model, callback_of(), callback_of(score="magnitude")).train()
    assert same_weights(weights(model), before)


def test_a_schedule_beyond_the_run_is_refused_before_the_first_step(tmp_path):
    model = gpt2()
    with pytest.raises(ValueError, match=r"17.*16 steps"):
        trainer_of(tmp_path, model, callback_of(schedule=Ramp(0.5, 1, 17))).train()
    assert same_weights(weights(model), weights(gpt2()))


def test_a_new_run_with_an_old_optimizer_counts_from_its_own_begin_and_keeps_the_masks(tmp_path):
    trainer_of(tmp_path, gpt2(), first := callback_of(), save_strategy="steps", save_steps=STEPS).train()
    model = GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    trainer = trainer_of(tmp_path, model, second := callback_of())
    saved = torch.load(tmp_path / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
    trainer.create_optimizer().load_state_dict(saved)
    trainer.train()
    assert second.pruner.step == STEPS and second.pruner.digest() == first.pruner.digest()
