"""Layers are in one group only if they read the same input, whatever addresses their inputs have."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunus import Repair, prune
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.groups import Group
from prunus.oneshot.streams import Streams

WIDTH, LENGTH, NUM_EXPERTS = 8, 24, 4


class Experts(nn.Module):
    """Each sample goes to the expert that its first number names; all experts read from the same memory."""

    def __init__(self, others: str = "not called") -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS))
        self.beside = nn.Linear(WIDTH, WIDTH, bias=False)
        self.memory = np.empty((LENGTH, WIDTH), dtype=np.float32)
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(LENGTH, WIDTH)
        for sample in x:
            np.copyto(self.memory, sample[1:].numpy())
            tokens = torch.from_numpy(self.memory)  # another tensor at the same address, as allocators return them
            wanted = int(sample[0, 0])
            for number, expert in enumerate(self.experts):
                if number == wanted:
                    total = total + expert(tokens.clone() if len(x) > 1 else tokens)
                elif self.others == "empty":
                    expert(tokens[:0].clone())
        return self.beside(total)


def samples() -> list[Tensor]:
    x = torch.randn(2 * NUM_EXPERTS, LENGTH + 1, WIDTH, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0] = torch.arange(len(x)) % NUM_EXPERTS
    return [x[i : i + 1] for i in range(len(x))]


def groups_of(model: nn.Module, batches: list[Tensor]) -> list[Group]:
    with torch.no_grad():
        return Streams(Calibration(model, batches), has_dense=False, reads_dense=False).groups


@pytest.mark.parametrize("others", ["not called", "empty"])
def test_experts_that_different_samples_reach_are_in_groups_of_their_own(others):
    names = [group.names for group in groups_of(Experts(others), samples()) if "experts" in group.names[0]]
    assert sorted(names) == [(f"experts.{i}.weight",) for i in range(NUM_EXPERTS)]


@pytest.mark.parametrize("others", ["not called", "empty"])
def test_each_expert_is_repaired_with_its_own_tokens(others):
    torch.manual_seed(0)
    model, batches = Experts(others), samples()
    alone = {}
    for number in range(NUM_EXPERTS):
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        expert.load_state_dict({"0.weight": model.experts[number].weight})
        prune(expert, [x[0, 1:] for x in batches if x[0, 0, 0] == number], 0.5, repair=Repair("own"), progress=False)
        alone[number] = expert[0].weight
    prune(model, batches, 0.5, repair=Repair("own"), progress=False)
    for number, weight in alone.items():
        assert torch.equal(model.experts[number].weight != 0, weight != 0)
        torch.testing.assert_close(model.experts[number].weight, weight)
