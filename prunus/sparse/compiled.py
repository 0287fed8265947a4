"""A model's repeated blocks as one compiled function: many blocks take torch.compile as long as one.

Weights, keys and values are inputs of that function. What else differs from block to block is the index by which a
block finds its layer of the cache, and the sizes of sparse weights. torch.compile leaves both open, and the index is
not used: every block is given a cache of its own. Blocks of another structure, as those that are sparse in other
layers, and other batch sizes are compiled once each.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .gaps import Gaps
from .tiles import Tiles

MOST_KINDS = 1024  # of blocks, batch sizes and lengths that are compiled in a process
PARTS = "|".join((*Gaps.PARTS, *Tiles.PARTS, "stage"))
OPEN = rf".*\blayer_idx\W*$,.*\b(fast|fused)\b.*\b({PARTS})\W*$"  # what dynamo calls the numbers and sizes left open


class CompiledBlocks:
    """The model's forward with its blocks compiled, for one cache; ``check`` runs a step without compiling."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.caches = {block: LayerCache(cache.layers[index], index) for block, index in blocks_of(model).items()}

    def check(self, **inputs: Any) -> Any:
        return self._run(_forward, inputs)

    def __call__(self, **inputs: Any) -> Any:
        limits = {"recompile_limit": MOST_KINDS, "accumulated_recompile_limit": MOST_KINDS}
        config: Any = torch.compiler.config
        names = {"dynamic_sources": f"{config.dynamic_sources},{OPEN}"}
        with torch._dynamo.config.patch(limits), config.patch(names):
            return self._run(_compiled_forward(), inputs)

    def _run(self, run: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        def forward_of(block: nn.Module, layer: LayerCache) -> Callable[..., Any]:
            def own(value: Any) -> Any:
                return layer if value is self.cache else value

            return lambda *args, **options: run(block, [*map(own, args)], {k: own(v) for k, v in options.items()})

        try:
            for block, layer in self.caches.items():
                vars(block)["forward"] = forward_of(block, layer)
            return self.model(**inputs)
        finally:
            for block in self.caches:
                vars(block).pop("forward", None)


class LayerCache:
    """One layer of a static cache, as a block sees it that looks for its own layer alone."""

    is_compileable = True

    def __init__(self, layer: Any, index: int) -> None:
        self.layer, self.index = layer, index

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling() and layer_idx != self.index:
            raise ValueError(f"the block of layer {self.index} writes to layer {layer_idx} of the cache")
        return self.layer.update(keys, values, *args, **options)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.layer.get_seq_length()


def blocks_of(model: nn.Module) -> dict[nn.Module, int]:
    """The items of the longest list of modules that have one layer of the cache each, and its index."""
    best: dict[nn.Module, int] = {}
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) > len(best):
            parts = [[vars(part) for part in item.modules()] for item in modules]
            indices = [{part["layer_idx"] for part in block if "layer_idx" in part} for block in parts]
            if all(len(index) == 1 for index in indices) and not any("forward" in vars(item) for item in modules):
                best = {item: index.pop() for item, index in zip(modules, indices, strict=True)}
    if not best:
        raise ValueError(f"{type(model).__name__} has no list of blocks with a layer_idx each")
    return best


def _forward(block: nn.Module, args: list[Any], options: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **options)


@cache
def _compiled_forward() -> Callable[..., Any]:
    """One function for all models, made at its first use, since torch takes seconds to import its compiler."""
    return torch.compile(_forward, dynamic=False, fullgraph=True)
