"""Checks over all tensors: the sparsity asked for, ties, missing neighbours, optimizer state, digests."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import torch

from ..ops import bits
from .contents import Contents, Role, StoredTensor, embeds_tokens, nonzero
from .findings import Expected, Finding
from .tensor_checks import TensorCheck

NUMBER = re.compile(r"\.(\d{1,9})\.")
LISTS = ("layers", "h", "blocks", "layer", "block", "experts")  # of equal blocks; stages of a network differ
NAMED = 4  # names or numbers in a message
LONGEST = 1000  # characters of a name; one that is longer is of no block
MASKED = "prune it anew with exact counts, or finish its training"
LIVE = "prune it anew with exact counts; --masks tells pruned weights from live zeros"


def check_expected(expected: Expected, checks: Iterable[TensorCheck]) -> list[Finding]:
    """Findings where prunable weights differ from what was expected."""
    weights = [check for check in checks if check.layer.is_prunable and check.counts is not None]
    found = _groups(*expected.groups, weights) if expected.groups else []
    if expected.sparsity is None:
        return found
    todo = MASKED if any(check.layer.num_pruned is not None for check in weights) else LIVE
    if expected.groups:
        return found + _total(expected.sparsity, weights, todo)
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
    dense, found = set(_dense(weights)), []
    for layer in (check.layer for check in weights):
        hint = f"--exclude {layer.name} if it was meant to be dense, else {todo}" if layer.name in dense else todo
        found += _count(layer.name, layer.num_removed, sparsity, layer.num, hint)
    return found


def _rows(sparsity: float, weights: Sequence[TensorCheck], todo: str) -> list[Finding]:
    """``round(s n)`` of every row."""
    found = []
    for check in weights:
        assert check.counts is not None
        width = check.counts.shape[1]
        due, removed = round(sparsity * width), width - check.counts.rows
        if wrong := int((removed != due).sum()):
            what = (
                f"{wrong:,} of {len(removed):,} rows have not the {due:,} zeros of {width:,} "
                f"asked for: they have {int(removed.min()):,} to {int(removed.max()):,}"
            )
            found.append(Finding("rows", check.layer.name, what, todo))
    return found


def _groups(n: int, m: int, weights: Sequence[TensorCheck]) -> list[Finding]:
    found = []
    for check in weights:
        assert check.counts is not None
        if check.num_crowded < 0:
            what = f"its rows of {check.counts.shape[1]:,} cannot be split into groups of {m}"
            found.append(Finding("groups", check.layer.name, what, "exclude it, or choose another N:M"))
        elif check.num_crowded:
            what = f"{check.num_crowded:,} of {check.counts.num // m:,} groups of {m} inputs keep more than {n}"
            found.append(Finding("groups", check.layer.name, what, f"prune it to {n}:{m}, or exclude it"))
    return found


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


def check_ties(contents: Contents, chosen: Mapping[str, Role], checks: Mapping[str, TensorCheck]) -> Iterator[Finding]:
    """Heads that should be their embedding and are not."""
    inner = contents.config.get("text_config")
    configs = [contents.config, *([inner] if isinstance(inner, dict) else [])]
    is_tied = next((config["tie_word_embeddings"] for config in configs if "tie_word_embeddings" in config), None)
    if str(contents.run.get("model", "")).startswith("gpt2"):
        is_tied = True
    embeddings = [name for name, role in chosen.items() if role.kind == "embedding" and embeds_tokens(name)]
    heads = [name for name, role in chosen.items() if role.kind == "head" and name.endswith("weight")]
    if is_tied is False or not embeddings:
        return
    first, *others = embeddings
    for name in (*heads, *others):
        is_head = chosen[name].kind == "head"
        if not is_head and checks[name].layer.shape != checks[first].layer.shape:
            continue
        if checks[name].hashed == checks[first].hashed:
            contents.notes.append(f"{name} and {first} hold the same values")
        elif is_tied is True and is_head:
            what = f"it differs from {first}, but the configuration ties them"
            yield Finding("untied", name, what, "store one of them, or set tie_word_embeddings to false")
        elif is_head:
            contents.notes.append(f"{name} differs from {first}, and nothing says whether they are tied")


def check_pruned(contents: Contents, checks: Mapping[str, TensorCheck]) -> Iterator[Finding]:
    """Weights with fewer zeros than ``prunus prune`` wrote down beside them."""
    for row in contents.pruned.get("layers", ()):
        check = checks.get(str(row.get("name"))) if isinstance(row, dict) else None
        num = row.get("num_pruned") if check is not None else None
        if check is not None and isinstance(num, int) and check.layer.num_zeros < num:
            what = f"{check.layer.num_zeros:,} of its weights are zero, but result.json says that {num:,} were pruned"
            yield Finding("too-dense", check.layer.name, what, "prune the model anew, or remove result.json")


def check_neighbours(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Tensors that a block lacks and most blocks of its list have; blocks that a list lacks.

    A block with tensors of its own is of another kind, and so are stages, whose tensors differ in shape.
    """
    lists: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in sorted(name for name in tensors if len(name) <= LONGEST):
        for match in NUMBER.finditer(f".{name}"):
            stem = f".{name}"[1 : match.start()]
            if stem.rpartition(".")[2] in LISTS:
                lists[stem][int(match[1])].add(f".{name}"[match.end() :])
    missing: dict[str, str] = {}
    for stem, blocks in lists.items():
        shapes = {(rest, tensors[f"{stem}.{i}.{rest}"].shape) for i, suffixes in blocks.items() for rest in suffixes}
        if len(blocks) > 2 and len(shapes) == len({rest for rest, _ in shapes}):
            missing |= _lacking(stem, blocks)
    for name, what in missing.items():
        yield Finding("missing", name, what, "copy it from where the model was saved, or save it anew")
    yield from _gaps(lists, config)


def _lacking(stem: str, blocks: Mapping[int, set[str]]) -> dict[str, str]:
    num_blocks = Counter(suffix for suffixes in blocks.values() for suffix in suffixes)
    usual = {suffix for suffix, number in num_blocks.items() if 2 * number > len(blocks)}
    found = {}
    for number, suffixes in sorted(blocks.items()):
        for suffix in sorted(usual - suffixes) if suffixes <= usual else ():
            if "." in suffix:  # blocks, not the layers of a Sequential
                found[f"{stem}.{number}.{suffix}"] = f"{num_blocks[suffix]} of {len(blocks)} blocks of {stem} have one"
    return found


def _gaps(lists: Mapping[str, Mapping[int, set[str]]], config: Mapping[str, Any]) -> Iterator[Finding]:
    """Blocks left out; a Sequential with activations in between leaves out every second number, which is no fault."""
    todo = "copy them from where the model was saved, or save it anew"
    for stem, blocks in lists.items():
        there = sorted(blocks)
        if len({after - before for before, after in pairwise(there)}) > 1:
            gone = (number for before, after in pairwise(there) for number in range(before + 1, after))
            first = list(islice(gone, NAMED))
            more = _num_gone(blocks) - len(first)
            shown = f"{first}{f' and {more:,} more' if more else ''}"
            what = f"blocks {shown} of {there[0]} to {there[-1]} are not there"
            yield Finding("missing", f"{stem}.{first[0]}", what, todo)
    given = [config.get(key) for key in ("num_hidden_layers", "n_layer")]
    num = next((number for number in given if isinstance(number, int) and not isinstance(number, bool)), 0)
    stacks = [stem for stem in lists if not stem.endswith("experts")]
    if num and stacks:
        stem = max(stacks, key=lambda stem: len(lists[stem]))
        num_there = len(lists[stem])
        if num_there + _num_gone(lists[stem]) < num or (num_there == 2 < num):
            yield Finding("missing", stem, f"config.json says {num} blocks, and {num_there} are stored", todo)


def _num_gone(blocks: Mapping[int, Any]) -> int:
    return max(blocks) - min(blocks) + 1 - len(blocks)


def check_moments(contents: Contents) -> Iterator[Finding]:
    """Optimizer state that is alive where its mask says pruned, and masks there that are not the pruner's."""
    packed_masks = {
        name: mask for name, mask in contents.masks.items() if (mask.dtype, len(mask.shape)) == ("uint8", 1)
    }
    own = {bytes(mask.load().numpy()): name for name, mask in packed_masks.items()}
    for number, row in enumerate(contents.moments):
        packed = row["mask"].flatten().to(dtype=torch.uint8)
        name = own.get(bytes(packed.numpy())) if own else None
        where = name or f"optimizer state {number}"
        if own and name is None:
            what = "its mask is none of the pruner's masks"
            yield Finding("masks-disagree", where, what, "go back to a checkpoint whose masks agree")
        for key, value in row.items():
            if value.ndim > 1 and bits.num_bytes(value.numel()) == len(packed):
                alive = int((nonzero(value) & ~bits.unpack(packed, value.shape)).sum())
                if alive:
                    what = f"{alive:,} values of {key} are not zero where the weight is pruned"
                    yield Finding("moments", where, what, "zero them, or the weights come back with the next step")


def check_digests(contents: Contents, own: str | None) -> Iterator[Finding]:
    """Stored digests that differ from the masks' ``own``, or from each other where there are no masks."""
    first = next(iter(contents.digests), "")
    expected = own or contents.digests.get(first)
    for place, value in contents.digests.items():
        if value != expected:
            what = f"{value[:16]} is stored, but the masks give {own[:16]}" if own else f"it differs from {first}"
            todo = "the ranks' masks have parted or the file was changed: go back to a checkpoint before it"
            yield Finding("digest", place, what, todo)
