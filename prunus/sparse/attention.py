"""Attention of one token to a static cache whose heads share keys and values, without copies of them.

``scaled_dot_product_attention`` takes no mask beside shared heads, so that transformers writes the keys and values of
every head out for it, several times the cache, at every token and layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops.wide_products import wide_bmm

UNUSUAL = ("position_bias", "cache", "softcap", "s_aux")  # options that change what is computed


@contextmanager
def shared_heads() -> Iterator[None]:
    """While it is open, models of transformers that attend by ``sdpa`` do it for one token without the copies."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:  # one that the user has put there stays
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attend()
    try:
        yield
    finally:
        with suppress(KeyError):  # another thread may have been faster
            del ALL_ATTENTION_FUNCTIONS["sdpa"]  # which uncovers the one of transformers


@cache
def _attend() -> Callable[..., Any]:
    """One function for all calls, by which torch.compile knows what it has compiled."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        is_plain = not options.get("dropout") and all(options.get(name) is None for name in UNUSUAL)
        if is_plain and attention_mask is not None and can_attend(query, key, value, attention_mask):
            return attention_of_one(query, key, value, attention_mask, options.get("scaling")), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    return attend


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether heads share keys, one token asks, and the mask is the same for all heads."""
    return query.shape[2] == 1 and query.shape[1] > key.shape[1] == value.shape[1] and mask.shape[1:3] == (1, 1)


def attention_of_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Outputs (batch, 1, heads, size) for a query (batch, heads, 1, size), keys and values (batch, fewer heads, length,
    size) and a mask (batch or 1, 1, 1, length), of booleans or added; scores and weights are float32."""
    batch, heads, _, size = query.shape
    num, length = key.shape[1], key.shape[2]
    scale = size**-0.5 if scale is None else scale
    grouped = query.reshape(batch * num, heads // num, size)
    scores = wide_bmm(grouped, key.reshape(batch * num, length, size).transpose(1, 2)) * scale
    scores = scores.view(batch, num, heads // num, length)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(value.dtype).view(batch * num, heads // num, length)
    return torch.bmm(weights, value.reshape(batch * num, length, -1)).view(batch, 1, heads, -1)
