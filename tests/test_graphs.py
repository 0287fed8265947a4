"""A CUDA graph of the step stays valid: masks, learning rate and step count change under it in place."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from prunus import AdamWPrune, Pruner, Ramp, Rate

pytestmark = pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 24)).cuda()


def trained(graphed: bool, steps: int = 24, power: float = 0.0, **options) -> tuple[nn.Sequential, Pruner]:
    """A network after ``steps`` steps with an event after every sixth, and its pruner."""
    model = network()
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = AdamWPrune(model.parameters(), lr=rate, **options)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.8, 0, 24), every=10**6, score="magnitude", rate=Rate(power))
    aims = [torch.randn_like(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def approach() -> None:  # a loss whose gradients are rounded the same in a graph and without
        for parameter, aim in zip(model.parameters(), aims, strict=True):
            parameter.grad.copy_(parameter.detach() - aim)
        optimizer.step()

    held = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        approach()
        approach()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph):
            approach()
    for step in range(steps):
        rate.fill_(1e-2 * (1 - step / steps))
        graph.replay() if graphed else approach()
        if step % 6 == 5:
            pruner.step = step
            pruner.update()
        held.append(all(not model.get_parameter(name)[~mask].any() for name, mask in pruner.masks.items()))
    assert all(held)
    return model, pruner


@pytest.mark.parametrize("steps", [7, 24])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"power": 1.0}], ids=["plain", "clipped", "rates"])
def test_a_replayed_step_trains_as_a_plain_one_and_keeps_the_zeros(options, steps):
    plain, plain_pruner = trained(False, steps, **options)
    graphed, graphed_pruner = trained(True, steps, **options)
    assert graphed_pruner.sparsity > 0.1
    assert graphed_pruner.digest() == plain_pruner.digest()
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_graph_that_would_know_no_masks_is_refused():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.8, 0, 24), every=10**6)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(ValueError, match="after the first event"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert pruner.step == 1


def test_the_step_takes_whichever_device_its_tensors_are_on():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer = nn.Linear(8, 8, device="cuda:1")
    layer(torch.ones(1, 8, device="cuda:1")).sum().backward()
    AdamWPrune(layer.parameters()).step()


FORKED = """
import multiprocessing
import torch
from torch import nn
from prunus import AdamWPrune, Pruner, Ramp

torch.zeros(1, device="cuda")

def child():
    model = nn.Linear(8, 8)
    optimizer = AdamWPrune(model.parameters())
    pruner = Pruner(model, optimizer, schedule=Ramp(0.5, 0, 2), every=1, score="magnitude")
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert pruner.sparsity == 0.5

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
assert process.exitcode == 0
"""


def test_a_forked_process_may_prune_on_the_cpu_where_the_parent_has_used_the_gpu():
    """In a process of its own: torch refuses a backward pass in the fork of one that has had one on a GPU."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
