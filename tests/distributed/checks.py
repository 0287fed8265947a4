"""What must hold on every rank: each check is run by all of them together, in this order."""

import checkpoint_checks
import torch
import training_checks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import adamw, adamw_prune

from prunus import Global, NofM, OneShot, PerLayer, PerRow, Pruner, Ramp, Regrow

SHAPES = {"a": (1, 8), "b": (13, 8), "c": (24, 40), "d": (3, 4, 2), "e": (9, 4, 2, 2)}
WEIGHTS = {  # what masks are hard to find for
    "normal": lambda *shape: torch.randn(shape),
    "ties": lambda *shape: torch.randint(-1, 2, shape).float(),
    "equal": lambda *shape: torch.full(shape, 0.5),
    "half zero": lambda *shape: torch.randn(shape).relu(),
    "bfloat16": lambda *shape: torch.randn(shape).bfloat16(),
    "wide": lambda *shape: torch.randn(shape) * 10.0 ** torch.randint(-15, 15, shape),
}
RUNS = [  # weights, score, selector, optimizer, and what comes back, if any
    ("normal", "bitter7", Global(), adamw),
    ("normal", "bitter7", Global(), adamw_prune),
    ("ties", "magnitude", Global(), adamw_prune),
    ("equal", "magnitude", Global(), adamw),
    ("half zero", "movement", PerLayer("erk"), adamw),
    ("bfloat16", "bitter3", PerLayer("depth"), adamw),
    ("wide", "random", PerLayer(), adamw),
    ("normal", "fisher", PerRow(), adamw),
    ("ties", "magnitude", PerRow(), adamw_prune),
    ("bfloat16", "magnitude", NofM(2, 4), adamw),
    ("equal", "random", NofM(1, 8), adamw),
    ("normal", "bitter7", Global(), adamw, Regrow(0.3)),
    ("ties", "magnitude", PerLayer("erk"), adamw_prune, Regrow(0.3, by="gradient")),
]
REFERENCES = {}


class Layers(nn.Module):
    """Weights of many shapes, each a linear layer's, that no forward pass ever sees."""

    def __init__(self, kind, place=lambda weight: weight):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = nn.Parameter(place(WEIGHTS[kind](*shape)))
            setattr(self, name, layer)


def gradient(step, name, shape, dtype):
    generator = torch.Generator().manual_seed(100 * step + ord(name[0]))
    return torch.randn(shape, generator=generator).to(dtype)


def trained(model, run, on_event=None):
    """Six steps with gradients that are given, so that they are the same however many ranks there are."""
    _, score, select, make, *regrow = run
    optimizer = make(model)
    schedule = OneShot(select.sparsity, at=3) if isinstance(select, NofM) else Ramp(0.6, 1, 5)
    exclude = ("d", "e") if isinstance(select, NofM) else ()
    more = {"regrow": regrow[0]} if regrow else {}
    pruner = Pruner(model, optimizer, score=score, select=select, schedule=schedule, every=2, exclude=exclude, **more)
    pruner.on_event, digests = on_event, []
    for step in range(6):
        for name, p in model.named_parameters():
            p.grad = gradient(step, name, p.shape, p.dtype)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
        optimizer.step()
        digests.append(pruner.digest())
    return pruner, digests


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def prepare():
    """What one process finds, before there are ranks, in the runs that some mesh takes."""
    for number, run in enumerate(RUNS):
        if all((number + offset) % every for offset in (1, 2, 3)):
            continue
        pruner, digests = trained(Layers(run[0]), run)
        weights = {name: p.detach().clone() for name, p in pruner.model.named_parameters()}
        moments = {name: pruner.optimizer.state[p]["exp_avg_sq"] for name, p in pruner.model.named_parameters()}
        REFERENCES[number] = digests, dict(pruner.masks), weights, moments, pruner.sparsity


def meshes(world):
    """Meshes and placements: rows, columns, copies, and grids of both where the world allows."""
    line = init_device_mesh("cpu", (world,))
    yield line, (Shard(0),)
    yield line, (Shard(1),)
    if world == 2:
        yield line, (Replicate(),)
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2))
        yield grid, (Replicate(), Shard(0))
        yield grid, (Shard(0), Shard(1))
        yield grid, (Shard(0), Shard(0))


every = 1  # one of so many RUNS is taken, on each mesh others


def masks_are_those_of_one_process(rank, world):
    for mesh, placements in meshes(world):
        for number, run in enumerate(RUNS):
            if (number + mesh.ndim + placements[-1].is_shard(1)) % every:
                continue
            model = Layers(run[0], lambda w, mesh=mesh, at=placements: distribute_tensor(w, mesh, at))
            events = []
            pruner, digests = trained(model, run, events.append)
            expected, masks, weights, moments, sparsity = REFERENCES[number]
            full, where = pruner.full_masks(), f"{run} at {placements} of {tuple(mesh.shape)}"
            assert all(torch.equal(full[name], mask) for name, mask in masks.items()), where
            assert digests == expected and pruner.sparsity == sparsity, where
            assert all(torch.equal(whole(p), weights[name]) for name, p in model.named_parameters()), where
            state = pruner.optimizer.state
            assert all(torch.equal(whole(state[p]["exp_avg_sq"]), moments[n]) for n, p in model.named_parameters())
            assert all(pruner.masks[n].shape == p.to_local().shape for n, p in model.named_parameters() if n in full)
            assert not isinstance(run[2], Global) or 0 < events[-1].bytes_exchanged < 1 << 20


CHECKS = {masks_are_those_of_one_process: {2, 3, 4}}  # and on how many ranks
CHECKS |= training_checks.CHECKS | checkpoint_checks.CHECKS
