"""Where the places of one unit may lie along a dimension of a fused weight: shapes do not say it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from .built_twice import tensors_of
from .unit_fields import UnitField
from .units import Slices, UnitLayer, role


def places_of(num: int, parts: Sequence[int]) -> Tensor:
    """Places (unit, place) in a dimension that consists of parts, each with so many places a unit, unit by unit."""
    starts = [num * sum(parts[:number]) for number in range(len(parts))]
    units = torch.arange(num)[:, None]
    runs = [start + units * size + torch.arange(size) for start, size in zip(starts, parts, strict=True)]
    return torch.cat(runs, dim=1)


def layouts(size: int, head_size: int = 1, group_size: int = 1) -> list[tuple[int, ...]]:
    """Parts that a dimension with ``size`` places a unit may consist of, the most frequent ones first.

    One part: the places of a unit are neighbours. Equal parts: [gate | up], [q | k | v], or query heads of which every
    n-th reads the same keys. Unequal ones: [q | k | v] with ``group_size`` query heads for each key and value head.
    """
    num_heads, rest = divmod(size, head_size)
    if rest or num_heads == 1:
        return [(size,)]
    grouped = (group_size * head_size, head_size, head_size)
    equal = [(size // num,) * num for num in (3, 2, num_heads) if num_heads % num == 0]
    unequal = [grouped] if sum(grouped) == size else []
    return list(dict.fromkeys([*unequal, (size,), *equal]))


def candidates(
    model: nn.Module, dims: Mapping[str, int], owners: Mapping[str, str], field: UnitField
) -> Iterator[list[UnitLayer]]:
    """Layers of units, in every layout that the weights of the same role may have."""
    tensors, choices = tensors_of(model), {}
    for name, dim in dims.items():
        size = tensors[name].shape[dim] // field.num
        choices[role(name)] = layouts(size, field.head_size, field.group_size)
    for parts in product(*choices.values()):
        by_role = {name: places_of(field.num, part) for name, part in zip(choices, parts, strict=True)}
        slices: dict[str, dict[str, Slices]] = {}
        for name, consumer in owners.items():
            slices.setdefault(consumer, {})[name] = Slices(dims[name], by_role[role(name)])
        yield [UnitLayer(field.kind, field.path, consumer, held) for consumer, held in slices.items()]
