"""Pruner in a loop of Accelerate ends as in the bare loop, and resumes from ``save_state`` to the same bits."""

import pytest
import torch
from accelerate import Accelerator
from tiny import batch, gpt2, same_weights, weights

from prunus import Pruner, Ramp

BATCHES = 28  # two to a step


class Run:
    """Model, optimizer and pruner as ``accelerator.prepare`` gives them back."""

    def __init__(self, seed=0):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = gpt2(seed, dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.pruner = Pruner(self.model, self.optimizer, schedule=Ramp(0.5, 2, 12), every=3)
        self.accelerator.register_for_checkpointing(self.pruner)
        torch.manual_seed(99)  # of dropout

    def train(self, numbers):
        for number in numbers:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch(number)).loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def bare_loop():
    model = gpt2(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.5, 2, 12), every=3)
    torch.manual_seed(99)
    for number in range(BATCHES):
        (model(**batch(number)).loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return pruner


@pytest.mark.slow
def test_a_training_ends_as_the_bare_loop_and_resumes_to_the_same_bits(tmp_path):
    whole = Run().train(range(BATCHES))
    bare = bare_loop()
    assert whole.pruner.step == 14 and whole.pruner.digest() == bare.digest() and bare.sparsity == 0.5
    assert same_weights(weights(whole.model), weights(bare.model))

    stopped = Run().train(range(16))
    stopped.accelerator.save_state(tmp_path)
    resumed = Run(seed=5)
    resumed.accelerator.load_state(tmp_path)
    resumed.train(range(16, BATCHES))
    assert resumed.pruner.step == 14 and resumed.pruner.digest() == bare.digest()
    assert same_weights(weights(resumed.model), weights(bare.model))
