"""Checks of one tensor: its role, its counts, its pattern, and what is wrong with it by itself.

Files have no modules to ask, so roles come from names and shapes, with the defaults of ``eligible``: linear and
convolution weights are pruned; embeddings, the head, norms and biases are not.
"""

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..eligible import check_patterns, matches
from ..ops import bits
from ..ops.lazy import as_rows
from .findings import Expected, Finding, TensorReport, share
from .pattern import Counts, count_kept, is_nonzero, num_crowded, num_not_finite, pattern_of, widened
from .sources import StoredTensor

ODD = 0.01  # share of zeros from which a matrix that should be dense is odd
ODD_VECTOR = 0.1  # of a vector, whose zeros are more often meant
ABSENT_ROWS = ("embedding", "head")  # rows of tokens that never occur may be zero
HEADS = re.compile(r"^(lm_head|embed_out|output_projection)$")
EMBEDDINGS = re.compile(
    r"^(wte|wpe|shared|emb|positions?|embed|embed_(in|tokens?|positions?)|relative_attention_bias"
    r"|(\w+_)?embeddings?|tok_embed|pos_embed|(\w+_)?embedder)$"
)
NORMS = re.compile(r"norm|^ln(_?\w+)?$|^bn\d*$|_ln$")
NOT_TOKENS = re.compile(r"pos|type|wpe|segment|relative")  # embeddings of something else than tokens
CONV1D = ("c_attn", "c_fc")  # wider than tall where a weight is stored (in, out)
CONV1D_ALL = (*CONV1D, "c_proj", "q_attn")
BUFFERS = re.compile(r"(running_(mean|var)|num_batches_tracked|inv_freq|masked_bias|mask|position_ids)$")
ROUTERS = re.compile(r"(.*)\.(?:gate|shared_expert_gate)\.")  # if experts are beside it
TOP_HEADS = ("head.weight", "output.weight", "decoder.weight", "model.head.weight", "cls.predictions.decoder.weight")


@dataclass(frozen=True)
class Role:
    """``kind`` is weight for what may be pruned; ``outputs`` are the dimensions that count outputs."""

    kind: str
    outputs: tuple[int, ...] = (0,)


def roles(
    tensors: Mapping[str, StoredTensor],
    expected: Expected,
    masked: Collection[str] = (),
    pruned: Collection[str] = (),
) -> dict[str, Role]:
    """The role of every tensor; where names of the ``masked`` or ``pruned`` are known, the weights are those.

    ``expected.include`` adds to the weights, ``only`` restricts them to what it matches, and ``exclude`` wins.
    """
    if not tensors:
        return {}
    check_patterns([*expected.include, *expected.exclude, *expected.only], tensors)
    by_name = _kinds_by_name(tensors)
    is_gpt2 = any(  # of Hugging Face, whose linear weights are (in, out)
        owner_of(name) in CONV1D and stored.shape[1] > stored.shape[0] and name.endswith("weight")
        for name, stored in tensors.items()
        if len(stored.shape) == 2
    )
    chosen = {}
    for name, stored in tensors.items():
        kind, outputs, ndim = by_name[name], (0,), len(stored.shape)
        if ndim > 1 and matches(name, expected.exclude):
            kind = "excluded"
        elif ndim > 1 and (matches(name, expected.include) or name in masked or name in pruned):
            kind = "weight"
        elif (masked or pruned) and kind == "weight":
            kind = "without a mask" if masked else "left dense"
        if kind == "weight" and expected.only and not matches(name, expected.only):
            kind = "not named by only"
        if ndim == 2 and is_gpt2 and owner_of(name) in CONV1D_ALL:
            outputs = (1,)
        elif ndim == 3 and not name.endswith(".weight"):
            outputs = (0, 1)  # experts side by side: (expert, out, in)
        chosen[name] = Role(kind, outputs)
    return chosen


def _kinds_by_name(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    kinds = {name: _kind(name, stored) for name, stored in tensors.items()}
    tokens = {tensors[name].shape for name, kind in kinds.items() if kind == "embedding" and embeds_tokens(name)}
    mixtures = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for name, kind in kinds.items():
        if kind == "embedding" and f"{name.rpartition('.')[0]}.bias" in tensors:
            kinds[name] = "weight"  # a linear layer, whatever its name
        gate = ROUTERS.match(name)
        if kinds[name] == "weight" and (".router." in name or (gate and gate[1] in mixtures)):
            kinds[name] = "router"  # it sends tokens to experts
        if name in TOP_HEADS and tensors[name].shape in tokens:
            kinds[name] = "head"
    return kinds


def _kind(name: str, stored: StoredTensor) -> str:
    owner, last = owner_of(name), name.rpartition(".")[2]
    if not stored.is_float or BUFFERS.search(last):
        return "buffer"
    if len(stored.shape) < 2:
        if last.endswith("bias"):
            return "bias"
        return "norm" if NORMS.search(owner.lower()) else "vector"
    if HEADS.match(owner):
        return "head"
    if EMBEDDINGS.match(owner) and len(stored.shape) == 2:
        return "embedding"
    if NORMS.search(owner.lower()):
        return "norm"
    return "weight" if last.endswith("weight") else "other"


def embeds_tokens(name: str) -> bool:
    """Whether an embedding is one of tokens, not of positions or the like."""
    return not NOT_TOKENS.search(owner_of(name))


def owner_of(name: str) -> str:
    """The last part of the module's name: ``q_proj`` of ``layers.0.q_proj.weight``."""
    return name.split(".")[-2:][0]


@dataclass(frozen=True)
class TensorCheck:
    """A layer, the counts of what stays in it, the number of groups that keep too many, and a hash of its bytes."""

    layer: TensorReport
    counts: Counts | None = None
    findings: list[Finding] = field(default_factory=list)
    num_crowded: int = 0  # -1 where its rows cannot be split into the groups
    hashed: str | None = None


def check_tensor(
    stored: StoredTensor, role: Role, mask: StoredTensor | None, groups: tuple[int, int] | None
) -> TensorCheck:
    num, findings = math.prod(stored.shape), []
    layer = TensorReport(stored.name, stored.shape, stored.dtype, role.kind, num, 0, "-" if num else "no elements")
    if mask and num and (not stored.is_float or len(stored.shape) < 2):
        findings.append(_bad_mask(stored, mask))
    if not stored.is_float or num == 0:  # zeros of integers and booleans say nothing
        return TensorCheck(layer, None, findings)
    tensor = stored.load()
    alive, not_finite = is_nonzero(tensor), num_not_finite(tensor)
    hashed = _hash(tensor) if role.kind in ABSENT_ROWS else None
    del tensor
    layer = replace(layer, num_zeros=num - int(alive.count_nonzero()), num_not_finite=not_finite)
    if not_finite and "mask" not in stored.name.rpartition(".")[2]:
        findings.append(Finding("not-finite", stored.name, f"{not_finite:,} of {num:,} values are NaN or infinite"))
    if alive.ndim < 2:
        return TensorCheck(layer, None, [*findings, *_odd(layer, layer.num_zeros)], hashed=hashed)
    kept = alive
    if mask:
        fitting = stored_mask(mask, stored.shape)
        if fitting is None:
            findings.append(_bad_mask(stored, mask))
        else:
            kept, num_kept, num_live = fitting, int(fitting.count_nonzero()), int((alive & fitting).count_nonzero())
            pruned, live_zeros, came_back = num - num_kept, num_kept - num_live, num - layer.num_zeros - num_live
            layer = replace(layer, num_pruned=pruned, num_live_zeros=live_zeros, num_came_back=came_back)
            layer = replace(layer, notes=(f"{live_zeros:,} live zeros",) if live_zeros else ())
            if came_back:
                what = f"{came_back:,} of {pruned:,} pruned weights are not zero"
                findings.append(Finding("came-back", layer.name, what))
    check = _check_matrix(alive, kept, layer, role, groups)
    return replace(check, findings=findings + check.findings, hashed=hashed)


def stored_mask(stored: StoredTensor, shape: tuple[int, ...]) -> Tensor | None:
    """The boolean mask of a tensor of ``shape``, from booleans, numbers or packed bits; None if it does not fit."""
    mask = widened(stored.load())
    if tuple(mask.shape) == shape and (mask.dtype != torch.uint8 or not mask.numel() or int(mask.max()) <= 1):
        return mask != 0
    numel = math.prod(shape)
    if mask.shape != (bits.num_bytes(numel),):
        return None
    packed = mask.to(torch.uint8).contiguous()
    if numel % 8 and int(packed[-1]) >> (numel % 8):
        return None  # bits beyond the end: of another tensor
    return bits.unpack(packed, shape)


def _check_matrix(
    alive: Tensor, kept: Tensor, layer: TensorReport, role: Role, groups: tuple[int, int] | None
) -> TensorCheck:
    counts, rows = count_kept(as_rows(alive, role.outputs)), as_rows(kept, role.outputs)
    kept_counts = counts if kept is alive else count_kept(rows)
    channels = counts.columns  # an input of a convolution is a channel, not one tap of its kernel
    if alive.ndim > 2 and role.outputs == (0,):
        channels = channels.view(alive.shape[1], -1).sum(1)
    dead = {"num_dead_rows": counts.num_dead_rows, "num_dead_columns": int((channels == 0).sum())}
    layer = replace(layer, **dead, pattern=pattern_of(kept_counts))
    if layer.is_prunable:
        n, m = groups or (0, 1)
        crowded = 0 if not groups else num_crowded(rows, n, m) if rows.shape[1] % m == 0 else -1
        return TensorCheck(layer, kept_counts, list(_dead(layer, counts)), crowded)
    expected = counts.num_dead_rows * counts.shape[1] if layer.role in ABSENT_ROWS else 0
    if layer.role == "embedding" and not embeds_tokens(layer.name):  # in a table of sines the first row has sin 0
        expected += 0 if counts.rows[0] == 0 else counts.shape[1] - int(counts.rows[0])
    return TensorCheck(layer, kept_counts, list(_odd(layer, layer.num_zeros - expected)))


def _bad_mask(stored: StoredTensor, mask: StoredTensor) -> Finding:
    what = f"its mask in {mask.file} is {mask.dtype} {mask.shape}, which is no mask of {stored.dtype} {stored.shape}"
    return Finding("bad-mask", stored.name, what)


def _dead(layer: TensorReport, counts: Counts) -> Iterator[Finding]:
    """Lines that died; where all that was removed are whole lines, that is the pattern and no fault."""
    if layer.pattern in ("rows", "columns", "rows and columns"):
        return
    for kind, line, number, lines in (
        ("dead-rows", "output", layer.num_dead_rows, counts.rows),
        ("dead-columns", "input", layer.num_dead_columns, counts.columns),
    ):
        if number and not (kind == "dead-columns" and layer.pattern == "row-uniform"):  # inputs that no row wants
            first = ", ".join(str(int(i)) for i in (lines == 0).nonzero()[:3, 0]) + (", ..." if number > 3 else "")
            verb = "s have" if number > 1 else " has"
            what = f"{number:,} {line}{verb} only zeros ({kind[5:]} {first} of {len(lines):,})"
            yield Finding(kind, layer.name, what)


def _odd(layer: TensorReport, zeros: int) -> Iterator[Finding]:
    if layer.role in ("weight", "left dense", "router", "other", "buffer"):
        return
    is_vector = len(layer.shape) < 2
    if is_vector and (zeros == layer.num or zeros < 2):
        return  # never trained, or chance
    if zeros >= (ODD_VECTOR if is_vector else ODD) * layer.num and zeros:
        asked = ("excluded", "not named by only", "without a mask")
        reason = layer.role if layer.role in asked else f"{layer.role}, not pruned by default"
        what = f"{share(zeros, layer.num)} of it is zero, but it should be dense ({reason})"
        option = f"--only {layer.name} too" if layer.role == "not named by only" else f"--include {layer.name}"
        yield Finding("excluded", layer.name, what, f"take it from the dense model; {option} if it was meant")


def _hash(tensor: Tensor) -> str:
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    made.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()
