"""What selectors must return, by definition: a stable sort, and nasty scores to try it on."""

import numpy as np
import torch

DRAWS = {
    "normal": torch.randn,
    "positive": lambda *shape: torch.rand(shape) + 0.5,
    "negative": lambda *shape: -torch.rand(shape) - 0.5,
    "many ties": lambda *shape: torch.randint(-1, 2, shape).float(),
    "all equal": lambda *shape: torch.full(shape, 2.5),
    "all zero": torch.zeros,
    "signed zeros": lambda *shape: torch.randint(0, 2, shape).float() * 0.0 * torch.randint(-1, 2, shape).sign(),
    "half zero": lambda *shape: torch.randn(shape).relu(),
    "bfloat16": lambda *shape: torch.randn(shape).bfloat16(),
    "float16": lambda *shape: torch.randn(shape).half(),
    "float64": lambda *shape: 1 + torch.randn(shape, dtype=torch.float64) * 1e-12,
    "int64": lambda *shape: torch.randint(-(2**62), 2**62, shape),
    "few integers": lambda *shape: torch.randint(-2, 3, shape),
    "wide range": lambda *shape: torch.randn(shape) * 10.0 ** torch.randint(-30, 31, shape),
    "denormal": lambda *shape: torch.randint(-5, 6, shape).float() * 1e-45,
}


def flat(scores):
    """Scores of all tensors in one array that orders them exactly."""
    exact = "int64" if all(not s.is_floating_point() for s in scores.values()) else "float64"
    return np.concatenate([s.to(getattr(torch, exact)).reshape(-1).numpy() for s in scores.values()])


def keep_largest(scores, num_drop, within=None):
    """Masks without the ``num_drop`` smallest: the dead first, then by score, tensor and position."""
    live = np.concatenate(
        [(within or {}).get(n, torch.ones(s.shape, dtype=torch.bool)).reshape(-1).numpy() for n, s in scores.items()]
    )
    order = np.argsort(flat(scores)[live], kind="stable")
    keep = live.copy()
    keep[np.flatnonzero(live)[order[: max(0, num_drop - int((~live).sum()))]]] = False
    parts = torch.from_numpy(keep).split([s.numel() for s in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def keep_largest_of_runs(score, length, num_drop, within=None):
    """Mask of one tensor whose flattened runs of ``length`` each lose their ``num_drop`` smallest."""
    runs = flat({"": score}).reshape(-1, length)
    live = np.ones_like(runs, dtype=bool) if within is None else within.reshape(-1, length).numpy()
    order = np.lexsort((runs, ~live))  # the living first, by score, then by position
    rank = np.argsort(order, axis=1)
    num_live = live.sum(1, keepdims=True)
    dropped = rank < num_drop - (length - num_live)
    return torch.from_numpy(live & ~dropped).view(score.shape)


def draw(kind, *shapes):
    return {f"layer{i}": DRAWS[kind](*shape) for i, shape in enumerate(shapes)}


def some_dead(scores, share=0.3):
    """Masks that are False at about ``share`` of the places, and everywhere True in the first tensor."""
    masks = {name: torch.rand(score.shape) >= share for name, score in scores.items()}
    return masks | {next(iter(masks)): torch.ones_like(next(iter(masks.values())))}


def same(first, second):
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def is_subset(small, large):
    return all(bool((small[name] <= large[name]).all()) for name in small)


def num_dropped(masks):
    return sum(int((~mask).sum()) for mask in masks.values())
