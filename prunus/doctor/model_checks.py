"""Checks over all tensors: the sparsity asked for, the number of blocks, ties, optimizer state, digests."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..ops import bits
from .findings import Expected, Finding
from .pattern import is_nonzero
from .sources import Contents
from .tensor_checks import Role, TensorCheck, embeds_tokens

NAMED = 4  # names in a message
MASKED = "prune it anew with exact counts, or finish its training"
LIVE = "prune it again, if it was trained without its masks; --masks tells pruned weights from other zeros"
BLOCK = re.compile(r"(?:(.*?)\.)??(layers|h|blocks|layer|block)\.(\d{1,6})\.")  # the first list in a name


def check_expected(expected: Expected, checks: Iterable[TensorCheck]) -> list[Finding]:
    """Findings where prunable weights differ from what was expected; without a pattern, from every one of them."""
    weights = [check for check in checks if check.layer.is_prunable and check.counts is not None]
    crowded = _groups(*expected.groups, weights) if expected.groups else []
    if expected.sparsity is None:
        return crowded
    todo = MASKED if any(check.layer.num_pruned is not None for check in weights) else LIVE
    if expected.groups:
        return crowded + _total(expected.sparsity, weights, todo)
    ways = {"global": _total, "layer": _layers, "row": _rows}
    if expected.pattern is not None:
        return ways[expected.pattern](expected.sparsity, weights, todo)
    tried = [way(expected.sparsity, weights, todo) for way in ways.values()]
    return tried[0] if all(tried) else []


def _total(sparsity: float, weights: Sequence[TensorCheck], todo: str) -> list[Finding]:
    """``round(s N)`` of all N."""
    removed, num = (sum(getattr(check.layer, name) for check in weights) for name in ("num_removed", "num"))
    if removed < round(sparsity * num) and (dense := _dense(weights)):
        named = ", ".join(dense[:NAMED]) + (f" and {len(dense) - NAMED} more" if len(dense) > NAMED else "")
        todo = f"no zero is in {named}: --exclude PATTERN leaves out what was meant to be dense, else {todo}"
    return _count("all weights", removed, sparsity, num, todo)


def _layers(sparsity: float, weights: Sequence[TensorCheck], todo: str) -> list[Finding]:
    """``round(s n)`` of every weight."""
    dense, findings = set(_dense(weights)), []
    for layer in (check.layer for check in weights):
        hint = f"--exclude {layer.name} if it was meant to be dense, else {todo}" if layer.name in dense else todo
        findings += _count(layer.name, layer.num_removed, sparsity, layer.num, hint)
    return findings


def _rows(sparsity: float, weights: Sequence[TensorCheck], todo: str) -> list[Finding]:
    """``round(s n)`` of every row."""
    findings = []
    for check in weights:
        assert check.counts is not None
        width = check.counts.shape[1]
        due, removed = round(sparsity * width), width - check.counts.rows
        if wrong := int((removed != due).sum()):
            what = (
                f"{wrong:,} of {len(removed):,} rows have not the {due:,} zeros of {width:,} "
                f"asked for: they have {int(removed.min()):,} to {int(removed.max()):,}"
            )
            findings.append(Finding("rows", check.layer.name, what, todo))
    return findings


def _groups(n: int, m: int, weights: Sequence[TensorCheck]) -> list[Finding]:
    findings = []
    for check in weights:
        assert check.counts is not None
        if check.num_crowded < 0:
            what = f"its rows of {check.counts.shape[1]:,} cannot be split into groups of {m}"
            findings.append(Finding("groups", check.layer.name, what))
        elif check.num_crowded:
            what = f"{check.num_crowded:,} of {check.counts.num // m:,} groups of {m} inputs keep more than {n}"
            findings.append(Finding("groups", check.layer.name, what, f"prune it to {n}:{m}, or exclude it"))
    return findings


def _count(where: str, removed: int, sparsity: float, num: int, todo: str) -> list[Finding]:
    due = round(sparsity * num)
    if removed == due:
        return []
    kind, word = ("too-dense", "fewer") if removed < due else ("too-sparse", "more")
    difference = f"{abs(removed - due):,} {word} than the {due:,} that {sparsity:g} asks for"
    return [Finding(kind, where, f"{removed:,} of {num:,} weights are removed, {difference}", todo)]


def _dense(weights: Sequence[TensorCheck]) -> list[str]:
    """Names of weights that nothing was removed from, where something was from others."""
    names = [check.layer.name for check in weights if not check.layer.num_removed]
    return names if len(names) < len(weights) else []


def check_blocks(contents: Contents) -> Iterator[Finding]:
    """Fewer blocks than config.json says, in the longest list of blocks that the names show."""
    counts = (contents.config.get(key) for key in ("num_hidden_layers", "n_layer"))
    num = next((count for count in counts if type(count) is int), 0)
    lists: dict[str, set[int]] = defaultdict(set)
    for match in filter(None, map(BLOCK.match, contents.tensors)):
        lists[f"{match[1]}.{match[2]}" if match[1] else match[2]].add(int(match[3]))
    if lists and num > len(max(lists.values(), key=len)):
        stem = max(lists, key=lambda stem: len(lists[stem]))
        yield Finding("missing", stem, f"config.json says {num} blocks, and {len(lists[stem])} are stored")


def check_ties(contents: Contents, chosen: Mapping[str, Role], checks: Mapping[str, TensorCheck]) -> Iterator[Finding]:
    """Heads that should be their embedding and are not."""
    inner = contents.config.get("text_config")
    configs = [contents.config, *([inner] if isinstance(inner, dict) else [])]
    said = (config["tie_word_embeddings"] for config in configs if "tie_word_embeddings" in config)
    is_tied = True if contents.model.startswith("gpt2") else next(said, None)
    embeddings = [name for name, role in chosen.items() if role.kind == "embedding" and embeds_tokens(name)]
    heads = [name for name, role in chosen.items() if role.kind == "head" and name.endswith("weight")]
    for name in heads if embeddings and is_tied is not False else ():
        first = embeddings[0]
        if checks[name].hashed == checks[first].hashed:
            contents.notes.append(f"{name} and {first} hold the same values")
        elif is_tied is True:
            yield Finding("untied", name, f"it differs from {first}, but the configuration ties them")
        else:
            contents.notes.append(f"{name} differs from {first}, and nothing says whether they are tied")


def check_optimizer_state(contents: Contents) -> Iterator[Finding]:
    """Optimizer state that is alive where its mask says pruned, and masks there that are not the pruner's."""
    packed_masks = [one for one in contents.masks.items() if (one[1].dtype, len(one[1].shape)) == ("uint8", 1)]
    own = {bytes(mask.load().numpy()): name for name, mask in packed_masks}
    for number, row in enumerate(contents.moments):
        packed = row["mask"].flatten().to(dtype=torch.uint8)
        name = own.get(bytes(packed.numpy())) if own else None
        where = name or f"optimizer state {number}"
        if own and name is None:
            yield Finding("masks-disagree", where, "its mask is none of the pruner's masks")
        for key, value in row.items():
            if value.ndim > 1 and bits.num_bytes(value.numel()) == len(packed):
                alive = int((is_nonzero(value) & ~bits.unpack(packed, value.shape)).sum())
                if alive:
                    yield Finding("moments", where, f"{alive:,} values of {key} are not zero where it is pruned")


def check_digests(contents: Contents, own: str | None) -> Iterator[Finding]:
    """Stored digests that differ from the masks' ``own``, or from each other where there are no masks."""
    first = next(iter(contents.digests), "")
    expected = own or contents.digests.get(first)
    for place, value in contents.digests.items():
        if value != expected:
            what = f"{value[:16]} is stored, but the masks give {own[:16]}" if own else f"it differs from {first}"
            yield Finding("digest", place, what)
