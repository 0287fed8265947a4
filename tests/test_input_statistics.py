"""Input norms are those of what the layers see, once for every forward pass."""

import pytest
import torch
from torch import nn
from toys import Conv1D

from prunus import prune
from prunus.eligible import eligible
from prunus.input_statistics import InputNorms


def norms_of(layer, *inputs):
    weights = eligible(nn.Sequential(layer)).weights
    with InputNorms(weights) as collected:
        for x in inputs:
            layer(x)
    return collected.norms()["0.weight"]


def unfolded_norms(conv, x):
    """L2 norm over all windows of what each element of the kernel sees, for each output channel."""
    padding = conv.padding if isinstance(conv.padding, tuple) else (0, 0)
    windows = nn.functional.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
    norms = windows.square().sum((0, 2)).sqrt().view(x.shape[1], *conv.kernel_size)
    groups = norms.view(conv.groups, -1, *conv.kernel_size)
    return groups.repeat_interleave(conv.out_channels // conv.groups, 0)


@pytest.mark.parametrize("shape", [(9, 6), (4, 5, 6), (2, 3, 4, 6), (6,), (0, 6)], ids=str)
def test_norms_of_a_linear_layer_run_over_all_but_the_last_dimension(shape):
    x = torch.randn(shape)
    assert torch.allclose(norms_of(nn.Linear(6, 3), x), x.reshape(-1, 6).norm(dim=0), atol=1e-6)


def test_norms_of_conv1d_broadcast_along_its_outputs():
    x, layer = torch.randn(4, 5, 6), Conv1D(3, 6)
    norms = norms_of(layer, x)
    assert norms.shape == (6, 1) and torch.allclose(norms[:, 0], x.reshape(-1, 6).norm(dim=0))
    assert norms.expand(layer.weight.shape).shape == (6, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"padding": 1},
        {"padding": (2, 0), "stride": (1, 3)},
        {"dilation": 2},
        {"groups": 2},
        {"groups": 4},
        {"kernel_size": (1, 4)},
        {"kernel_size": 1},
        {"stride": 3, "padding": 2, "dilation": (2, 1), "groups": 2},
    ],
    ids=str,
)
def test_norms_of_a_convolution_are_those_of_its_windows(options):
    conv, x = nn.Conv2d(4, 8, **{"kernel_size": 3} | options), torch.randn(3, 4, 11, 12)
    norms = norms_of(conv, x).expand(conv.weight.shape)
    assert torch.allclose(norms, unfolded_norms(conv, x).expand(conv.weight.shape), rtol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_norms_follow_the_padding_mode_and_padding_by_name(mode):
    conv, x = nn.Conv2d(2, 3, 3, padding="same", padding_mode=mode), torch.randn(2, 2, 6, 7)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="constant" if mode == "zeros" else mode)
    plain = nn.Conv2d(2, 3, 3)
    assert torch.allclose(norms_of(conv, x), unfolded_norms(plain, padded)[0], rtol=1e-5)


def test_norms_of_one_and_three_dimensional_convolutions():
    line, x = nn.Conv1d(2, 3, 4, stride=2, padding=1), torch.randn(5, 2, 13)
    flat = nn.Conv2d(2, 3, (1, 4), stride=(1, 2), padding=(0, 1))
    assert torch.allclose(norms_of(line, x), unfolded_norms(flat, x.unsqueeze(2))[0].squeeze(1), rtol=1e-5)
    assert torch.allclose(norms_of(line, x[0]), norms_of(line, x[:1]))

    solid, y = nn.Conv3d(2, 3, 2), torch.randn(2, 2, 3, 4, 5)
    windows = y.unfold(2, 2, 1).unfold(3, 2, 1).unfold(4, 2, 1)
    assert torch.allclose(norms_of(solid, y), windows.square().sum((0, 2, 3, 4)).sqrt(), rtol=1e-5)


def test_norms_of_a_transposed_convolution_are_those_of_its_channels():
    layer, x = nn.ConvTranspose2d(3, 5, 2), torch.randn(4, 3, 6, 6)
    norms = norms_of(layer, x).expand(layer.weight.shape)
    assert torch.allclose(norms[:, 2, 1, 0], x.transpose(0, 1).flatten(1).norm(dim=1), rtol=1e-5)


def test_several_forward_passes_add_up_and_half_precision_is_summed_in_float32():
    x = torch.randn(40, 6)
    together = norms_of(nn.Linear(6, 3), x)
    assert torch.allclose(norms_of(nn.Linear(6, 3), x[:7], x[7:]), together, rtol=1e-6)
    half = norms_of(nn.Linear(6, 3).bfloat16(), x.bfloat16())
    assert half.dtype == torch.float32 and torch.allclose(half, together, rtol=1e-2)


@pytest.mark.parametrize(("layer", "key"), [(nn.Linear(6, 3), "input"), (Conv1D(3, 6), "x")], ids=["linear", "Conv1D"])
def test_an_input_may_be_given_by_name(layer, key):
    x = torch.randn(4, 6)
    with InputNorms(eligible(nn.Sequential(layer)).weights) as collected:
        layer(**{key: x})
    assert torch.equal(collected.norms()["0.weight"], norms_of(layer, x))


def test_collecting_stops_with_the_context_and_begins_anew_with_the_next():
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    inputs = InputNorms(eligible(nn.Sequential(layer)).weights)
    for _ in range(2):
        with inputs:
            layer(x)
        layer(x * 100)
        assert torch.allclose(inputs.norms()["0.weight"], x.norm(dim=0))


def test_opening_twice_counts_once_and_closes_for_good():
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    inputs = InputNorms(eligible(nn.Sequential(layer)).weights)
    inputs.__enter__()
    inputs.__enter__()
    layer(x)
    inputs.__exit__(None, None, None)
    layer(x)
    assert torch.allclose(inputs.norms()["0.weight"], x.norm(dim=0))


class Experts(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn((2, 6, 6)[-rank:])) for _ in range(2))

    def forward(self, x):
        return x @ self.up @ self.down


@pytest.mark.parametrize(
    ("part", "pattern"),
    [
        (nn.Embedding(9, 6), "1.weight"),
        (nn.MultiheadAttention(6, 2), "1.in_proj_weight"),
        (Experts(2), "1.*"),
        (Experts(3), "1.*"),
    ],
    ids=["embedding", "attention", "matrices", "experts"],
)
def test_a_weight_that_may_see_other_inputs_than_its_module_is_refused_by_name(part, pattern):
    model = nn.Sequential(nn.Linear(6, 6), part)
    with pytest.raises(ValueError, match=f"1.*{type(part).__name__}") as error:
        InputNorms(eligible(model, pattern, "1.out_proj.weight" if "proj" in pattern else ()).weights)
    with pytest.raises(ValueError, match=r"inputs of linear layers"):
        prune(model, [torch.randn(2, 6)], 0.5, score="wanda", include=pattern)
    assert "\n" not in str(error.value)


class OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return x @ self.weight.T


def test_a_linear_layer_of_ones_own_has_norms():
    model, x = nn.Sequential(OwnLinear()), torch.randn(4, 6)
    with InputNorms(eligible(model, "0.weight").weights) as collected:
        model(x)
    assert torch.allclose(collected.norms()["0.weight"], x.norm(dim=0))


class Attention(nn.Module):
    """Self-attention of torch, which reads its output projection without calling it, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.after = nn.Linear(8, 4)

    def forward(self, x):
        return self.after(self.attention(x, x, x, need_weights=False)[0])


def test_norms_of_an_output_projection_that_is_not_called_are_those_of_its_inputs():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(3, 5, 8)
    linear = nn.functional.linear
    with InputNorms(eligible(model).weights) as collected:
        model(x)
        found = collected.norms()["attention.out_proj.weight"]
        with InputNorms(eligible(model).weights) as other:
            model(x)
        assert torch.equal(other.norms()["attention.out_proj.weight"], found)
    assert nn.functional.linear is linear
    with torch.no_grad():
        model.attention.out_proj.weight.copy_(torch.eye(8))
        model.attention.out_proj.bias.zero_()
        inputs = model.attention(x, x, x)[0]
    assert torch.allclose(found, inputs.flatten(0, 1).norm(dim=0), rtol=1e-5)


class CallsProjection(nn.MultiheadAttention):
    def forward(self, x, *_, **__):
        return self.out_proj(x), None


def test_norms_of_an_output_projection_are_seen_in_a_forward_that_calls_it():
    model, x = Attention(), torch.randn(3, 5, 8)
    model.attention = CallsProjection(8, 2, batch_first=True)
    with InputNorms(eligible(model, only="*out_proj*").weights) as collected:
        model(x)
    torch.testing.assert_close(collected.norms()["attention.out_proj.weight"], x.flatten(0, 1).norm(dim=0))


def test_an_interrupted_attention_leaves_no_mode_open(monkeypatch):
    model, x = Attention(), torch.randn(3, 5, 8)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with InputNorms(eligible(model).weights):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(nn.functional, "_in_projection_packed", interrupt)
            model(x)
        model(x)
        assert torch._C._len_torch_function_stack() == 0
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(nn.functional, "_in_projection_packed", interrupt)
            model(x)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize(("batch_first", "length"), [(True, 5), (False, 5), (True, 3)])  # 3: as many as samples
def test_masked_tokens_have_no_part_in_the_norms_of_an_attention_and_the_layer_behind_it(batch_first, length):
    torch.manual_seed(0)
    model, tokens = Attention(), torch.randn(3, length, 8)
    model.attention.batch_first = batch_first
    mask = torch.arange(length) < torch.tensor([[5], [2], [1]])
    found = []
    for x in (tokens, torch.where(mask.unsqueeze(2), tokens, 100.0)):
        with InputNorms(eligible(model).weights, mode="eval", mask=mask) as collected:
            given = x if batch_first else x.transpose(0, 1)
            model.after(model.attention(given, given, given, key_padding_mask=~mask)[0])
        found.append(collected.norms())
    assert len(found[0]) == 2 and all(torch.allclose(norms, found[1][name]) for name, norms in found[0].items())


def test_norms_of_two_layers_that_share_a_weight_are_those_of_all_their_inputs():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    x, seen = torch.randn(9, 6), []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with InputNorms(eligible(model).weights) as collected:
        model(x)
    expected = torch.cat([x, *seen]).norm(dim=0)
    assert torch.allclose(collected.norms()["0.weight"], expected) and expected.gt(x.norm(dim=0)).all()
    by_hand = (model[0].weight.abs() * expected).argsort(1)[:, :3]
    prune(model, [x], 0.5, score="wanda", repair=None)
    assert all(not model[0].weight[row, columns].any() for row, columns in enumerate(by_hand))


class Bypassing(nn.Module):
    """A layer whose weight is multiplied by hand, as Mamba does, and one that nothing uses."""

    def __init__(self, spare=False) -> None:
        super().__init__()
        self.first, self.by_hand, self.also = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        if spare:
            self.spare, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return (self.by_hand.weight @ self.first(x).T + self.also.weight.view(6, 6) @ x.T).T


def test_weights_whose_inputs_are_not_seen_are_named_and_pruned_by_themselves():
    torch.manual_seed(0)
    model, x = Bypassing(), torch.randn(9, 6)
    smallest = model.by_hand.weight.abs().argsort(1)[:, :3]
    with pytest.warns(UserWarning, match=r"by_hand\.weight, also\.weight.*by their weights alone"):
        result = prune(model, [x], 0.5, score="wanda", repair=None)
    assert result.sparsity == 0.5
    assert all(not model.by_hand.weight[row, columns].any() for row, columns in enumerate(smallest))


def test_weights_that_no_sample_reaches_are_named_all_at_once():
    with pytest.raises(ValueError, match=r"spare\.weight, unused\.weight: modules that were not called"):
        prune(Bypassing(spare=True), [torch.randn(9, 6)], 0.5, score="wanda", repair=None)
    model = Bypassing(spare=True)
    with InputNorms(eligible(model).weights) as collected:
        model(torch.randn(9, 6))
    with pytest.raises(ValueError, match=r"by_hand\.weight, also\.weight, spare\.weight, unused\.weight.*exclude"):
        collected.norms()
