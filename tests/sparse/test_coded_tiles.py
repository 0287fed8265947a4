"""Matrices in tiles of 4-bit codes: every code comes back, and products on a GPU are those of the codes."""

import pickle
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from causal_models import causal_model
from coded_weights import GRID, LEVELS, RAGGED, SHAPES, close, sparse
from torch import nn
from torch.nn.functional import linear

from prunus import load_model, save_model
from prunus.eligible import is_conv1d
from prunus.grids import OnGrid, check_on_grid, grid_of, on_grids, put_on_grid_, take_off_grid_
from prunus.ops.grid import Coded, Grid, coded, decoded
from prunus.sparse import Decoder, load_packed, sparsify_, unsparsify_
from prunus.sparse.coded_gaps import CodedGaps, coded_gaps_of, coded_gaps_of_dense
from prunus.sparse.coded_tiles import HEAD, CodedTiles, coded_tiles_of, coded_tiles_of_dense
from prunus.sparse.gaps import gaps_of_dense
from prunus.sparse.linear import FusedLinears, SparseLinear, can_join, form_in, replace_
from prunus.sparse.product import dense, form_of, product
from prunus.sparse.tiles import joined_tiles, tiles_of_dense
from prunus.sparse.times import kind_of, rounded_to_grid, scales_of_codes


def words(tiles, dtype=torch.int64):
    return torch.cat([tiles.data, tiles.data.new_zeros(16)]).view(torch.int32).to(dtype) & 0xFFFFFFFF


both = pytest.mark.parametrize("made", [coded_tiles_of, coded_gaps_of])
FROM_DENSE = {coded_tiles_of: coded_tiles_of_dense, coded_gaps_of: coded_gaps_of_dense}


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [*SHAPES, *RAGGED])
def test_every_code_and_scale_comes_back(shape, level, dtype, made):
    weight = sparse(shape, level)
    form, expected = made(weight, dtype), decoded(weight, dtype)
    form.check()
    assert form.dtype == dtype
    assert torch.equal(form.dense(), expected) and torch.equal(dense(form), expected)
    again = coded(expected, form.scales(), GRID)
    assert torch.equal(again.packed, weight.packed) and torch.equal(again.codes, weight.codes)
    from_dense = FROM_DENSE[made](expected, weight.scales)
    assert torch.equal(from_dense.data, form.data) and torch.equal(from_dense.starts, form.starts)


@pytest.mark.parametrize(
    ("made", "level", "most"),
    [
        (coded_tiles_of, 0.5, 3.18),
        (coded_tiles_of, 0.8, 1.98),
        (coded_gaps_of, 0.5, 5.2),
        (coded_gaps_of, 0.8, 2.8),
        (coded_gaps_of, 0.9, 2.1),
    ],
)
def test_it_takes_few_bytes(made, level, most):
    assert 8 * made(sparse((512, 4096), level), torch.bfloat16).nbytes <= most * 512 * 4096


@both
def test_joined_forms_are_the_matrices_one_below_the_other(made):
    weights = [sparse((rows, 300), 0.6) for rows in (32, 16, 64)]
    whole, views = joined_tiles([made(weight, torch.bfloat16) for weight in weights])
    whole.check()
    assert type(whole) is type(views[0])
    assert torch.equal(whole.dense(), torch.cat([decoded(weight, torch.bfloat16) for weight in weights]))
    for view, weight in zip(views, weights, strict=True):
        assert torch.equal(view.dense(), decoded(weight, torch.bfloat16))
        assert view.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()


@pytest.mark.parametrize("part", ["data", "starts", "dtype"])
def test_damaged_tiles_are_refused(part):
    tiles = coded_tiles_of(sparse((37, 200), 0.5), torch.bfloat16)
    if part == "data":
        tiles.data[:16] = 255  # bits for which there are no codes
    elif part == "starts":
        tiles.starts[1] += 20
    else:
        tiles = CodedTiles(tiles.data.view(torch.int16), tiles.starts, tiles.shape, tiles.dtype, tiles.stage)
    with pytest.raises(ValueError, match="do not fit together"):
        tiles.check()


@both
def test_a_form_is_known_by_its_parts(made):
    form = made(sparse((37, 200), 0.5), torch.bfloat16)
    other = form_of([form.data, form.starts], [37, 200], torch.float16, form.stage)
    assert type(other) is type(form) and other.shape == (37, 200)
    assert torch.equal(dense(other), dense(replace(form, dtype=torch.float16)))


@both
@pytest.mark.parametrize("num", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_on_a_cpu(dtype, num, made):
    weight = sparse((40, 200), 0.5)
    form, x, bias = made(weight, dtype), torch.randn(num, 200).to(dtype), torch.randn(40).to(dtype)
    expected = linear(x.float(), decoded(weight, dtype).float(), bias.float())
    assert torch.allclose(product(x, form, bias).float(), expected, rtol=0.02, atol=1e-3 * float(expected.abs().max()))


def permuted(a, b, selector):
    """PRMT of the low half of a selector without signs."""
    both = a | b << 32
    return sum(((both >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i for i in range(4))


def selector(nibble, places, low, high):
    chosen = 0
    for e in range(4):
        kept = nibble >> e & 1
        chosen |= ((places & 15 if kept else low) | high << 4) << 8 * e
        places >>= 4 * kept
    return chosen


# shifts, bits of a code, bits that are set, and the number in the middle
KINDS = {torch.bfloat16: (3, 1, 0x78787878, 0x80808080, 0x41BC), torch.float16: (4, 0, 0xF0F0F0F0, 0, 0x5478)}


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_the_lanes_of_the_kernel_find_each_code(level, dtype):
    """The kernel's arithmetic, lane by lane in int64: A's numbers minus the middle are the codes minus 7.5, or zero."""
    left, right, code_bits, set_bits, middle = KINDS[dtype]
    weight = sparse((16, 128), level)
    weight = Coded(weight.packed, weight.codes, torch.ones(16, 1), GRID, weight.shape)
    memory, numbers = words(coded_tiles_of(weight, dtype)), torch.zeros(16, 128)
    tables = [torch.tensor([selector(n, *of) for n in range(16)]) for of in ((0x0415, 2, 3), (0x7362, 0, 1))]
    lane = torch.arange(32)
    g, t, before = lane >> 2, lane & 3, torch.tensor(0)
    for half in range(2):
        own = memory[2 * lane + half]
        counts = torch.stack([sum(own >> 4 * i + e & 1 for e in range(4)) for i in range(8)])
        num = counts.sum(0)
        start = HEAD * 128 - 16 + 4 * (before + num.cumsum(0) - num)
        before = before + num.sum()
        for j in range(4):
            if j % 2 == 0:
                q = start + 4 * counts[: 2 * j + 1].sum(0)
                three = [memory[(q >> 5) + i] for i in range(3)]
                z, rest = (((a | b << 32) >> (q & 31)) & 0xFFFFFFFF for a, b in pairwise(three))
            else:
                z = ((z | rest << 32) >> 4 * (counts[2 * j - 1] + counts[2 * j])) & 0xFFFFFFFF
            even, odds = z << left & 0xFFFFFFFF, (z >> right & code_bits) | set_bits
            evens = [(even & code_bits & 0xFFFF) | (set_bits & 0xFFFF) | middle << 16]
            evens.append((even & code_bits & 0xFFFF0000) | (set_bits & 0xFFFF0000) | middle)
            for r in range(2):
                chosen = tables[r][own >> (8 * j + 4 * r) & 15]
                pairs = torch.stack([permuted(evens[r], odds, chosen), permuted(evens[r], odds, chosen >> 16)], 1)
                values = pairs.to(torch.int32).view(torch.int16).view(dtype).float()  # (lane, 4)
                column = 64 * half + 32 * (j >> 1) + 8 * t + 4 * (j & 1)
                numbers[(g + 8 * r)[:, None], column[:, None] + torch.arange(4)] = values
    exact = torch.tensor(middle, dtype=torch.int16).view(dtype).float()
    assert torch.equal(numbers - exact, decoded(weight, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8, 11, 16, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_on_a_gpu(dtype, num):
    for shape in [*SHAPES, (5000, 64), (48, 14336)]:
        for level in LEVELS:
            weight = sparse(shape, level, "cuda")
            tiles = coded_tiles_of(weight, dtype)
            assert torch.equal(dense(tiles), decoded(weight, dtype)), (shape, level)
            x = torch.randn(num, shape[1], device="cuda", dtype=dtype)
            for bias in (None, torch.randn(shape[0], device="cuda", dtype=dtype)):
                y = product(x, tiles, bias)
                assert y.shape == (num, shape[0]) and y.dtype == dtype
                assert close(y, x, weight, bias, torch.float64 if num <= 16 else dtype), (shape, level)


@pytest.mark.gpu
def test_a_row_without_weights_gives_exactly_the_bias():
    tiles = coded_tiles_of(sparse((64, 1024), 0.5, "cuda"), torch.bfloat16)
    x, bias = torch.randn(3, 1024, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    assert torch.equal(product(x, tiles, bias)[:, 32], bias[32].expand(3))


@pytest.mark.gpu
def test_float32_values_are_multiplied_by_a_dense_copy():
    weight = sparse((64, 256), 0.5, "cuda")
    tiles, x = coded_tiles_of(weight, torch.float32), torch.randn(2, 256, device="cuda")
    assert torch.equal(dense(tiles), decoded(weight, torch.float32))
    assert close(product(x, tiles), x, weight, None)


# Layers


def coded_layer(made, shape=(32, 200), level=0.5, dtype=torch.bfloat16, device="cpu"):
    weight = sparse(shape, level, device)
    return weight, SparseLinear(made(weight, dtype), torch.randn(shape[0]).to(device, dtype))


def on_grid_model(*shapes, level=0.6, dtype=torch.float32):
    """Linear layers whose weights are on grids."""
    layers = []
    for shape in shapes:
        weight, layer = sparse(shape, level), nn.Linear(shape[1], shape[0]).to(dtype).requires_grad_(False)
        layer.weight.copy_(decoded(weight, dtype))
        put_on_grid_(layer, "weight", OnGrid(GRID, weight.scales))
        layers.append(layer)
    return nn.Sequential(*layers)


@both
def test_a_layer_is_cast_and_keeps_its_codes(made):
    weight, layer = coded_layer(made)
    data = layer.form.data
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        layer = layer.to(dtype)
        assert layer.form.dtype == dtype and layer.form.data is data
        assert torch.equal(layer.weight, decoded(weight, dtype))
        assert layer(torch.randn(2, 200, dtype=dtype)).dtype == dtype
    assert "codes of 4 bits" in repr(layer)


@both
def test_a_layer_is_copied_saved_and_loaded_into_one_with_other_zeros(made, tmp_path):
    weight, layer = coded_layer(made)
    _, other = coded_layer(made, level=0.8)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = torch.randn(2, 200).bfloat16()
    for each in (other, deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each.weight, decoded(weight, torch.bfloat16)) and torch.equal(each(x), layer(x))


@both
def test_the_state_of_another_form_and_a_damaged_one_are_refused_and_nothing_is_lost(made):
    weight, layer = coded_layer(made)
    state, tiled = layer.state_dict(), SparseLinear(tiles_of_dense(decoded(weight, torch.bfloat16)), layer.bias)
    for target, given in (
        (layer, tiled.state_dict()),
        (tiled, state),
        (layer, state | {"data": state["data"].flip(0)}),
    ):
        with pytest.raises(ValueError, match=r"is stored as|do not fit together"):
            target.load_state_dict(given)
        assert torch.equal(target.weight, decoded(weight, torch.bfloat16))


@both
def test_gradients_reach_the_input(made):
    weight, layer = coded_layer(made, dtype=torch.float32)
    x = torch.randn(3, 200, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, decoded(weight, torch.float32).sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


@both
def test_layers_that_read_one_input_are_joined_and_go_where_they_go(made):
    pairs = [coded_layer(made, (rows, 200)) for rows in (32, 16, 48)]
    layers = [layer for _, layer in pairs]
    assert can_join(layers)
    group, x = FusedLinears(layers), torch.randn(2, 200).bfloat16()
    for dtype in (torch.bfloat16, torch.float16):
        nn.ModuleList(layers).to(dtype)
        assert type(group.form) is type(layers[0].form) and group.form.dtype == dtype
        for weight, layer in pairs:
            assert layer.fused is group
            expected = linear(x.to(dtype).float(), decoded(weight, dtype).float(), layer.bias.float())
            assert torch.allclose(
                layer(x.to(dtype)).float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max())
            )
    _, ragged = coded_layer(made, (37, 200))
    assert not can_join([layers[0], ragged]) and not can_join(
        [layers[0], SparseLinear(gaps_of_dense(layers[1].weight))]
    )


@pytest.mark.parametrize("change", [lambda model: model, deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("way", ["coded", "coded gaps", None])
def test_a_model_comes_back_on_its_grids(way, change):
    model = on_grid_model((24, 100), (16, 24))
    before, grids = {k: v.clone() for k, v in model.state_dict().items()}, on_grids(model)
    if way:
        for name in ("0", "1"):
            layer = model.get_submodule(name)
            replace_(model, name, form_in(way, layer.weight, grid_of(layer).scales))
    else:
        assert sparsify_(model, least=0.3) == ["0", "1"]
    model = change(model)
    assert unsparsify_(model) == ["0", "1"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, on_grid in on_grids(model).items():
        assert on_grid.grid == GRID
        check_on_grid(name, model.get_parameter(name), on_grid)
    assert on_grids(model).keys() == grids.keys()


def test_a_weight_that_left_its_grid_and_grids_that_tiles_do_not_hold_are_kept_as_values():
    weight = sparse((16, 300), 0.5)
    values, on_grid = decoded(weight, torch.bfloat16), OnGrid(GRID, weight.scales)
    assert torch.equal(scales_of_codes(values, on_grid), weight.scales)
    assert scales_of_codes(values * 1.1, on_grid) is None and scales_of_codes(values, None) is None
    for grid in (Grid(8), Grid(3), Grid(4, group=64)):
        assert scales_of_codes(values, OnGrid(grid, weight.scales)) is None
    assert kind_of(values, weight.scales).is_coded and not kind_of(values).is_coded
    assert str(kind_of(values, weight.scales)).endswith(" 4 bits")


def test_what_is_measured_is_on_a_grid():
    weight, scales = rounded_to_grid(torch.randn(5, 300).bfloat16().masked_fill_(torch.rand(5, 300) < 0.5, 0))
    assert bool(GRID.holds(weight, scales).all()) and scales.shape == (5, 3)


@pytest.mark.parametrize(("name", "bits"), [("LlamaForCausalLM", 4), ("LlamaForCausalLM", 8), ("GPT2LMHeadModel", 4)])
def test_a_file_of_codes_becomes_sparse_layers_that_give_the_same_model_back(tmp_path, name, bits):
    model = causal_model(name, sparsity=0.6)
    for layer in model.base_model.modules():
        if isinstance(layer, nn.Linear) or is_conv1d(layer):
            grid = Grid(bits, outputs=(1,) if is_conv1d(layer) else (0,))
            scales = torch.full(grid.scales_shape(layer.weight.shape), 0.02).bfloat16()
            values = grid.values(grid.codes(layer.weight, scales), scales, layer.weight.dtype) * (layer.weight != 0)
            layer.weight.data.copy_(values)
            put_on_grid_(layer, "weight", OnGrid(grid, scales))
    save_model(model, tmp_path / "small")
    packed = load_packed(tmp_path / "small", least=0.3)
    assert any(isinstance(layer, SparseLinear) for layer in packed.modules())
    ids = torch.randint(3, 64, (1, 5))
    assert torch.allclose(packed(ids).logits, model(ids).logits, atol=1e-4)
    for layer in [name for name, layer in packed.named_modules() if isinstance(layer, SparseLinear)]:
        linear, _ = packed.get_submodule(layer).origin
        on_grid, weight = grid_of(linear), packed.get_submodule(layer).weight
        if bits == 4 and on_grid is not None:  # as on a GPU
            way = "coded" if "q_proj" in layer else "coded gaps"
            packed.get_submodule(layer)._set(form_in(way, weight, scales_of_codes(weight, on_grid)))
            take_off_grid_(linear, "weight")
    assert torch.allclose(packed(ids).logits, model(ids).logits, atol=1e-4)
    unsparsify_(packed)
    state = packed.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {key: on_grid.grid for key, on_grid in on_grids(packed).items()} == {
        key: on_grid.grid for key, on_grid in on_grids(model).items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("compile", "vectors"), [(False, 1), (True, 1), (True, 2)])
def test_the_decoder_writes_with_codes(tmp_path, compile, vectors):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = causal_model("LlamaForCausalLM", sparsity=0.6, **sizes).to("cuda", torch.bfloat16)
    model.lm_head.weight.data.add_(0.01)  # it has no zeros
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            weight, scales = rounded_to_grid(layer.weight.data)
            layer.weight.data.copy_(weight)
            put_on_grid_(layer, "weight", OnGrid(GRID, scales))
    save_model(model, tmp_path / "small")
    ids = torch.randint(3, 64, (2, 7), device="cuda")
    logits = model(ids).logits.float()
    names = sparsify_(model, vectors=vectors, least=0.3)
    forms = [model.get_submodule(name).form for name in names]
    kind = CodedGaps if vectors == 1 else CodedTiles
    assert forms and all(isinstance(form, kind) for form in forms)
    assert model.get_submodule(names[0]).fused is not None
    assert (model(ids).logits.float() - logits).norm() < 0.05 * logits.norm()
    decoder = Decoder(model, compile=compile)
    texts = [decoder.generate(ids, max_new_tokens=20, eos_token_id=-1) for _ in range(2)]
    assert torch.equal(*texts) and torch.equal(texts[0][:, :7], ids)
    assert torch.equal(texts[0][:, 7], model(ids).logits[:, -1].argmax(-1))
    packed = partial(load_packed, vectors=vectors, least=0.3)
    dense, other = (load(tmp_path / "small", "cuda") for load in (load_model, packed))
    assert isinstance(other.get_submodule(names[0]).form, kind)
    assert (other(ids).logits - dense(ids).logits).float().norm() < 0.05 * logits.norm()
    unsparsify_(model)
    assert torch.equal(model(ids).logits.float(), logits) and len(on_grids(model)) == len(names)


@pytest.mark.gpu
@both
def test_compiled_a_layer_is_one_graph(made):
    _, layer = coded_layer(made, (64, 256), device="cuda")
    x = torch.randn(3, 256, device="cuda").bfloat16()
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
