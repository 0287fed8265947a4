"""Masks in distributed checkpoints: saved by one layout, loaded by another, by ``torch.distributed.checkpoint``."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from toys import adamw, adamw_prune
from training_checks import backward, pruned_are_zero, raises_everywhere, same_everywhere

from prunus import Pruner, Ramp


class Wide(nn.Module):
    """Layers whose inputs 2, 3 and 4 ranks can share, which FSDP2 asks for, but of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(25, 12), nn.Linear(12, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.last(self.second(self.first(x.flatten(1)).tanh()).tanh())


NUM = 25 * 12 + 12 * 24 + 24 * 5


def made(layout, make, world, score="movement"):
    """A model that is sharded or not, with its optimizer and Pruner."""
    torch.manual_seed(5)
    model = Wide()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "rows":
        fully_shard(model.second)
        fully_shard(model)
    elif layout == "columns":
        fully_shard(model, shard_placement_fn=lambda p: Shard(int(p.ndim > 1 and p.shape[1] != 25)))
    elif layout == "copies of rows":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    optimizer = make(model)
    return model, optimizer, Pruner(model, optimizer, score=score, schedule=Ramp(0.6, 2, 8), every=2)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, 0)
        optimizer.step()


def state_of(model, optimizer, pruner, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "pruner": pruner.state_dict(unpacked=True),
    }


def load(folder, model, optimizer, pruner, flat):
    state = state_of(model, optimizer, pruner, flat)
    dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    pruner_from_optimizer = pruner.digest()
    pruner.load_state_dict(state["pruner"])
    return pruner_from_optimizer


def a_checkpoint_is_loaded_by_any_layout(rank, world):
    layouts = ["rows", "columns", "ddp"] + (["copies of rows"] if world == 4 else [])
    for number, saved in enumerate(layouts):
        others = [saved, layouts[(number + 1) % len(layouts)]]  # in a ring, so that each is left and entered
        make, flat = (adamw, adamw_prune)[number % 2], number % 2 == 0
        folders = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folders)
        first = made(saved, make, world)
        train(*first[:2], range(5))
        digest, sums = first[2].digest(), movement_of(first[2])
        dcp.save(state_of(*first, flat), checkpoint_id=folders[0])
        for layout in others:
            second = made(layout, make, world)
            assert load(folders[0], *second, flat) == digest, f"{saved} to {layout}: masks in the optimizer's state"
            assert second[2].digest() == digest and second[2].step == first[2].step
            assert all(torch.equal(a, b) for a, b in zip(sums, movement_of(second[2]), strict=True))
            pruned_are_zero(second[2])
            train(*second[:2], range(5, 9))
            assert round(second[2].sparsity * NUM) == round(0.6 * NUM) and same_everywhere(second[2].digest())
            if layout == saved:
                ended = second[2].digest()
        train(*first[:2], range(5, 9))
        assert first[2].digest() == ended, f"{saved}: resumed, it ends elsewhere"
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])


def movement_of(pruner):
    return [s.full_tensor() if hasattr(s, "full_tensor") else s for s in pruner._movement.sums.values()]


def states_of_one_process_and_full_ones_are_taken(rank, world):
    """Packed bits of the whole, as one process saves them, and full tensors gathered by torch."""
    _, _, first = made("rows", adamw, world, "magnitude")
    train(first.model, first.optimizer, range(5))
    full = first.full_masks()
    packed = {name: torch.from_numpy(pack(mask)) for name, mask in full.items()}
    _, _, second = made("columns", adamw, world, "magnitude")
    second.load_state_dict({"step": 5, "due": False, "masks": packed, "movement": {}})
    assert second.digest() == first.digest()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = get_optimizer_state_dict(first.model, first.optimizer, options=StateDictOptions(full_state_dict=True))
    third = made("columns", adamw, world, "magnitude")
    set_optimizer_state_dict(*third[:2], state, options=options)
    assert third[2].digest() == first.digest()
    model, optimizer, fourth = made("rows", adamw, world, "magnitude")
    fourth.remove()
    assert Pruner(model, optimizer, masks=full).digest() == first.digest()


def pack(mask):
    import numpy as np

    return np.packbits(mask.numpy().reshape(-1), bitorder="little")


def masks_survive_an_optimizers_own_state_dict(rank, world):
    for make in (adamw, adamw_prune):
        model, optimizer, pruner = made("rows", make, world, "magnitude")
        train(model, optimizer, range(5))
        masks = {name: mask.clone() for name, mask in pruner.masks.items()}
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert all(torch.equal(pruner.masks[name], mask) for name, mask in masks.items())
        packed = [kept["mask"] for kept in optimizer.state.values() if "mask" in kept]
        assert len(packed) == 3 and all(type(mask) is torch.Tensor and mask.ndim == 1 for mask in packed)
        _, other, fresh = made("rows", make, world, "magnitude")
        other.load_state_dict(state)
        assert fresh.digest() == pruner.digest() and not all(mask.all() for mask in masks.values())
        raises_everywhere(lambda it=pruner: it.state_dict(unpacked=False), "DTensors", "unpacked=True")


CHECKS = {  # on how many ranks
    a_checkpoint_is_loaded_by_any_layout: {4},
    states_of_one_process_and_full_ones_are_taken: {2},
    masks_survive_an_optimizers_own_state_dict: {2},
}
