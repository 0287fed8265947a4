"""Masks are looked up by name, compared, and told apart by their digest."""

import pytest
import torch

from prunus.masks import Masks, digest, packed_masks, position_sum, restore_bits
from prunus.ops import bits

SHAPES = {"a": (5, 3), "b": (2, 3, 4), "c": (70,)}


@pytest.fixture
def masks():
    return {name: torch.rand(shape) < 0.5 for name, shape in SHAPES.items()}


@pytest.fixture
def weights():
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def test_masks_are_unpacked_by_name_and_all_true_where_there_are_no_bits(masks, weights):
    found = Masks(weights, {"b": bits.pack(masks["b"])})
    assert list(found) == list(weights) and len(found) == 3
    assert torch.equal(found["b"], masks["b"])
    assert found["a"].dtype == torch.bool and found["a"].shape == (5, 3) and found["a"].all()
    with pytest.raises(KeyError):
        found["d"]


def test_equal_masks_have_one_digest_however_they_are_stored(masks, weights):
    stored = Masks(weights, {name: bits.pack(mask) for name, mask in masks.items()})
    strided = {name: mask.T.contiguous().T if mask.ndim == 2 else mask for name, mask in masks.items()}
    backwards = dict(reversed(masks.items()))
    assert digest(masks) == digest(stored) == digest(strided) == digest(backwards)


def test_any_single_bit_changes_the_digest(masks):
    found = {digest(masks)}
    for mask in masks.values():
        for place in range(mask.numel()):
            mask.view(-1)[place] ^= True
            found.add(digest(masks))
            mask.view(-1)[place] ^= True
    assert len(found) == 1 + sum(mask.numel() for mask in masks.values())


def test_names_and_shapes_change_the_digest(masks):
    masks |= {"e": torch.rand(5, 3) < 0.5}
    others = [
        masks | {"a": masks["e"], "e": masks["a"]},
        {"z" if name == "a" else name: mask for name, mask in masks.items()},
        masks | {"a": masks["a"].view(3, 5)},
        masks | {"c": masks["c"].view(7, 10)},
        {name: mask for name, mask in masks.items() if name != "a"},
        masks | {"d": torch.ones(0, dtype=torch.bool)},
        masks | {"b": masks["b"].view(-1)},
    ]
    assert len({digest(masks), *map(digest, others)}) == 1 + len(others)


def test_the_sum_of_positions_is_the_sum_of_its_pieces(small_chunks):
    mask = torch.rand(200) < 0.5
    in_pieces = position_sum(mask)
    whole = sum(position_sum(mask & (torch.arange(200) == place)) for place in range(200)) % (1 << 64)
    assert in_pieces == whole and 0 <= in_pieces < 1 << 64


def test_masks_given_are_packed_and_checked(masks, weights):
    packed = packed_masks(masks, weights)
    assert all(torch.equal(packed[name], bits.pack(mask)) for name, mask in masks.items())
    with pytest.raises(ValueError, match="'z'"):
        packed_masks({"z": masks["a"]}, weights)
    with pytest.raises(ValueError, match=r"\(5, 3\).*\(3, 5\)"):
        packed_masks({"a": masks["a"].T}, weights)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_restore_bits_survive_the_cast_to_the_weights_dtype(dtype):
    every_byte = torch.arange(256, dtype=torch.uint8)
    found = restore_bits("a", every_byte.to(dtype), torch.empty(2048))
    assert found.dtype == torch.uint8 and torch.equal(found, every_byte)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_saved_masks_of_the_weights_shape_are_packed(dtype, masks, weights):
    for name, mask in masks.items():
        assert torch.equal(restore_bits(name, mask.to(dtype), weights[name]), bits.pack(mask))


@pytest.mark.parametrize(
    "value", [None, 3, torch.zeros(1, dtype=torch.uint8), torch.full((5, 3), 0.5), [255, 127]], ids=str
)
def test_restore_bits_that_do_not_fit_are_refused_by_name(value):
    with pytest.raises(ValueError, match="layer"):
        restore_bits("layer", value, torch.empty(5, 3))
