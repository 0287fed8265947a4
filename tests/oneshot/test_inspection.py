"""The inspection of a model looks at few tokens, survives a lack of memory, and sizes the passes for whole samples."""

from copy import deepcopy

import pytest
import torch
from probe_models import cnn, llama
from torch import nn

from prunus import prune
from prunus.eligible import unwrapped_model
from prunus.oneshot import Probe
from prunus.oneshot.blocks import Stream
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.method import Method
from prunus.oneshot.norms import _Sums
from prunus.oneshot.probe import inspection
from prunus.oneshot.resources import Clock
from prunus.oneshot.samples import num_tokens, shortened
from prunus.oneshot.scoring import Scores


def findings(case, batches):
    calibration = Calibration(case.model, batches)
    with calibration.open():
        return Scores(calibration, Method(loss=case.loss)).engine().findings


def crowded(limit, monkeypatch):
    """Memory that holds passes of at most that many tokens, and the lengths that were seen."""
    observe, seen = inspection._observe, []

    def observing(walk, loss, tree, *rest):
        tokens = tree.numel() if torch.is_tensor(tree) else len(tree[1])
        seen.append(tokens)
        if tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return observe(walk, loss, tree, *rest)

    monkeypatch.setattr(inspection, "_observe", observing)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("limit", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 40))])
def test_out_of_memory_halves_the_tokens_that_are_looked_at(limit, monkeypatch):
    case, tokens = llama(), torch.randint(0, 31, (3, 24))
    expected = prune(deepcopy(case.model), [tokens], 0.5, probe=Probe(0.05))
    plain = findings(case, [tokens])
    seen = crowded(limit, monkeypatch)
    found = findings(case, [tokens])
    assert max(seen) > limit and min(seen) <= limit
    assert found.batched and found.quick == plain.quick and found.starts == plain.starts and found.chained
    assert 0.5 < found.saved_bytes / plain.saved_bytes < 2
    result = prune(case.model, [tokens], 0.5, probe=Probe(0.05))
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_room_for_one_sample_that_cannot_be_cut_is_enough(monkeypatch):
    case = cnn()
    expected = prune(deepcopy(case.model), case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    crowded(1, monkeypatch)
    result = prune(case.model, case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def test_no_room_for_one_sample_is_said(monkeypatch):
    crowded(0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        findings(cnn(), cnn().batches)
    with pytest.raises(torch.OutOfMemoryError):
        findings(llama(), [torch.randint(0, 31, (3, 24))])


def test_long_samples_are_looked_at_in_part(monkeypatch):
    monkeypatch.setattr(inspection, "TOKENS", 6)
    seen = crowded(1000, monkeypatch)
    found = findings(llama(), [torch.randint(0, 31, (3, 24))])
    assert max(seen) == 12 and found.batched and found.chained and len(found.quick) == 21


@pytest.mark.parametrize("limit", [1, 2])
def test_norms_survive_a_lack_of_memory(limit, monkeypatch):
    case = llama()
    case.batches.append({key: value.repeat(3, 1) for key, value in case.batches[-1].items()})
    expected = prune(deepcopy(case.model), case.batches, 0.5, score="wanda", repair=None).masks
    squares, refused = _Sums.squares, []

    def reading(self, chunk):
        if chunk.size > limit:
            refused.append(chunk)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squares(self, chunk)

    monkeypatch.setattr(_Sums, "squares", reading)
    result = prune(case.model, case.batches, 0.5, score="wanda", repair=None)
    assert refused and all(torch.equal(result.masks[name], mask) for name, mask in expected.items())


TOKENS = torch.randint(0, 9, (2, 5))
ONES = torch.ones(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("tree", "num"),
    [
        (TOKENS, 5),
        ({"input_ids": TOKENS, "attention_mask": ONES}, 5),
        ({"input_ids": TOKENS, "attention_mask": ONES.tril()}, 0),
        (({"input_ids": TOKENS}, TOKENS), 5),
        ({"input_ids": TOKENS, "labels": TOKENS.masked_fill(TOKENS > 0, -100)}, 0),
        ({"input_ids": TOKENS, "labels": torch.tensor([0, 1])}, 5),
        ({"input_ids": TOKENS, "bias": torch.zeros(2, 1, 5, 5)}, 0),
        ({"input_ids": TOKENS, "more": TOKENS[:, :3]}, 0),
        (torch.randn(2, 5), 0),
        ({}, 0),
    ],
)
def test_only_plain_tokens_are_cut(tree, num):
    assert num_tokens(tree) == num
    if num:
        assert num_tokens(shortened(tree, 3)) == 3


def test_a_users_model_with_a_part_called_module_is_not_taken_for_a_wrapper():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.module(x).tanh())

    model = Mine()
    assert unwrapped_model(model) is model and unwrapped_model(nn.DataParallel(model)) is model
    batches = [(torch.randn(5, 4), torch.randint(0, 3, (5,)))]
    result = prune(model, batches, 0.5, score="wanda", probe=Probe(1e9), loss=nn.functional.cross_entropy)
    assert len(result.layers) == 2 and result.num_pruned == 21


def test_time_is_booked_on_the_innermost_part():
    case = llama()
    result = prune(case.model, case.batches, 0.5, score="fisher", probe=Probe(0.05))
    assert set(result.cost.parts) == {"strategy", "inspection", "records"}
    assert (
        all(seconds > 0 for seconds in result.cost.parts.values()) and sum(result.cost.parts.values()) <= result.seconds
    )
    clock = Clock()
    with pytest.raises(KeyError), clock.part("outer"), clock.part("inner"):
        raise KeyError
    assert set(clock.seconds) == {"outer", "inner"} and not clock._parts


@pytest.mark.parametrize("schedule", ["block", pytest.param("sequential", marks=pytest.mark.slow)])
def test_no_room_for_what_blocks_return_makes_passes_whole(schedule, monkeypatch):
    case = llama()
    expected = prune(deepcopy(case.model), case.batches, 0.5, probe=Probe(0.05, schedule=schedule)).masks
    ensure, refused = Stream.ensure, []

    def crowded(self, k, forward, size):
        if k and len(self.samples) == 5:  # not the two samples of the inspection
            refused.append(size)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ensure(self, k, forward, size)

    monkeypatch.setattr(Stream, "ensure", crowded)
    result = prune(case.model, case.batches, 0.5, probe=Probe(0.05, schedule=schedule))
    assert refused[-1] == 1 and result.cost.halved > 0
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.items())
