"""The inspection of a model looks at few tokens, survives a lack of memory, and sizes the passes for whole samples."""

from copy import deepcopy

import pytest
import torch
from probe_checks import assert_same_masks, findings
from probe_models import cnn, llama
from torch import nn

from prunus import prune
from prunus.eligible import unwrapped_model
from prunus.oneshot import Probe
from prunus.oneshot.blocks import Stream
from prunus.oneshot.probe import inspection
from prunus.oneshot.resources import Clock
from prunus.oneshot.samples import num_tokens, shortened


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
@pytest.mark.parametrize("limit", [8, 20, 40])
def test_out_of_memory_halves_the_tokens_that_are_looked_at(limit, monkeypatch):
    case, tokens = llama(num_layers=2), torch.randint(0, 31, (3, 24))
    expected = prune(deepcopy(case.model), [tokens], 0.5, probe=Probe(0.05))
    plain, _ = findings(case.model, [tokens])
    seen = crowded(limit, monkeypatch)
    found, _ = findings(case.model, [tokens])
    assert max(seen) > limit and min(seen) <= limit
    assert found.batched and found.quick == plain.quick and found.starts == plain.starts and found.chained
    assert 0.5 < found.saved_bytes / plain.saved_bytes < 2
    assert_same_masks(expected, prune(case.model, [tokens], 0.5, probe=Probe(0.05)))


def test_room_for_one_sample_that_cannot_be_cut_is_enough_and_no_room_is_said(monkeypatch):
    case, options = cnn(), {"probe": Probe(0.05), "loss": cnn().loss}
    expected = prune(deepcopy(case.model), case.batches, 0.5, **options)
    with monkeypatch.context() as patch:
        crowded(1, patch)
        assert_same_masks(expected, prune(case.model, case.batches, 0.5, **options))
    crowded(0, monkeypatch)
    for model, batches, loss in ((cnn().model, case.batches, case.loss), (llama().model, [TOKENS], None)):
        with pytest.raises(torch.OutOfMemoryError):
            findings(model, batches, loss)


def test_long_samples_are_looked_at_in_part(monkeypatch):
    monkeypatch.setattr(inspection, "TOKENS", 6)
    seen = crowded(1000, monkeypatch)
    found, names = findings(llama().model, [torch.randint(0, 31, (3, 24))])
    assert max(seen) == 12 and found.batched and found.chained and found.quick == names


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
    parts = result.cost.parts
    assert set(parts) == {"scores", "inspection", "records"}
    assert all(seconds > 0 for seconds in parts.values()) and sum(parts.values()) <= result.seconds
    clock = Clock()
    with pytest.raises(KeyError), clock.part("outer"), clock.part("inner"):
        raise KeyError
    assert set(clock.seconds) == {"outer", "inner"} and not clock._parts


@pytest.mark.parametrize("schedule", ["block", pytest.param("sequential", marks=pytest.mark.slow)])
def test_no_room_for_what_blocks_return_makes_passes_whole(schedule, monkeypatch):
    case = llama(num_layers=2)
    expected = prune(deepcopy(case.model), case.batches, 0.5, probe=Probe(0.05, schedule=schedule))
    ensure, refused = Stream.ensure, []

    def crowded(self, k, forward, size):
        if k and len(self.samples) == 5:  # not the two samples of the inspection
            refused.append(size)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ensure(self, k, forward, size)

    monkeypatch.setattr(Stream, "ensure", crowded)
    result = prune(case.model, case.batches, 0.5, probe=Probe(0.05, schedule=schedule))
    assert refused[-1] == 1 and result.cost.halved > 0
    assert_same_masks(expected, result)
