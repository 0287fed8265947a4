"""One rank on a GPU over NCCL: FSDP2 as it is, offloaded, and by the sums that many ranks make."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from prunus import AdamWPrune, Global, PerLayer, PerRow, Pruner, Ramp, ranks

pytestmark = pytest.mark.gpu

RAMP = Ramp(0.7, 2, 6)
WIDTHS = (96, 257, 64)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    dist.init_process_group("nccl", f"file://{tmp_path_factory.mktemp('meet')}/file", rank=0, world_size=1)
    torch.cuda.set_device(0)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.fixture
def as_one_of_many(monkeypatch):
    """A rank that is alone takes the way of many: every count goes through NCCL."""

    def of_mesh(tensors, group=None):
        if not all(map(ranks.is_dtensor, tensors.values())):
            return ranks.ranks_of(tensors, group)
        groups = [next(iter(tensors.values())).device_mesh.get_group(0)]
        return ranks.Ranks(groups, groups)

    for module in ("pruner", "optim"):
        monkeypatch.setattr(f"prunus.{module}.ranks_of", of_mesh)


def mlp():
    torch.manual_seed(0)
    first, second, third = WIDTHS
    return nn.Sequential(nn.Linear(first, second), nn.Tanh(), nn.Linear(second, third, bias=False)).cuda()


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def trained(model, make, select=None, parts=1):
    """Eight steps with events on the way; the Pruner at the end."""
    optimizer = make(model.parameters(), lr=1e-2)
    pruner = Pruner(model, optimizer, schedule=RAMP, every=2, select=select or Global())
    for step in range(8):
        optimizer.zero_grad()
        for part in range(parts):
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(32, WIDTHS[0], generator=generator).cuda()
            (model(x) - 1).square().mean().backward()
        optimizer.step()
    return pruner


def check(pruner):
    """Exactly 70 %, and nothing of a pruned weight is alive, neither value nor moment."""
    num_weights = WIDTHS[1] * (WIDTHS[0] + WIDTHS[2])
    assert round(pruner.sparsity * num_weights) == round(0.7 * num_weights)
    parameters = {name.removeprefix("module."): p for name, p in pruner.model.named_parameters()}
    for name, mask in pruner.masks.items():
        p = parameters[name]
        assert torch.equal(local(p) == 0, ~mask)
        for key, value in pruner.optimizer.state[p].items():
            if key != "mask" and value.shape == p.shape:
                assert not local(value)[~mask].any(), f"{key} of {name}"


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWPrune])
@pytest.mark.parametrize("select", [Global(), PerLayer(), PerRow()])
def test_sharded_over_nccl_it_finds_the_masks_of_a_plain_process(mesh, as_one_of_many, make, select):
    plain = trained(mlp(), make, select)
    model = mlp()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    pruner = trained(model, make, select)
    assert pruner._shards, "the way of many ranks was not taken"
    assert pruner.digest() == plain.digest() and pruner.sparsity == plain.sparsity
    full = pruner.full_masks()
    assert all(torch.equal(full[name], mask) for name, mask in plain.masks.items())
    for mine, other in zip(model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(local(mine), other.detach())


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWPrune])
@pytest.mark.parametrize("pinned", [True, False])
def test_offloaded_to_the_cpu_nothing_pruned_comes_back(mesh, as_one_of_many, make, pinned):
    model = mlp().cpu()
    how = {"offload_policy": CPUOffloadPolicy(pin_memory=pinned), "mesh": mesh}
    how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (model[0], model):
        fully_shard(module, **how)
    pruner = trained(model, make, parts=2)
    assert next(model.parameters()).device.type == "cpu"
    check(pruner)


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWPrune])
def test_ddp_over_nccl_ends_as_a_plain_process(mesh, make):
    plain = trained(mlp(), make, parts=2)
    pruner = trained(DistributedDataParallel(mlp()), make, parts=2)
    check(pruner)
    assert pruner.digest() == plain.digest()
