"""Prune a model that is sharded by FSDP2: the masks are those of one process, to the bit.

torchrun --nproc-per-node 2 examples/fsdp2.py     # NCCL on GPUs, gloo on a CPU
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prunus import AdamWPrune, Pruner, Ramp


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--sparsity", type=float, default=0.5)
    args = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
    mesh = init_device_mesh(device, (num_ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = AdamWPrune(model.parameters(), lr=1e-3, max_norm=1.0)  # after sharding, and so is the Pruner
    ramp = Ramp(args.sparsity, begin=0.4, end=0.8).over(args.steps)
    pruner = Pruner(model, optimizer, schedule=ramp, every=4)
    torch.manual_seed(1 + rank)  # other samples on every rank
    for _ in range(args.steps):
        inputs, targets = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    report, digest = pruner.report(), pruner.digest()  # collective: every rank calls them
    if rank == 0:
        print(report)
        print(f"{num_ranks} ranks, {report.sparsity:.4%} of the prunable weights are zero, masks {digest[:12]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
