"""Prune while training, in a loop of your own: a small network on synthetic data, interrupted and resumed.

python examples/own_loop.py --steps 300 --sparsity 0.8
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from prunus import Pruner, Ramp


def batch(step: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Points whose class is the direction that they are nearest to; the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    directions = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(size, 32, generator=generator)
    return inputs, (inputs @ directions.T).argmax(1)


def train(steps: int, sparsity: float, checkpoint: Path, stop_at: int | None = None) -> tuple[nn.Module, Pruner]:
    """Train to the end, or save a checkpoint and stop; a checkpoint that is there is continued."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ramp = Ramp(sparsity, begin=0.4, end=0.8).over(steps)  # from 40 to 80 % of the run
    pruner = Pruner(model, optimizer, score="bitter7", schedule=ramp, every=max(1, steps // 50))
    parts = {"model": model, "optimizer": optimizer, "pruner": pruner}
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(pruner.step, stop_at or steps):
        inputs, targets = batch(step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()  # drives the pruner
        optimizer.zero_grad()
    torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return model, pruner


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    inputs, targets = batch(-1, 4096)
    return float((model(inputs).argmax(1) == targets).float().mean())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--sparsity", type=float, default=0.8)
    options.add_argument("--checkpoint", type=Path, default=Path("own_loop.pt"))
    args = options.parse_args()

    train(args.steps, args.sparsity, args.checkpoint, stop_at=args.steps // 2)  # as if it were killed half way
    model, pruner = train(args.steps, args.sparsity, args.checkpoint)
    print(pruner.report())
    print(f"accuracy {accuracy(model):.2%} at {pruner.sparsity:.2%} zeros, masks {pruner.digest()[:12]}")


if __name__ == "__main__":
    main()
