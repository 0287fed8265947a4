"""Gradient checkpointing: blocks that save only their inputs and run again when the backward reaches them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from .offload import Offload


def recomputed(blocks: Sequence[nn.Module], offload: Offload | None) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards of ``blocks``, to stand in for their own, whose graph holds no more than what goes into a block."""
    return {block: _forward(block, offload) for block in blocks}


def _forward(block: nn.Module, offload: Offload | None) -> Callable[..., Any]:
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]

        def run(*args: Any, **kwargs: Any) -> Any:
            if [tensor._version for tensor in given] != versions:
                raise ValueError(f"{type(block).__name__} changes its input in place; leave out checkpointing")
            if offload is None or offload.holds(block):
                return own(*args, **kwargs)
            with offload.loaded(block):  # run again by the backward: no hook of the block has brought its weights
                return own(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward
