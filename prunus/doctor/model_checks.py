"""Checks over all tensors: ties, missing neighbours, optimizer state."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..ops import bits
from .contents import Contents, digest_of
from .findings import Finding
from .roles import Role, token_embeddings
from .tensor_checks import TensorCheck

NUMBER = re.compile(r"\.(\d+)\.")
LISTS = ("layers", "h", "blocks", "layer", "block", "experts")  # of equal blocks; stages of a network differ


def check_ties(contents: Contents, chosen: Mapping[str, Role], seen: Mapping[str, TensorCheck]) -> Iterator[Finding]:
    """Heads that should be their embedding and are not."""
    said = tie_of(contents.config)
    if str(contents.run.get("model", "")).startswith("gpt2"):
        said = True
    embeddings = token_embeddings(contents.tensors, chosen)
    heads = [name for name, role in chosen.items() if role.kind == "head" and name.endswith("weight")]
    if said is False or not embeddings:
        return
    for name in (*heads, *embeddings[1:]):
        first = embeddings[0]
        if name != first and seen[name].layer.shape != seen[first].layer.shape and name not in heads:
            continue
        if seen[name].hashed == seen[first].hashed:
            contents.notes.append(f"{name} and {first} hold the same values")
        elif said and name in heads:
            what = f"it differs from {first}, but the configuration ties them"
            yield Finding("untied", name, what, "store one of them, or set tie_word_embeddings to false")
        elif name in heads:
            contents.notes.append(f"{name} differs from {first}, and nothing says whether they are tied")


def tie_of(config: Mapping[str, Any]) -> bool | None:
    """What config.json says about ties; None where it says nothing."""
    inner = config.get("text_config")
    said = config.get("tie_word_embeddings", inner.get("tie_word_embeddings") if isinstance(inner, dict) else None)
    return said if isinstance(said, bool) else None


def check_neighbours(names: Iterable[str], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Tensors that a block lacks and most blocks of its list have; blocks that a list lacks.

    A block with tensors of its own is of another kind, and is left alone.
    """
    names = sorted(names)
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        for match in NUMBER.finditer(f".{name}"):
            found[f".{name}"[1 : match.start()]][int(match[1])].add(f".{name}"[match.end() :])
    missing: dict[str, str] = {}
    lists = {stem: blocks for stem, blocks in found.items() if stem.rpartition(".")[2] in LISTS}
    for stem, blocks in lists.items():
        if len(blocks) > 2:
            missing |= _lacking(stem, blocks)
    for name, what in missing.items():
        yield Finding("missing", name, what, "copy it from where the model was saved, or save it anew")
    yield from _gaps(lists, config)


def _lacking(stem: str, blocks: Mapping[int, set[str]]) -> dict[str, str]:
    held: dict[str, int] = defaultdict(int)
    for suffixes in blocks.values():
        for suffix in suffixes:
            held[suffix] += 1
    usual = {suffix for suffix, times in held.items() if 2 * times > len(blocks)}
    found = {}
    for number, suffixes in sorted(blocks.items()):
        if suffixes <= usual:
            for suffix in sorted(usual - suffixes):
                if "." in suffix:  # blocks, not the layers of a Sequential
                    found[f"{stem}.{number}.{suffix}"] = f"{held[suffix]} of {len(blocks)} blocks of {stem} have one"
    return found


def _gaps(lists: Mapping[str, Mapping[int, set[str]]], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Blocks left out; a Sequential with activations in between leaves out every second number, which is no fault."""
    todo = "copy them from where the model was saved, or save it anew"
    gaps = {stem: sorted(set(range(min(blocks), max(blocks) + 1)) - set(blocks)) for stem, blocks in lists.items()}
    for stem, gone in gaps.items():
        there = sorted(lists[stem])
        if gone and len({after - before for before, after in pairwise(there)}) > 1:
            what = f"blocks {gone} of {there[0]} to {there[-1]} are not there"
            yield Finding("missing", f"{stem}.{gone[0]}", what, todo)
    said = next((config[key] for key in ("num_hidden_layers", "n_layer") if isinstance(config.get(key), int)), None)
    stacks = [stem for stem in lists if not stem.endswith("experts")]
    if said and stacks:
        stem = max(stacks, key=lambda stem: len(lists[stem]))
        if len(lists[stem]) + len(gaps[stem]) < said or (len(lists[stem]) == 2 < said):
            what = f"config.json says {said} blocks, and {len(lists[stem])} are stored"
            yield Finding("missing", stem, what, todo)


def check_moments(contents: Contents) -> Iterator[Finding]:
    """Optimizer state that is alive where its mask says pruned, and masks there that are not the pruner's."""
    own = {bytes(mask.load().flatten().numpy()): name for name, mask in _packed(contents)}
    for number, row in enumerate(contents.moments):
        packed = row["mask"].flatten().to(dtype=torch.uint8)
        name = own.get(bytes(packed.numpy())) if own else None
        where = name or f"optimizer state {number}"
        if own and name is None:
            what = "its mask is none of the pruner's masks"
            yield Finding("masks-disagree", where, what, "go back to a checkpoint whose masks agree")
        for key, value in row.items():
            if isinstance(value, Tensor) and value.ndim > 1 and bits.num_bytes(value.numel()) == len(packed):
                alive = int(((value != 0) & ~bits.unpack(packed, value.shape)).sum())
                if alive:
                    what = f"{alive:,} values of {key} are not zero where the weight is pruned"
                    yield Finding("moments", where, what, "zero them, or the weights come back with the next step")


def _packed(contents: Contents) -> Sequence[tuple[str, Any]]:
    return [(name, mask) for name, mask in contents.masks.items() if mask.dtype == "uint8" and len(mask.shape) == 1]


def check_digests(contents: Contents) -> str | None:
    """Digest of the model's masks; stored ones that differ from it, or from each other, are findings."""
    own = digest_of(contents.masks, contents.tensors) if contents.masks else None
    stored = contents.digests
    expected = own or next(iter(stored.values()), None)
    reference = "the masks" if own else next(iter(stored), "")
    for place, value in stored.items():
        if value != expected:
            given = f"{value[:16]} is stored, but {reference} give {str(expected)[:16]}"
            what = given if own else f"it differs from {reference}"
            todo = "the ranks' masks have parted or the file was changed: go back to a checkpoint before it"
            contents.find("digest", place, what, todo)
    return own
