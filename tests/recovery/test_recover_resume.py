"""A recovery that was killed ends in the bits of one that was not: models and batches that are seldom met."""

import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from students import are_equal, bits_of, in_codes, llama, pruned, scales_of, sequences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from prunus import recover
from prunus.recovery import recovery_trainer

STEPS, KILLED_AT = 20, 13


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def teacher():
    return llama()


def assert_goes_on(student, teacher, batches, folder, monkeypatch, **options):
    """A run that was killed ends in the bits and the curve of one that was not; random numbers of both differ."""
    begin, ends = recovery_trainer._Driver.on_step_begin, []

    def die(self, args, state, *rest, **parts):
        if state.global_step == KILLED_AT:
            raise Killed
        begin(self, args, state, *rest, **parts)

    for name, is_killed in (("broken", True), ("broken", False), ("unbroken", False)):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(len(ends) + is_killed)
        with monkeypatch.context() as patch:
            if is_killed:
                patch.setattr(recovery_trainer._Driver, "on_step_begin", die)
            own = deepcopy(student)
            how = {"steps": STEPS, "held_out": 3, "state": folder / name, "progress": False} | options
            try:
                recovery = recover(own, teacher, batches(), **how)
            except Killed:
                continue
            scales = {f"{name} scales": values for name, values in scales_of(own).items()}
            ends.append((bits_of(own) | scales, (recovery.curve, recovery.teacher)))
    (broken, figures), (unbroken, whole) = ends
    assert are_equal(broken, unbroken) and figures == whole
    return figures[0]


class Augmented(TensorDataset):
    """Sequences that begin at a random token, drawn when they are read."""

    def __init__(self, draw):
        super().__init__(torch.cat(sequences(12)))
        self.draw = draw

    def __getitem__(self, at):
        return (super().__getitem__(at)[0] + int(self.draw())) % 60


DRAWS = {
    "torch": lambda: torch.randint(60, (1,)),
    "python": lambda: random.randrange(60),
    "numpy": lambda: np.random.randint(60),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
def test_augmentation_goes_on_where_it_was(teacher, tmp_path, monkeypatch, kind):
    def batches():
        return DataLoader(Augmented(DRAWS[kind]), batch_size=4, shuffle=True)

    assert_goes_on(pruned(teacher), teacher, batches, tmp_path, monkeypatch)


class Tied(nn.Module):
    """A language model whose head is its embedding, in a plain module."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(60, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)).relu())


class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def images():
    torch.manual_seed(3)
    return [(torch.randn(4, 3, 8, 8), torch.arange(4)) for _ in range(8)]


@pytest.mark.parametrize(("kind", "batches"), [(Tied, lambda: sequences(12)), (Images, images)])
def test_plain_modules_with_tied_or_strided_weights_go_on(tmp_path, monkeypatch, kind, batches):
    torch.manual_seed(0)
    model = kind()
    student = pruned(model, 0.5).to(memory_format=torch.channels_last)
    assert_goes_on(student, model, batches, tmp_path, monkeypatch)


@pytest.mark.slow
def test_weights_below_adapters_go_on_too(teacher, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    student = peft.get_peft_model(pruned(teacher), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    assert_goes_on(student, teacher, lambda: sequences(12), tmp_path, monkeypatch)


def test_a_run_that_was_killed_behind_its_last_step_says_what_it_would_have_said(teacher, tmp_path):
    first, again = (
        recover(pruned(teacher), teacher, sequences(12), steps=4, state=tmp_path, progress=False) for _ in range(2)
    )
    assert again.teacher == first.teacher and first.teacher.loss
    assert again.after == first.after and again.curve == first.curve


@pytest.mark.slow
def test_a_best_state_before_the_kill_is_kept(teacher, tmp_path, monkeypatch):
    options = {"lr": 0.02, "evaluations": 20}
    student = pruned(teacher, 0.9)
    assert_goes_on(student, teacher, lambda: sequences(12), tmp_path, monkeypatch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [llama, Tied])
def test_scales_of_codes_go_on_where_they_were(tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    model = kind()
    student = in_codes(pruned(model).bfloat16())
    curve = assert_goes_on(student, model, lambda: sequences(12), tmp_path, monkeypatch, lr=3e-3)
    assert curve[-1].kl < curve[0].kl
