"""Blocks that a pass skips, with identities in their places, and whether a model without them is the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .blocks import SAME, STUB, is_near
from .calibration import ROUNDING, Calibration
from .distance import output_of
from .fewer_layers import FewerLayers
from .forward import arguments, outputs, replaced
from .resources import FAILURES, is_out_of_memory, reason_of
from .samples import Tree, num_tokens, shortened

PROMPT = 8  # tokens of a sample that the model continues
Place = tuple[str, int]  # a list of blocks, and one of them
Key = int | str  # of an input: its place, or its name


class Identity:
    """A forward that returns its first input, in the form of what the block returns."""

    def __init__(self, sources: list[Key | None], spec: Any) -> None:
        self.sources, self.spec = sources, spec  # which input each leaf of the output is
        setattr(self, STUB, True)

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tree) -> "Identity | None":
        """None where the first tensor of the output has not the shape of the first input."""
        given: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        leaves, spec = pytree.tree_flatten(output)
        number = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        first = next(iter(given), None)
        if number is None or first is None or leaves[number].shape != _shape(given[first]):
            return None
        sources = [_source(given, place, leaf) for place, leaf in enumerate(leaves)]
        sources[number] = first
        return Identity(sources, spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Tree:
        given: dict[Key | None, Any] = {**dict(enumerate(args)), **kwargs}
        return pytree.tree_unflatten([given.get(source) for source in self.sources], self.spec)


def _source(given: Mapping[Key, Any], place: int, leaf: Any) -> Key | None:
    """The input that a block returns: the very same, or that at its place if it has its shape."""
    same = [key for key, value in given.items() if value is leaf is not None]
    at_place = [key for key in [*given][place : place + 1] if _shape(given[key]) == _shape(leaf) is not None]
    return next(iter([*same, *at_place]), None)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


@contextmanager
def seen_blocks(blocks: Mapping[Place, nn.Module]) -> Iterator[dict[Place, tuple[nn.Module, Identity]]]:
    """Afterwards holds the blocks with weights that the pass reached once, and their identities; or ValueError."""
    owners: dict[Tensor, Place] = {}
    for where, block in blocks.items():
        for parameter in block.parameters():
            if owners.setdefault(parameter, where) != where:
                (a, i), (b, j) = owners[parameter], where
                raise ValueError(f"{a}.{i} and {b}.{j} share weights, so no layer can be removed")
    calls: dict[nn.Module, list[Identity | None]] = {block: [] for block in blocks.values()}
    skips: dict[Place, tuple[nn.Module, Identity]] = {}
    with replaced({block: _watched(block, seen) for block, seen in calls.items()}):
        yield skips
    for where, block in blocks.items():
        if len(calls[block]) > 1:
            raise ValueError(f"the blocks of {where[0]} run more than once in a pass, so none can be removed")
        identity = calls[block][0] if calls[block] else None
        if identity is not None and any(parameter.ndim > 1 for parameter in block.parameters()):
            skips[where] = block, identity


def _watched(block: nn.Module, seen: list[Identity | None]) -> Callable[..., Tree]:
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Tree:
        output = own(*args, **kwargs)
        seen.append(Identity.of(args, kwargs, output))
        return output

    return forward


@dataclass(frozen=True)
class LayerCheck:
    """A model with the identities of its blocks, and the sample that every check runs on."""

    calibration: Calibration
    plan: FewerLayers
    skips: Mapping[Place, tuple[nn.Module, Identity]]
    sample: Tree
    generates: bool  # with all layers

    def fault(self, gone: Sequence[Place]) -> str:
        """Why the model without these blocks is not what it is with identities in their places; empty where it is."""
        model, sample = self.calibration.model, self.sample
        try:
            cuts = self.plan.cuts(gone)
        except ValueError as error:
            return str(error)
        with self.calibration.open(), torch.no_grad(), replaced(dict(self.skips[where] for where in gone)):
            expected = output_of(outputs(model, sample))
        args, named = arguments(model, sample)
        as_users_call = {key: value for key, value in named.items() if key != "use_cache"}  # with a cache by default
        cuts.apply_()
        try:
            with self.calibration.open(), torch.no_grad():
                same, as_called = output_of(outputs(model, sample)), output_of(model(*args, **as_users_call))
                if self.generates and not can_generate(model, sample):
                    return "generate fails without it, since its class counts layers in another way"
        except FAILURES as error:
            return f"the model fails without it: {reason_of(error)}"
        finally:
            cuts.undo_()
        if _is_near(same, expected, SAME) and _is_near(as_called, expected, ROUNDING):
            return ""
        return f"the layers after it would compute something else{self.plan.periods}"


def can_generate(model: Any, sample: Tree) -> bool:
    """Whether it generates a token with its cache, whose layers the class may count in its own way."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return False
    args, named = arguments(model, shortened(sample, PROMPT) if num_tokens(sample) > PROMPT else sample)
    named = {key: value for key, value in named.items() if key not in ("use_cache", "decoder_input_ids", "labels")}
    try:
        model.generate(*args, **named, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _is_near(output: Tensor, expected: Tensor, tolerances: Mapping[torch.dtype, float]) -> bool:
    return output.shape == expected.shape and is_near(output, expected, tolerances.get(output.dtype, 1e-2))
