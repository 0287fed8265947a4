"""Arms that share a row are the same computation: they end with the same bits."""

from dataclasses import replace

import pytest
import torch
from covering import quickly

from prunus.lab.run import Run
from prunus.lab.study.study_plan import key_of
from prunus.lab.trainer import train

RUN = Run(data="digits", model="lenet5", steps=12, begin=2, end=10, every=3, batch=16, eval_every=12, eval_size=16)
PAIRS = [
    ({"score": "bitter1"}, {"score": "magnitude"}),
    ({"score": "bitter4"}, {"score": "bitter3"}),
    ({"score": "bitter8"}, {"score": "bitter3"}),
    ({"score": "fisher", "exponent": 0.0}, {"score": "magnitude"}),
    ({"score": "fisher", "exponent": 0.25}, {"score": "bitter7"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", quickly(PAIRS, PAIRS[1], PAIRS[4]), ids=lambda pair: " is ".join(changes["score"] for changes in pair)
)
def test_arms_that_share_a_row_end_with_the_same_bits(pair, tmp_path):
    runs = [replace(RUN, out=tmp_path / str(number), **changes) for number, changes in enumerate(pair)]
    assert len({key_of(run) for run in runs}) == 1
    ends: list[dict[str, torch.Tensor]] = []
    for run in runs:
        train(run, finish=lambda training: ends.append(training.model.state_dict()))
    first, second = ends
    assert all(torch.equal(first[name], second[name]) for name in first)
