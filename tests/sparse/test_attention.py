"""Attention of one token over shared heads is that of torch, for every mask."""

import pytest
import torch
from causal_models import causal_model, transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prunus.sparse import attention
from prunus.sparse.attention import attention_of_one, can_attend, shared_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parts(batch, heads, num, length, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, heads, 1, size), (batch, num, length, size), (batch, num, length, size)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


@pytest.mark.rounding
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(("batch", "heads", "num", "length"), [(1, 4, 1, 1), (2, 6, 2, 9), (3, 8, 4, 64)])
def test_it_is_the_attention_of_torch(batch, heads, num, length, is_added, scale):
    query, key, value = parts(batch, heads, num, length, 8)
    mask = torch.rand(batch, 1, 1, length, device=DEVICE) < 0.6
    mask[..., -1] = True  # some key is seen
    if is_added:
        mask = torch.zeros_like(mask, dtype=torch.float64).masked_fill_(~mask, torch.finfo(torch.float64).min)
    assert can_attend(query, key, value, mask)
    found = attention_of_one(query, key, value, mask, scale)
    wide = [part.repeat_interleave(heads // num, 1) for part in (key, value)]
    expected = scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=scale).transpose(1, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_it_is_as_close_to_float64_as_torch_is(dtype):
    query, key, value = parts(2, 8, 2, 128, 64, dtype)
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device=DEVICE)
    exact = attention_of_one(query.double(), key.double(), value.double(), mask)
    wide = [part.repeat_interleave(4, 1) for part in (key, value)]
    usual = scaled_dot_product_attention(query, *wide, attn_mask=mask).transpose(1, 2)
    errors = [(y.double() - exact).abs().max() for y in (attention_of_one(query, key, value, mask), usual)]
    assert errors[0] <= 2 * errors[1] + 1e-3


def test_heads_of_their_own_several_tokens_and_masks_by_head_are_left_to_torch():
    query, key, value = parts(1, 4, 2, 5, 8)
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool, device=DEVICE)
    assert not can_attend(query, query, query, mask)
    assert not can_attend(query.expand(-1, -1, 2, -1), key, value, mask)
    assert not can_attend(query, key, value, mask.expand(-1, 4, -1, -1))


def test_models_attend_by_it_while_it_is_open_and_as_before_afterwards(monkeypatch):
    calls, usual = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    real = attention.attention_of_one
    monkeypatch.setattr(attention, "attention_of_one", lambda *parts: calls.append(1) or real(*parts))
    model = causal_model(num_attention_heads=4, num_key_value_heads=2).to(DEVICE)
    ids = torch.randint(32, (2, 5), device=DEVICE)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(ids, **options)
    with shared_heads():
        found = model.generate(ids, **options)
    assert len(calls) >= 10 and torch.equal(found, expected)
    with pytest.raises(RuntimeError), shared_heads():
        raise RuntimeError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


@pytest.mark.parametrize("is_global", [False, True])
def test_a_function_that_the_user_has_put_there_stays(is_global):
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def own(*args, **options):
        return usual(*args, **options)

    register = transformers.AttentionInterface.register if is_global else ALL_ATTENTION_FUNCTIONS.__setitem__
    register("sdpa", own)
    try:
        with shared_heads():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        if is_global:
            register("sdpa", usual)
        else:
            del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_opened_inside_itself_or_by_two_threads_it_is_closed_once_and_for_all():
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with shared_heads():
        with shared_heads():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual
    first, second = shared_heads(), shared_heads()
    for step in (first.__enter__, second.__enter__):
        step()
    for context in (first, second):
        context.__exit__(None, None, None)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual
