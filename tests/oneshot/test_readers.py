"""Transposed convolutions and the projections of attention are repaired by what they multiply."""

from copy import deepcopy
from functools import partial
from itertools import product

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, snapshot, zeros
from probe_models import CASES
from torch import nn

from prunus import Global, NofM, PerLayer, PerRow, Repair, prune
from prunus.eligible import eligible
from prunus.oneshot.gram import Gram
from prunus.oneshot.layers import Reader, matrix_layout, readers
from prunus.ops.lazy import as_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class UNet(nn.Module):
    """Down and up again over odd sizes, by convolutions, batch norms and transposed convolutions."""

    def __init__(self, groups=1):
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm, self.up_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, groups=groups)
        self.smooth = nn.ConvTranspose2d(8, 4, (1, 3), padding=(0, 2), dilation=2, bias=False)
        self.out = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        skip = torch.relu(self.enter(x))
        low = torch.relu(self.norm(self.down(skip)))
        high = torch.relu(self.up_norm(self.up(low, output_size=skip.shape)))
        return self.out(torch.tanh(self.smooth(torch.cat([high, skip], 1))))


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, whose layers torch would run by one fused function."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.embed, self.batch_first = nn.Embedding(31, 16), batch_first
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        ignored = None if attention_mask is None else attention_mask == 0
        if self.batch_first:
            return self.encoder(x, src_key_padding_mask=ignored)
        return self.encoder(x.transpose(0, 1), src_key_padding_mask=ignored).transpose(0, 1)


class Decoder(nn.Module):
    """Self-attention, then attention to a memory of another width, and layers of ``nn.TransformerDecoder``."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.widen = nn.Linear(8, 16)
        self.cross = nn.MultiheadAttention(16, 4, kdim=8, vdim=12, batch_first=True)
        self.values = nn.Linear(8, 12)

    def forward(self, target, memory):
        y = self.decoder(target, self.widen(memory))
        return self.cross(query=y, value=self.values(memory), key=memory)[0]


def unet(dtype=torch.float32, groups=1):
    torch.manual_seed(0)
    model = UNet(groups).to(dtype)
    for _ in range(3):  # statistics that are not those of a fresh norm
        model(torch.randn(8, 2, 7, 5, dtype=dtype) + 1)
    return model, [torch.randn(n, 2, 7, 5, dtype=dtype) for n in (4, 7)]


def encoder(dtype=torch.float32, batch_first=True, padding=0):
    torch.manual_seed(1)
    model = Encoder(batch_first).to(dtype)
    lengths = torch.tensor([6, 3, 6, 1, 5, 6, 2, 6]).unsqueeze(1)
    mask = torch.arange(6).expand(8, 6) < lengths
    tokens = torch.where(mask, torch.randint(0, 31, (8, 6)), padding)
    return model, [{"input_ids": tokens, "attention_mask": mask.long()}]


def decoder(dtype=torch.float32):
    torch.manual_seed(2)
    model = Decoder().to(dtype)
    return model, [{"target": torch.randn(6, 5, 16, dtype=dtype), "memory": torch.randn(6, 9, 8, dtype=dtype)}]


MODELS = {
    "unet": unet,
    "grouped unet": partial(unet, groups=2),
    "encoder": encoder,
    "tokens first": partial(encoder, batch_first=False),
    "decoder": decoder,
}


def plain(make, dtype=torch.float32):
    case = make(dtype)
    return case.model, case.batches


ALL = MODELS | {name: partial(plain, make) for name, make in CASES.items()}


def include_of(make):
    return "*proj_weight" if make in ("encoder", "tokens first", "decoder") else ()


def repaired(make, dtype=torch.float32, **options):
    model, batches = ALL[make](dtype)
    before, dense = snapshot(model), deepcopy(model)
    result = prune(model, batches, **{"sparsity": 0.5, "include": include_of(make)} | options)
    return model, result, before, dense


@pytest.fixture
def unfused():
    """Encoder layers of torch call their parts."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fused)


def transposed_rows(conv, x, sizes):
    """For each place of the output the inputs that each element of the kernel meets, by the definition."""
    num_dims, rows = len(conv.kernel_size), []
    for sample, *place in product(range(len(x)), *map(range, sizes)):
        row = x.new_zeros(x.shape[1], *conv.kernel_size)
        for tap in product(*map(range, conv.kernel_size)):
            at = [place[i] + conv.padding[i] - tap[i] * conv.dilation[i] for i in range(num_dims)]
            at = [a / stride for a, stride in zip(at, conv.stride, strict=True)]
            if all(a == int(a) and 0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)):
                row[(slice(None), *tap)] = x[(sample, slice(None), *map(int, at))]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("kind", "options", "size"),
    [
        (nn.ConvTranspose1d, {}, None),
        (nn.ConvTranspose1d, {"stride": 3, "padding": 4, "output_padding": 2, "groups": 2}, None),
        (nn.ConvTranspose2d, {"stride": 2, "padding": 1, "output_padding": (1, 0), "groups": 4}, None),
        (nn.ConvTranspose2d, {"stride": (1, 2), "kernel_size": (1, 3), "dilation": 2}, None),
        (nn.ConvTranspose2d, {"stride": 2, "padding": 1}, (8, 5)),
        (nn.ConvTranspose3d, {"stride": (2, 1, 3), "kernel_size": (1, 2, 3), "padding": (0, 1, 1)}, None),
    ],
    ids=str,
)
def test_the_gram_of_a_transposed_convolution_is_that_of_a_plain_loop(kind, options, size):
    torch.manual_seed(0)
    conv = kind(4, 8, **{"kernel_size": 3, "bias": False} | options).double()
    x = torch.randn(2, 4, *(4, 3, 2)[: len(conv.kernel_size)], dtype=torch.float64)
    seen = []
    with Reader(conv).seen_by(lambda reader, inputs: seen.append(reader.rows(*inputs))):
        y = conv(x, size)
    (rows,) = seen
    weight = conv.weight.detach().unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(2)
    for i, (plain, out) in enumerate(zip(transposed_rows(conv, x, y.shape[2:]).chunk(conv.groups, 1),
                                         y.chunk(conv.groups, 1), strict=True)):  # fmt: skip
        plain = plain.flatten(1)
        torch.testing.assert_close(plain @ weight[i].T, out.transpose(0, 1).flatten(1).T.detach())
        gram = Gram()
        gram.add(rows[i])
        assert gram.num_tokens == len(plain)
        torch.testing.assert_close(gram.moments().gram, plain.T @ plain)


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), (7,)),
        (nn.Conv2d(4, 6, (2, 3), padding="same", padding_mode="circular", dilation=2, bias=False), (5, 6)),
        (nn.Conv3d(4, 6, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 2), groups=2, bias=False), (3, 4, 5)),
    ],
    ids=str,
)
def test_rows_times_the_weight_are_the_outputs_of_a_convolution(conv, size):
    torch.manual_seed(0)
    x = torch.randn(3, 4, *size)
    parts = zip(Reader(conv).rows(x), conv.weight.flatten(1).chunk(conv.groups), strict=True)
    found = torch.cat([rows @ weight.T for rows, weight in parts], -1)
    torch.testing.assert_close(found.transpose(1, 2), conv(x).flatten(2))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [7, 3])  # as many tokens as samples
def test_projections_of_an_attention_are_seen_with_samples_first(batch_first, length):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=batch_first).double()
    q, k, v = (torch.randn(3, n, width, dtype=torch.float64) for n, width in ((length, 8), (5, 6), (5, 4)))
    ignored = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [2], [3]])
    seen, given = {}, [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]
    weights = eligible(nn.ModuleDict({"a": attention}), "*proj_weight").weights
    for name, (reader,) in readers(nn.ModuleDict({"a": attention}), weights).items():
        with reader.seen_by(lambda _, inputs, name=name: seen.update({name.removeprefix("a."): inputs})):
            attention(*given, key_padding_mask=ignored)
    assert [*seen] == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    heads = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        mine = [
            x @ getattr(attention, f"{name}_proj_weight")[part].T + bias[part]
            for x, name, bias in zip((q, k, v), "qkv", attention.in_proj_bias.chunk(3), strict=True)
        ]
        scores = (mine[0] @ mine[1].transpose(1, 2) / 2).masked_fill(ignored.unsqueeze(1), -torch.inf)
        heads.append(scores.softmax(-1) @ mine[2])
    for (x,), expected in zip(seen.values(), (q, k, v, torch.cat(heads, -1)), strict=True):
        torch.testing.assert_close(x, expected.detach())


@pytest.mark.parametrize(
    ("make", "select", "dtype", "is_scored"),
    each_once(ALL, [PerLayer(), Global(), PerLayer("erk"), NofM(2, 4), PerRow()], DTYPES, [False, True], one_of=9),
    ids=str,
)
def test_every_layer_is_repaired_with_exact_counts_and_no_larger_error(make, select, dtype, is_scored):
    if make == "grouped unet" and isinstance(select, PerRow | NofM):
        pytest.skip("a grouped transposed convolution has no rows")
    if make in ("mlp", "cnn") and isinstance(select, NofM):
        pytest.skip("rows are not of fours")
    options = {"exclude": "enter"} if isinstance(select, NofM) and "unet" in make else {}
    score = ("magnitude" if make in MODELS else "wanda") if is_scored else None
    model, result, _, dense = repaired(make, dtype, select=select, score=score, **options)
    alone = prune(dense, sparsity=0.5, select=select, include=include_of(make), **options)
    assert result.num_pruned == alone.num_pruned == sum(zeros(model, result.masks).values())
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    for layer, other in zip(result.layers, alone.layers, strict=True):
        weight = model.get_parameter(layer.name)
        assert layer.not_repaired is None and layer.error <= layer.mask_error
        assert not weight[weight == 0].signbit().any()  # -0.0 is a value in a small file
        outputs = result.level.weights[layer.name].outputs
        kept = [as_rows(mask, outputs or ()) for mask in (result.masks[layer.name], alone.masks[layer.name])]
        if isinstance(select, PerRow):
            assert torch.equal(*(rows.sum(1) for rows in kept))
        if isinstance(select, NofM):
            assert (kept[0].unflatten(1, (-1, 4)).sum(2) == 2).all()
        if not isinstance(select, Global):
            assert layer.num_pruned == other.num_pruned


@torch.no_grad()
def outputs_of(model, name, weights, batches):
    """What each part of a weight gives in whole passes: (tokens that count, outputs)."""
    (weight,), parts = [weight for weight in weights if weight.name == name], []
    shape, outputs = matrix_layout(weight)
    matrix = as_rows(model.get_parameter(name).reshape(shape), outputs)
    (reader,) = readers(model, [weight])[name]

    def multiply(reader, inputs):
        rows = [x for given in inputs for x in reader.rows(given)]
        parts.append([x @ w.T for x, w in zip(rows, matrix.chunk(len(rows)), strict=True)])

    counted = []
    with reader.seen_by(multiply):
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
            mask = batch.get("attention_mask") if isinstance(batch, dict) else None
            here = [
                x if mask is None else x.transpose(0, int(x.shape[:2] != mask.shape))[mask.bool()] for x in parts.pop()
            ]
            counted += [x.reshape(-1, x.shape[-1]) for x in here]
    return counted


@pytest.mark.parametrize("make", MODELS)
def test_the_error_of_each_layer_is_that_of_its_outputs_in_the_whole_model(make, unfused):
    model, result, _, dense = repaired(make, torch.float64, repair=Repair(batch_norm=False), batch_size=3)
    _, batches = MODELS[make](torch.float64)
    both = [(each.eval(), eligible(each, include_of(make)).weights) for each in (model, dense)]
    for layer in result.layers:
        found, expected = (outputs_of(each, layer.name, weights, batches) for each, weights in both)
        lost = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True))
        assert layer.error == pytest.approx((lost / sum(x.square().sum() for x in expected)).item(), rel=1e-6)


@pytest.mark.parametrize("make", ALL)
def test_a_layer_with_nothing_to_prune_and_an_undone_model_are_the_same_bit_for_bit(make):
    model, result, before, _ = repaired(make)
    assert all(layer.error < layer.mask_error for layer in result.layers)
    result.undo_()
    assert_same(before, snapshot(model))
    model, _, before, _ = repaired(make, sparsity=0.0)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("num_samples", [8, 6])  # 6: as many as tokens
def test_padded_tokens_change_nothing(batch_first, num_samples):
    found = []
    for padding in (0, 7):
        model, (batch,) = encoder(torch.float64, batch_first, padding)
        batch = {key: value[:num_samples] for key, value in batch.items()}
        prune(model, [batch], 0.5, include="*proj_weight", batch_size=num_samples)
        found.append([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("select", "options"),
    each_once([PerRow(), NofM(2, 4)], [{}, {"score": "wanda"}, {"score": "magnitude", "repair": None}]),
    ids=str,
)
def test_rows_of_a_grouped_transposed_convolution_are_refused_before_calibration(select, options):
    model, batches = unet(groups=2)
    before, passes = snapshot(model), []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=r"^up\.weight has no rows: .*select by layer or globally$"):
        prune(model, batches, select=select, exclude="enter", **options)
    handle.remove()
    assert_same(before, snapshot(model))
    assert len(passes) <= 1  # of the first sample, which is tried before anything else


@pytest.mark.gpu
@pytest.mark.parametrize("make", MODELS)
def test_errors_of_layers_on_a_gpu_are_those_on_the_cpu(make):
    _, here, _, _ = repaired(make)
    model, batches = MODELS[make](torch.float32)
    there = prune(model.cuda(), batches, 0.5, include=include_of(make))
    for a, b in zip(here.layers, there.layers, strict=True):
        assert a.error == pytest.approx(b.error, rel=0.1)  # supports differ a little, more so layer by layer


@pytest.mark.parametrize("make", ["encoder", "tokens first", "decoder"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_attention_is_repaired_where_blocks_are_moved_one_at_a_time(make, device):
    (model, result, _, _), (whole, _, _, _) = repaired(make, offload=device), repaired(make)
    assert all(layer.not_repaired is None and layer.error <= layer.mask_error for layer in result.layers)
    for a, b in zip(model.parameters(), whole.parameters() if device == "cpu" else (), strict=device == "cpu"):
        torch.testing.assert_close(a, b)
