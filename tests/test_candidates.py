"""One pass finds what lies above a bracket and what lies in it, as its definition does."""

import math

import pytest
import torch
from reference import DRAWS

from prunus.ops import bits
from prunus.ops.candidates import candidates_reference, split_reference
from prunus.ops.lazy import stored


def sweep(source, live, lo, hi, limit):
    return candidates_reference([source], lo, hi, limit, {} if live is None else {source.name: live})


BRACKETS = [(-0.5, 0.5), (0.0, 0.0), (-math.inf, math.inf), (-math.inf, 0.0), (0.0, math.inf), (9.0, 9.5), (-9.0, -8.0)]


@pytest.mark.parametrize("dead", [False, True], ids=["all live", "some dead"])
@pytest.mark.parametrize("kind", [kind for kind in DRAWS if "int" not in kind])
def test_a_pass_in_pieces_equals_the_definition(kind, dead, small_chunks):
    source = stored("a", DRAWS[kind](23, 17))
    live = bits.pack(torch.rand(23, 17) < 0.7) if dead else None
    scores = source.weight.to(source.compared).view(-1)
    for lo, hi in BRACKETS:
        found = sweep(source, live, lo, hi, limit=source.numel)
        above, positions = split_reference(scores, live, lo, hi)
        assert torch.equal(found.above, above) and found.num_above == [int(bits.count(above))]
        assert torch.equal(found.positions, positions) and torch.equal(found.scores, scores[positions])


def test_a_pass_gives_up_where_more_than_the_limit_lie_inside(small_chunks):
    source = stored("a", torch.arange(300).float())
    assert sweep(source, None, 100.0, 149.0, limit=50) is not None
    assert sweep(source, None, 100.0, 149.0, limit=49) is None


def test_dead_scores_that_are_not_finite_are_neither_above_nor_inside(small_chunks):
    scores, live = torch.randn(200), torch.rand(200) < 0.5
    scores[~live] = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(67)[: int((~live).sum())]
    found = sweep(stored("a", scores), bits.pack(live), -0.5, 0.5, limit=200)
    assert torch.equal(bits.unpack(found.above, (200,)), (scores > 0.5) & live)
    assert live[found.positions].all() and len(found.positions) == int(((scores.abs() <= 0.5) & live).sum())


def test_a_live_score_that_is_not_finite_is_refused_though_the_sum_of_all_overflows():
    scores = torch.full((100,), 3e38)
    assert sweep(stored("a", scores), None, 0.0, 1.0, limit=100) is not None
    scores[7] = float("nan")
    with pytest.raises(ValueError, match="b has 1 that are not, the first nan"):
        sweep(stored("b", scores), None, 0.0, 1.0, limit=100)
