"""What a path holds, names and shapes first, values one tensor at a time; and the role of each tensor.

Files have no modules to ask, so roles come from names and shapes, with the defaults of ``eligible``: linear and
convolution weights are pruned; embeddings, the head, norms and biases are not.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..eligible import check_patterns, matches
from ..masks import Masks, digest
from ..ops import bits
from .findings import Finding

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
TOP_HEADS = ("head.weight", "output.weight", "decoder.weight", "model.head.weight", "cls.predictions.decoder.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read when ``load`` is called, and the file it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    load: Callable[[], Tensor]

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers, not pairs of them as in float4."""
        return self.dtype.startswith(("float", "bfloat")) and not self.dtype.startswith("float4")

    @classmethod
    def of(cls, name: str, tensor: Tensor, file: str) -> "StoredTensor":
        """A tensor that is in memory, or mapped into it."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype), file, lambda: tensor.detach())


@dataclass
class Contents:
    """What a path holds; ``findings`` and ``notes`` are those of reading it."""

    path: Path
    kind: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    masks: dict[str, StoredTensor] = field(default_factory=dict)  # boolean, or packed bits
    config: dict[str, Any] = field(default_factory=dict)  # config.json of Hugging Face
    run: dict[str, Any] = field(default_factory=dict)  # options of ``prunus train``
    pruned: dict[str, Any] = field(default_factory=dict)  # result.json of ``prunus prune``
    state: dict[str, int] = field(default_factory=dict)  # the pruner's step and due
    moments: list[dict[str, Tensor]] = field(default_factory=list)  # optimizer state of weights that have a mask
    digests: dict[str, str] = field(default_factory=dict)  # by the place that stores them
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)  # files that stay open until all is read

    def find(self, kind: str, where: str, what: str, todo: str) -> None:
        self.findings.append(Finding(kind, where, what, todo))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def nonzero(tensor: Tensor) -> Tensor:
    """Where a tensor is not zero; -0.0 is zero, NaN is not."""
    return widened(tensor) != 0


def widened(tensor: Tensor) -> Tensor:
    """A float8 as float32, since few operations know it, pairs of float4 as bytes; any other tensor as it is."""
    if dtype_name(tensor.dtype).startswith("float4"):
        return tensor.view(torch.uint8)
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def digest_of(masks: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> str | None:
    """``masks.digest`` of stored masks, one bit a weight in memory; None if a mask does not fit its tensor."""
    weights, packed = {}, {}
    for name, stored in masks.items():
        shape = tensors[name].shape if name in tensors else stored.shape
        mask = stored_mask(stored, shape)
        if mask is None:
            return None
        weights[name], packed[name] = torch.empty(shape, device="meta"), bits.pack(mask)
    return digest(Masks(weights, packed))


@dataclass(frozen=True)
class Role:
    """``kind`` is weight for what may be pruned; ``outputs`` are the dimensions that count outputs."""

    kind: str
    outputs: tuple[int, ...] = (0,)


def roles(
    tensors: Mapping[str, StoredTensor],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    masked: Iterable[str] = (),
    pruned: Iterable[str] = (),
) -> dict[str, Role]:
    """The role of every tensor; where names of the ``masked`` or ``pruned`` are known, the weights are those.

    ``include`` and ``exclude`` are globs that move a tensor into or out of what is pruned.
    """
    if not tensors:
        return {}
    check_patterns([*include, *exclude], tensors)
    masked, pruned = set(masked), set(pruned)
    matrices = {name: stored.shape for name, stored in tensors.items() if len(stored.shape) == 2}
    tokens = {shape for name, shape in matrices.items() if EMBEDDINGS.match(owner_of(name)) and embeds_tokens(name)}
    is_gpt2 = any(  # of Hugging Face, whose linear weights are (in, out)
        owner_of(name) in CONV1D and shape[1] > shape[0] and name.endswith("weight") for name, shape in matrices.items()
    )
    routers = _routers(tensors)
    found = {}
    for name, stored in tensors.items():
        kind, outputs, ndim = _kind(name, stored), (0,), len(stored.shape)
        if kind == "embedding" and f"{name.rpartition('.')[0]}.bias" in tensors:
            kind = "weight"  # a linear layer, whatever its name
        if kind == "weight" and name in routers:
            kind = "router"
        if name in TOP_HEADS and stored.shape in tokens:
            kind = "head"
        if matches(name, exclude) and ndim > 1:
            kind = "excluded"
        elif (matches(name, include) or name in masked | pruned) and ndim > 1:
            kind = "weight"
        elif (masked or pruned) and kind == "weight":
            kind = "without a mask" if masked else "left dense"
        if ndim == 2 and is_gpt2 and owner_of(name) in CONV1D_ALL:
            outputs = (1,)
        elif ndim == 3 and not name.endswith(".weight"):
            outputs = (0, 1)  # experts side by side: (expert, out, in)
        found[name] = Role(kind, outputs)
    return found


def _routers(tensors: Iterable[str]) -> set[str]:
    """Tensors that send tokens to experts: of modules of that name, and of a ``gate`` beside ``experts``."""
    mixtures = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    found = {name for name in tensors if ".router." in name}
    for owner in ("gate", "shared_expert_gate"):
        splits = {name: name.rpartition(f".{owner}.") for name in tensors}
        found |= {name for name, (before, dot, _) in splits.items() if dot and before in mixtures}
    return found


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
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]
