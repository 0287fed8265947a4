"""The role of a tensor, from its name and shape: files have no modules to ask.

The defaults are those of ``eligible``: linear and convolution weights are pruned, and embeddings,
the head, norms and biases are not.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..eligible import check_patterns, matches
from .contents import StoredTensor

HEADS = re.compile(r"^(lm_head|embed_out|output_projection)$")
EMBEDDINGS = re.compile(
    r"^(wte|wpe|shared|emb|positions?|embed|embed_(in|tokens?|positions?)|relative_attention_bias"
    r"|(\w+_)?embeddings?|tok_embed|pos_embed|(\w+_)?embedder)$"
)
NORMS = re.compile(r"norm|^ln(_?\w+)?$|^bn\d*$|_ln$")
PLACES = re.compile(r"pos|type|wpe|segment|relative")  # embeddings of something else than tokens
CONV1D = ("c_attn", "c_fc")  # wider than tall where a weight is stored (in, out)
CONV1D_ALL = (*CONV1D, "c_proj", "q_attn")
BUFFERS = re.compile(r"(running_(mean|var)|num_batches_tracked|inv_freq|masked_bias|mask|position_ids)$")


@dataclass(frozen=True)
class Role:
    """``kind`` is weight for what may be pruned; ``outputs`` are the dimensions that count outputs."""

    kind: str
    outputs: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Choice:
    """Globs that move a tensor into or out of what is pruned, and the names that have masks."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    masked: Iterable[str] = ()


def roles(tensors: Mapping[str, StoredTensor], choice: Choice) -> dict[str, Role]:
    """The role of every tensor; where there are masks, the weights are those that have one."""
    check_patterns([*choice.include, *choice.exclude], tensors)
    masked = set(choice.masked)
    transposed = _is_stored_input_first(tensors)
    heads = _heads(tensors)
    found = {}
    for name, stored in tensors.items():
        kind = "head" if name in heads else _kind(name, stored)
        if matches(name, choice.exclude) and len(stored.shape) > 1:
            kind = "excluded"
        elif (matches(name, choice.include) or name in masked) and len(stored.shape) > 1:
            kind = "weight"
        elif masked and kind == "weight":
            kind = "without a mask"
        found[name] = Role(kind, _outputs(name, stored.shape, transposed))
    return found


def rows_of(tensor: Tensor, outputs: Sequence[int]) -> Tensor:
    """The tensor as (outputs, inputs)."""
    inputs = [dim for dim in range(tensor.ndim) if dim not in outputs]
    num_rows = math.prod(tensor.shape[dim] for dim in outputs)
    return tensor.permute(*outputs, *inputs).reshape(num_rows, tensor.numel() // max(1, num_rows))


def token_embeddings(tensors: Mapping[str, StoredTensor], kinds: Mapping[str, Role]) -> list[str]:
    return [name for name in tensors if kinds[name].kind == "embedding" and not PLACES.search(owner_of(name))]


def owner_of(name: str) -> str:
    """The last part of the module's name: ``q_proj`` of ``layers.0.q_proj.weight``."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]


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


def _heads(tensors: Mapping[str, StoredTensor]) -> set[str]:
    """Top-level outputs of the shape of an embedding of tokens, whatever they are called."""
    shapes = {
        stored.shape
        for name, stored in tensors.items()
        if len(stored.shape) == 2 and EMBEDDINGS.match(owner_of(name)) and not PLACES.search(owner_of(name))
    }
    names = ("head.weight", "output.weight", "decoder.weight", "model.head.weight", "cls.predictions.decoder.weight")
    return {name for name in names if name in tensors and tensors[name].shape in shapes}


def _is_stored_input_first(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether this is a GPT-2 of Hugging Face, whose linear weights are (in, out)."""
    return any(
        owner_of(name) in CONV1D and len(stored.shape) == 2 and stored.shape[1] > stored.shape[0]
        for name, stored in tensors.items()
        if name.endswith("weight")
    )


def _outputs(name: str, shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    if len(shape) == 2 and transposed and owner_of(name) in CONV1D_ALL:
        return (1,)
    if len(shape) == 3 and not name.endswith(".weight"):
        return (0, 1)  # experts side by side: (expert, out, in)
    return (0,)
