"""Which layers of a model are faster sparse: what ``sparsify_``, the decoder and ``prunus export --advise`` go by."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ._cuda import can_tile
from .tiles import DTYPES as TILE_DTYPES
from .times import FORMS, Times, WeightKind, times_of, winner

SPARSE_FROM = 0.1  # layers with fewer zeros were not pruned, and stay dense
# the last parts of names of layers that read the same input, so that their products can be one
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


@dataclass(frozen=True)
class Choice:
    """Layers that are multiplied as one, and the microseconds of that dense, in the best sparse form, and as 2:4."""

    names: list[str]
    kind: WeightKind  # of all rows together
    form: str  # the best sparse one of ``FORMS``
    times: Times


def choose(kinds: Mapping[str, WeightKind], vectors: int, device: torch.device) -> list[Choice]:
    """How long the layers with zeros take; ``kinds`` is by name of a layer, or of its weight."""
    pruned = {name: kind for name, kind in kinds.items() if kind.sparsity >= SPARSE_FROM}
    return [_choice(names, pruned, vectors, device) for names in groups_of(pruned)]


def groups_of(kinds: Mapping[str, WeightKind]) -> list[list[str]]:
    """Names of layers in order, those together that read the same input, going by their names."""
    groups: dict[object, list[str]] = {}
    for name, kind in kinds.items():
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        number = next((i for i, names in enumerate(SIBLINGS) if last in names), None)
        key = name if number is None else (parent, number, kind.shape[1], kind.dtype, kind.is_coded)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _choice(names: list[str], kinds: Mapping[str, WeightKind], vectors: int, device: torch.device) -> Choice:
    parts = [kinds[name] for name in names]
    num_rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    sparsity = sum(part.sparsity * part.shape[0] for part in parts) / max(1, num_rows)
    two_of_four, is_coded = (all(getattr(part, name) for part in parts) for name in ("two_of_four", "is_coded"))
    kind = WeightKind((num_rows, width), parts[0].dtype, sparsity, two_of_four, is_coded)
    alone = [times_of(part, vectors, device) for part in parts]
    times = {way: sum(each[way] for each in alone) for way in ("dense", "2:4") if all(way in each for each in alone)}
    whole = times_of(kind, vectors, device) if len(parts) > 1 else alone[0]
    form = min((way for way in FORMS if way in whole), key=lambda way: whole[way])
    return Choice(names, kind, form, times | {"sparse": whole[form]})


def forms_of(
    kinds: Mapping[str, WeightKind], vectors: int, device: torch.device, least: float | None
) -> dict[str, str]:
    """The form of every layer that is kept sparse: those that are faster so, or that have ``least`` zeros."""
    if least is not None:
        return {name: usual_form(k, vectors, device) for name, k in kinds.items() if k.sparsity >= least}
    choices = choose(kinds, vectors, device)
    faster = [one for one in choices if winner({way: one.times[way] for way in ("dense", "sparse")}) == "sparse"]
    return {name: choice.form for choice in faster for name in choice.names}


def usual_form(kind: WeightKind, vectors: int, device: torch.device) -> str:
    """The form where nothing is measured: codes if there are any, gaps for one vector or where most is zero."""
    is_tiled = can_tile(device) and kind.dtype in TILE_DTYPES
    if is_tiled and kind.is_coded:
        return "coded gaps" if vectors == 1 else "coded"
    return "tiles" if is_tiled and vectors > (1 if kind.sparsity < 0.7 else 4) else "gaps"
