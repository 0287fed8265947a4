"""The role of each tensor.

Files have no modules to ask, so roles come from names and shapes, with the defaults of ``eligible``: linear and
convolution weights are pruned; embeddings, the head, norms and biases are not.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..eligible import check_patterns, matches
from .contents import StoredTensor
from .findings import Expected

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
    """What each tensor is by its own name and shape and those of its neighbours."""
    kinds = {name: _kind(name, stored) for name, stored in tensors.items()}
    tokens = {tensors[name].shape for name, kind in kinds.items() if kind == "embedding" and embeds_tokens(name)}
    routers = _routers(tensors)
    for name, kind in kinds.items():
        if kind == "embedding" and f"{name.rpartition('.')[0]}.bias" in tensors:
            kinds[name] = "weight"  # a linear layer, whatever its name
        if kinds[name] == "weight" and name in routers:
            kinds[name] = "router"
        if name in TOP_HEADS and tensors[name].shape in tokens:
            kinds[name] = "head"
    return kinds


def _routers(tensors: Iterable[str]) -> set[str]:
    """Tensors that send tokens to experts: of modules of that name, and of a ``gate`` beside ``experts``."""
    mixtures = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    routers = {name for name in tensors if ".router." in name}
    for owner in ("gate", "shared_expert_gate"):
        splits = {name: name.rpartition(f".{owner}.") for name in tensors}
        routers |= {name for name, (before, dot, _) in splits.items() if dot and before in mixtures}
    return routers


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
