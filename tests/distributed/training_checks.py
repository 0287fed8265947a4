"""Trainings by many ranks: DDP, FSDP2 and tensor parallelism, and what must go wrong on all of them at once."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from toys import NAMES, Net, adamw, adamw_prune, batch, net

from prunus import AdamWPrune, Constant, Global, PerLayer, PerRow, Pruner, Ramp, Rate, Regrow, parameter_groups, prune

RAMP = Ramp(0.7, 2, 6)


def same_everywhere(value):
    """Whether all ranks have the same text."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return len(set(found)) == 1


def raises_everywhere(work, *words):
    """Every rank must get a ValueError with these words, and none may wait for ever."""
    said = ""
    try:
        work()
    except ValueError as error:
        said = str(error)
    assert all(word in said for word in words), said or "nothing was raised"
    dist.barrier()
    return said


def backward(model, step, rank, scaler=None):
    loss = (model(batch(100 * step + rank).to(next(model.parameters()).dtype)) - 1).square().mean()
    (scaler.scale(loss) if scaler else loss).backward()


def pruned_are_zero(pruner):
    for name, p in pruner.model.named_parameters():
        name = name.removeprefix("module.")
        if name in pruner.masks:
            mask, weight = pruner.masks[name], local(p)
            assert torch.equal(weight == 0, ~mask), name
            for key, value in pruner.optimizer.state[p].items():
                if key != "mask" and value.shape == p.shape:
                    assert not local(value)[~mask].any(), f"{key} of {name}"


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def ddp_agrees_with_seeds_of_its_own_and_accumulation(rank, world):
    for make, view in ((adamw, False), (adamw, True), (adamw_prune, False)):
        model = DistributedDataParallel(net(seed=rank), gradient_as_bucket_view=view)
        torch.manual_seed(rank)
        optimizer, events = make(model), []
        pruner = Pruner(model, optimizer, schedule=RAMP, every=2, on_event=events.append)
        for step in range(8):
            optimizer.zero_grad()
            with model.no_sync():
                backward(model, step, rank)
            backward(model, step, rank + 50)
            if make is adamw:
                for name, mask in pruner.masks.items():
                    assert not model.module.get_parameter(name).grad[~mask].any(), "clipping would see it"
            optimizer.step()
        pruned_are_zero(pruner)
        assert round(pruner.sparsity * 1054) == round(0.7 * 1054)
        assert same_everywhere(pruner.digest()) and 0 < events[-1].bytes_exchanged < 200
        assert list(pruner.full_masks()) == NAMES


def a_rank_that_drifted_is_caught_before_anything_is_pruned(rank, world):
    model = net()
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5))
    if rank == world - 1:
        with torch.no_grad():
            model.hidden.weight.copy_(model.hidden.weight.flip(0))
    backward(model, 0, 0)
    before = pruner.digest()
    raises_everywhere(optimizer.step, "different masks", *([f"rank {world - 1}"] if world > 2 else []))
    assert pruner.digest() == before and all(mask.all() for mask in pruner.masks.values())


def a_group_of_ones_own_is_not_compared(rank, world):
    groups = [dist.new_group([other]) for other in range(world)]
    model = net(seed=rank)
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5), group=groups[rank])
    backward(model, 0, 0)
    optimizer.step()
    assert not same_everywhere(pruner.digest())


def scores_that_are_not_finite_on_one_rank_raise_on_all(rank, world):
    for select in (Global(), PerLayer(), PerRow()):
        for placement in (None, Shard(0), Shard(1), Replicate()):
            model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
            for layer in model:
                with torch.no_grad():
                    layer.weight.fill_(1.0)
            if placement is not None:
                mesh = init_device_mesh("cpu", (world,))
                for layer in model:
                    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (placement,)))
            if rank == world - 1:
                local(model[1].weight).fill_(float("nan"))
            optimizer = adamw(model)
            pruner = Pruner(model, optimizer, score="magnitude", select=select, schedule=Constant(0.5))
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            said = raises_everywhere(optimizer.step, "1.weight", "finite", f"rank {world - 1}")
            assert said.count("(rank") == 1, said
            assert all(mask.all() for mask in pruner.masks.values())


def fsdp2_holds_zeros_with_mixed_precision_and_accumulation(rank, world):
    for make in (adamw, adamw_prune):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            torch.manual_seed(0)
            model = Net()
            fully_shard(model.hidden, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            optimizer = make(model, **{"max_norm": 0.1} if make is adamw_prune else {})
            pruner = Pruner(model, optimizer, schedule=RAMP, every=2)
            for step in range(8):
                optimizer.zero_grad()
                for part in range(2):
                    model.set_requires_gradient_sync(part == 1)
                    backward(model, step, rank + 50 * part)
                if make is adamw:
                    for name, mask in pruner.masks.items():
                        assert not local(model.get_parameter(name).grad)[~mask].any(), "clipping would see it"
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            pruned_are_zero(pruner)
            assert round(pruner.sparsity * 1054) == round(0.7 * 1054)
            assert same_everywhere(pruner.digest())
            assert make is adamw or same_everywhere(float(optimizer.grad_norm))


def rates_follow_the_density_of_whole_weights(rank, world):
    """Factors and weights are those of one process, whichever way the weights are shared."""

    def trained(model, optimizer):
        pruner = Pruner(model, optimizer, schedule=RAMP, every=2, score="magnitude", rate=Rate(1))
        for step in range(8):
            optimizer.zero_grad()
            backward(model, step, 0)
            optimizer.step()
        return pruner

    for make in (adamw_prune, lambda model: torch.optim.AdamW(parameter_groups(model), lr=1e-2)):
        alone = trained(plain := net(), make(plain))
        expected = {layer.name: layer.lr_factor for layer in alone.report().layers}
        assert max(expected.values()) > 2
        sharded = net()
        fully_shard(sharded.hidden)
        fully_shard(sharded)
        for model in (DistributedDataParallel(net()), sharded):
            pruner = trained(model, make(model))
            pruned_are_zero(pruner)
            found = {layer.name.removeprefix("module."): layer.lr_factor for layer in pruner.report().layers}
            assert found == expected and same_everywhere(str(found))
            for ours, one in zip(model.parameters(), plain.parameters(), strict=True):
                full = ours.full_tensor() if isinstance(ours, DTensor) else ours
                torch.testing.assert_close(full, one, atol=1e-5, rtol=1e-4)


def clipping_inside_the_step_knows_the_norm_of_all_shards(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    values, grads = [torch.randn(5, 7), torch.randn(5)], [torch.randn(5, 7), torch.randn(5)]

    def stepped(place):
        parameters = [nn.Parameter(place(value.clone())) for value in values]
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = place(grad.clone())
        optimizer = AdamWPrune(parameters, max_norm=0.5)
        optimizer.step()
        return [p.detach() for p in parameters], optimizer.grad_norm

    plain, norm = stepped(lambda tensor: tensor)
    for placement in (Shard(0), Shard(1), Replicate()):
        at = {2: (placement,), 1: (Replicate(),)}
        sharded, found = stepped(lambda tensor, at=at: distribute_tensor(tensor, mesh, at[tensor.ndim]))
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close([p.full_tensor() for p in sharded], plain)


def wanda_has_the_same_norms_on_all_ranks(rank, world):
    for wrap in ("ddp", "fsdp"):
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 6))
        if wrap == "fsdp":
            torch.manual_seed(0)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        optimizer = adamw(model)
        pruner = Pruner(model, optimizer, score="wanda", select=PerRow(), schedule=Ramp(0.5, 1, 4), every=1)
        for step in range(5):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + rank)
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
        assert pruner.sparsity == 0.5 and same_everywhere(pruner.digest())


def tensor_parallel_and_fsdp_over_it_prune_as_one(rank, world):
    """Colwise, then rowwise, and with four ranks FSDP2 over both, which shards rows of rows."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made(parallel):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 24, bias=False), nn.Tanh(), nn.Linear(24, 6, bias=False))
        if parallel:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if world == 4:
                fully_shard(model, mesh=mesh["dp"])
        optimizer = adamw(model)
        group = None if parallel else dist.new_group([rank], use_local_synchronization=True)
        return model, optimizer, Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5), group=group)

    plain, parallel = made(False), made(True)
    for model, optimizer, _ in (plain, parallel):
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
    full = parallel[2].full_masks()
    assert all(torch.equal(full[name], mask) for name, mask in plain[2].masks.items())
    assert plain[2].digest() == parallel[2].digest() and plain[2].sparsity == parallel[2].sparsity


def what_cannot_be_done_is_said_in_a_line(rank, world):
    mesh, model = init_device_mesh("cpu", (world,)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, schedule=Constant(0.5))
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    raises_everywhere(optimizer.step, "after fully_shard")
    raises_everywhere(pruner.report, "after fully_shard")
    pruner.remove()

    partial = nn.Linear(4, 4, bias=False)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, (Partial(),)))
    raises_everywhere(lambda: Pruner(partial, adamw(partial), schedule=Constant(0.5)), "redistribute")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    raises_everywhere(lambda: prune(model, sparsity=0.5), "0.weight", "one process")
    raises_everywhere(lambda: Global()({"a": model[0].weight}, 0.5), "DTensor")
    rows = {"select": PerRow(), "regrow": Regrow(), "schedule": RAMP}
    said = raises_everywhere(lambda: Pruner(model, adamw(model), **rows), "regrow by rows", "Global or PerLayer")
    assert "\n" not in said
    masks = {"0.weight": torch.ones(8, 8 + (rank == 1), dtype=torch.bool)}
    raises_everywhere(lambda: Pruner(model, adamw(model), masks=masks), "needs shape (8, 8)", "(rank 1)")
    for score, words in ((lambda weight: weight / weight.abs().mean(), ["element-wise"]), (lambda weight: -weight, [])):
        optimizer = adamw(model)
        pruner = Pruner(model, optimizer, score=score, schedule=Constant(0.5))
        model(torch.ones(2, 8)).sum().backward()
        if words:
            raises_everywhere(optimizer.step, *words)
        else:
            optimizer.step()
            assert pruner.sparsity == 0.5
        pruner.remove()


def a_scaler_skips_the_step_on_all_ranks(rank, world):
    model = DistributedDataParallel(net())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    pruner = Pruner(model, optimizer, schedule=RAMP, every=2)
    for step in range(9):
        optimizer.zero_grad()
        backward(model, step, rank, scaler)
        if step == 3 and rank == 0:
            next(model.parameters()).grad[0] = float("inf")
        if step == 3:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        scaler.step(optimizer)
        scaler.update()
    assert pruner.step == 8 and same_everywhere(pruner.digest())


def a_step_by_a_checkpointer_is_none(rank, world):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = Net()
    fully_shard(model)
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5))
    get_optimizer_state_dict(model, optimizer)
    assert pruner.step == 0 and all(mask.all() for mask in pruner.masks.values())


def weights_loaded_without_masks_are_noticed_on_all_ranks(rank, world):
    for make in (adamw, adamw_prune):
        for reloaded in ("zero", "raise"):
            model = net()
            fully_shard(model)
            optimizer = make(model)
            pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5), reloaded=reloaded)
            backward(model, 0, rank)
            optimizer.step()
            weights = model.state_dict()
            model.load_state_dict({name: value + (rank == 1) for name, value in weights.items()})
            num_sums = pruner._ranks.num_sums
            backward(model, 1, rank)
            if reloaded == "raise":
                raises_everywhere(optimizer.step, "not zero", "(rank 1)")
                model.load_state_dict({name: value * 1 for name, value in weights.items()})
                raises_everywhere(optimizer.step, "not zero")
                pruner.load_state_dict(pruner.state_dict())
                optimizer.step()
            else:
                with warnings.catch_warnings(record=True) as caught:
                    optimizer.step()
                assert len(caught) == (rank == 1) and pruner._ranks.num_sums == num_sums
            pruned_are_zero(pruner)


def masks_are_applied_to_copies_that_are_sharded_otherwise(rank, world):
    model = net()
    fully_shard(model)
    optimizer = adamw(model)
    pruner = Pruner(model, optimizer, score="magnitude", schedule=Constant(0.5))
    backward(model, 0, rank)
    optimizer.step()
    masks, mesh = pruner.full_masks(), init_device_mesh("cpu", (world,))
    for placement in (None, Shard(0), Shard(1), Replicate()):
        copied = net(1)
        for name in NAMES if placement else ():
            layer = copied.get_submodule(name.removesuffix(".weight"))
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, (placement,)))
        pruner.apply_to(copied)
        for name, mask in masks.items():
            weight, start = copied.get_parameter(name).detach(), net(1).get_parameter(name).detach()
            assert torch.equal(weight.full_tensor() if placement else weight, start * mask), (name, placement)
    copied = net(1)
    fully_shard(copied)
    plain = net()
    Pruner(plain, adamw(plain), masks=masks).apply_to(copied)
    for name, mask in masks.items():
        assert torch.equal(copied.get_parameter(name).detach().full_tensor() != 0, mask)


CHECKS = {  # on how many ranks
    ddp_agrees_with_seeds_of_its_own_and_accumulation: {2},
    a_rank_that_drifted_is_caught_before_anything_is_pruned: {2, 3},
    a_group_of_ones_own_is_not_compared: {2},
    scores_that_are_not_finite_on_one_rank_raise_on_all: {3},
    fsdp2_holds_zeros_with_mixed_precision_and_accumulation: {3},
    rates_follow_the_density_of_whole_weights: {3},
    clipping_inside_the_step_knows_the_norm_of_all_shards: {3},
    wanda_has_the_same_norms_on_all_ranks: {2},
    tensor_parallel_and_fsdp_over_it_prune_as_one: {2, 4},
    what_cannot_be_done_is_said_in_a_line: {2},
    a_scaler_skips_the_step_on_all_ranks: {2},
    a_step_by_a_checkpointer_is_none: {2},
    weights_loaded_without_masks_are_noticed_on_all_ranks: {2},
    masks_are_applied_to_copies_that_are_sharded_otherwise: {2},
}
