"""Random weights in 4-bit codes, and how near to them a product must be."""

import torch

from prunus.ops.grid import Grid, coded, decoded

SHAPES = [(16, 128), (1, 1), (37, 200), (64, 1032), (0, 5), (3, 0), (100, 130), (256, 2048)]
RAGGED = [(16, 129), (5, 255), (17, 257), (3, 513), (1, 5000)]
LEVELS = [0.0, 0.5, 0.8, 0.97, 1.0]
GRID = Grid(4)


def sparse(shape, level, device="cpu"):
    """Random codes, some of them kept, with scales from tiny to large, and one empty row where there are several."""
    own = torch.Generator().manual_seed(hash((shape, level)) % (1 << 31))
    keep = torch.rand(shape, generator=own) >= level
    if shape[0] > 1:
        keep[shape[0] // 2] = False
    codes = torch.randint(0, 16, shape, generator=own, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-12, 3, (shape[0], -(-shape[1] // 128)), generator=own) * 1.25
    weight = GRID.values(codes, scales, torch.float32) * keep
    return coded(weight.to(device), scales.to(device), GRID)


def close(y, x, weight, bias, dtype=torch.float64):
    """Whether an output is as near to the product with the values of the codes as its type and float32 sums allow.

    ``dtype`` is what the values are rounded to.
    """
    values = decoded(weight, dtype).double()
    largest = weight.scales.double().repeat_interleave(128, 1)[:, : x.shape[1]] * 7.5
    largest = largest * (values != 0).any(1, keepdim=True)  # a row without weights gives exactly its bias
    exact = x.double() @ values.t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ largest.t() + (0 if bias is None else bias.double().abs())
    eps = torch.finfo(y.dtype).eps
    return bool(((y.double() - exact).abs() <= eps * exact.abs() + 1e-5 * size + torch.finfo(y.dtype).tiny).all())
