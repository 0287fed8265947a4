"""A sparse layer is the layer it was made from, wherever it goes; only those are replaced that it is for."""

import copy
from itertools import product as product_of

import pytest
import torch
from covering import quickly
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import Conv1D

from prunus.sparse import linear as layers
from prunus.sparse.advise import advise
from prunus.sparse.gaps import gaps_of_dense
from prunus.sparse.linear import SparseLinear, sparsify_, unsparsify_
from prunus.sparse.product import MOST_CPU, check_device, csr_of, operator, product
from prunus.sparse.semi_structured import is_two_of_four, semi_structured_
from prunus.sparse.tiles import tiles_of_dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def linear(outputs=24, inputs=100, sparsity=0.6, dtype=torch.float32, bias=True):
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=DEVICE).requires_grad_(False)
    layer.weight[torch.rand(outputs, inputs, device=DEVICE) < sparsity] = 0
    return layer


def near(first, second):
    return torch.allclose(first.double(), second.double(), atol=1e-5 if first.dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(100,), (1, 100), (2, 3, 100), (0, 100), (50, 100)], ids=str)
def test_it_computes_what_the_dense_layer_does(shape, bias, dtype):
    layer = linear(bias=bias, dtype=dtype)
    sparse, x = SparseLinear.from_linear(layer), torch.randn(shape, device=DEVICE).to(dtype)

    y = sparse(x)
    assert y.shape == (*shape[:-1], 24) and y.dtype == dtype
    assert near(y, layer(x))
    assert torch.equal(sparse.weight, layer.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [DEVICE, "meta"])
def test_a_state_dict_that_is_assigned_is_what_it_computes_with(dtype, device):
    first, second = (SparseLinear.from_linear(linear(dtype=kind)) for kind in (dtype, torch.float32))
    second.to(device).load_state_dict(first.state_dict(), assign=True)
    x = torch.randn(3, 100, device=DEVICE, dtype=dtype)

    assert torch.equal(second.weight, first.weight)
    assert torch.equal(second(x), first(x))
    assert second.form.values is second.values
    assert second.like.dtype == dtype


@pytest.mark.parametrize("name", ["values", "codes", "heads", "rows"])
def test_a_damaged_state_dict_is_refused_and_nothing_is_lost(name):
    layer = SparseLinear.from_linear(linear())
    before, state = layer.weight, dict(layer.state_dict())
    state[name] = state[name][:-1]
    with pytest.raises(ValueError, match="save it again"):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before)


def test_it_can_be_copied_cast_and_saved_and_loads_into_a_layer_with_other_zeros(tmp_path):
    layer, other = SparseLinear.from_linear(linear()), SparseLinear.from_linear(linear(sparsity=0.9))
    assert set(layer.state_dict()) == {"values", "codes", "heads", "rows", "bias"}
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    for loaded in (other, copy.deepcopy(layer)):
        loaded.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
        assert torch.equal(loaded.weight, layer.weight) and torch.equal(loaded.bias, layer.bias)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(half.weight, layer.weight.bfloat16())
    assert half.codes.dtype == torch.uint8 and half.rows.dtype == torch.int32


def test_gradients_reach_the_input_and_autocast_is_followed():
    layer, x = linear(), torch.randn(2, 100, device=DEVICE, requires_grad=True)
    sparse = SparseLinear.from_linear(layer)
    sparse(x).sum().backward()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.allclose(x.grad, expected, atol=1e-5)
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        assert sparse(x).dtype == layer(x).dtype == torch.bfloat16


def tiled():
    return SparseLinear(tiles_of_dense(linear(32, 48, dtype=torch.bfloat16).weight))


PATHS = {
    "gaps": lambda: SparseLinear.from_linear(linear(32, 48)),
    "tiles": tiled,
    "group": lambda: attention()[0].v_proj,
    "operator": lambda: lambda x: operator(x, gaps_of_dense(linear(32, 48).weight), None),
}
WRONG_SHAPES = [(), (0,), (1,), (47,), (49,), (96,), (2, 24), (4, 49), (3, 48, 1), (20, 47), (0, 7)]
WRONG_TYPES = [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("path", PATHS)
def test_an_input_of_another_width_or_type_is_refused_in_one_line_and_floating_ones_keep_their_type(path):
    layer = PATHS[path]()
    for shape, grad in product_of(WRONG_SHAPES, (False, True)):
        x = torch.randn(shape, device=DEVICE, requires_grad=grad)
        with pytest.raises(ValueError, match=r"of 48 inputs takes a tensor \(\.\.\., 48\), got \(.*\)$"):
            layer(x)
    for dtype, num, enabled in product_of(WRONG_TYPES, (1, 20), (False, True)):
        x = torch.ones(num, 48, device=DEVICE).to(dtype)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled), pytest.raises(ValueError, match=r"x\.float"):
            layer(x)
    for dtype, num in product_of(TYPES, (1, 3, 20)):  # what was refused leaves nothing behind
        y = layer(torch.randn(num, 48, device=DEVICE).to(dtype))
        assert y.dtype == dtype and y.shape[:-1] == (num,)


def test_an_input_on_another_device_is_refused_in_one_line():
    layer = SparseLinear.from_linear(linear()).to("meta")
    with pytest.raises(ValueError, match=rf"on meta got a tensor on {DEVICE}.*; move one"):
        layer(torch.randn(2, 100, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("num", [1, 3, 20])
@pytest.mark.parametrize("path", PATHS)
def test_on_a_gpu_an_input_in_main_memory_is_refused_and_the_other_way_round(path, num):
    layer = PATHS[path]()
    with pytest.raises(ValueError, match="on cuda:0 got a tensor on cpu"):
        layer(torch.randn(num, 48))
    if isinstance(layer, SparseLinear):
        with pytest.raises(ValueError, match="on cpu got a tensor on cuda:0"):
            layer.cpu()(torch.randn(num, 48, device="cuda"))


@pytest.mark.parametrize("make", [PATHS["gaps"], tiled, lambda: attention()[0]], ids=["gaps", "tiles", "group"])
def test_compiled_a_wrong_input_is_named_and_a_right_one_is_one_graph(make):
    layer, counter = make(), CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num in (40, 3, 20, 5):
            compiled(torch.randn(num, 48, device=DEVICE))
        assert counter.frame_count == 1
        for x, match in ((torch.randn(2, 24), "of 48 inputs"), (torch.ones(2, 48, dtype=torch.int64), r"x\.float")):
            with pytest.raises(Exception, match=match):
                compiled(x.to(DEVICE))
    torch._dynamo.reset()


def test_a_bias_of_another_size_and_a_layer_of_a_type_that_it_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"shape \(24,\), got \(23,\)"):
        SparseLinear(gaps_of_dense(linear().weight), torch.zeros(23, device=DEVICE))
    with pytest.raises(ValueError, match=r"float64.*keep it dense"):
        SparseLinear.from_linear(linear(dtype=torch.float64))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.sparse, self.dense, self.transposed = nn.Linear(16, 16), nn.Linear(16, 16), Conv1D(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        for module in (self.sparse, self.transposed, self.head):
            module.weight.data[torch.rand_like(module.weight) < 0.7] = 0

    def forward(self, x):
        return self.head(self.norm(self.transposed(self.dense(self.sparse(self.embed(x))))))


def test_sparse_layers_are_replaced_and_come_back_and_tied_and_dense_ones_stay():
    model, x = Model().eval(), torch.arange(50).view(5, 10)
    before, kinds = copy.deepcopy(model.state_dict()), {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = model(x)
        assert sparsify_(model, least=0.5) == ["sparse", "transposed"]
        assert torch.allclose(model(x), expected, atol=1e-5)
    assert type(model.dense) is nn.Linear and model.head.weight is model.embed.weight and not model.sparse.training
    assert unsparsify_(model) == ["sparse", "transposed"]
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(x).sum().backward()
    assert unsparsify_(model) == []


def test_patterns_and_the_least_sparsity_choose():
    assert sparsify_(Model(), only="sparse", least=0.5) == ["sparse"]
    assert sparsify_(Model(), only=["spar*", "trans*"], exclude="sparse.weight", least=0.5) == ["transposed"]
    assert sparsify_(Model(), exclude="sparse", least=0.5) == ["transposed"]
    assert sparsify_(Model(), least=0.95) == []
    assert sparsify_(Model(), least=0.0) == ["sparse", "dense", "transposed"]
    for call in (sparsify_, semi_structured_):
        for name in ("only", "exclude"):
            with pytest.raises(ValueError, match="'nothing' matches no parameter"):
                call(Model(), **{name: ["sparse", "nothing"]})
    with pytest.raises(ValueError, match="from_linear"):
        sparsify_(linear(), least=0.5)


class Attention(nn.Module):
    """Layers of which three read one input."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linear(32, 48), linear(16, 48, bias=False), linear(16, 48)
        self.o_proj = linear(48, 32)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) * torch.cat([self.k_proj(x), self.v_proj(x)], -1))


@pytest.fixture
def products(monkeypatch):
    """Outputs of the products that layers compute."""
    found, inner = [], layers.product
    monkeypatch.setattr(layers, "product", lambda x, gaps, bias: found.append(gaps.shape[0]) or inner(x, gaps, bias))
    return found


def attention():
    dense = Attention()
    model = copy.deepcopy(dense)
    assert sparsify_(model, least=0.5) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    return model, dense


@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 3, 48), (40, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_that_read_one_input_are_one_product(shape, mode, products):
    model, dense = attention()
    with mode():
        for _ in range(4):
            x = torch.randn(shape, device=DEVICE)
            assert near(model(x), dense(x))
    assert products == [64, 48] * 4
    assert model.q_proj.fused.waiting[0] is None  # nothing is kept once all have their outputs


def test_a_group_takes_no_input_for_another(products):
    model, dense = attention()
    first, second = torch.randn(2, 1, 48, device=DEVICE)
    with torch.no_grad():
        assert near(model.q_proj(first), dense.q_proj(first))
        assert near(model.k_proj(second), dense.k_proj(second))
        second.mul_(2)  # the same tensor with other values
        assert near(model.v_proj(second), dense.v_proj(second))
        assert products == [64, 64, 64]
        for _ in range(4):
            assert near(model.v_proj(first.clone()), dense.v_proj(first))
    assert products[-1] == 16  # it gave up: layers run alone
    assert model.q_proj.fused.waiting[0] is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_group_follows_autocast_that_begins_and_ends_between_its_layers(mode):
    model, _ = attention()
    with mode():
        x = torch.randn(2, 48, device=DEVICE)
        for order in ([False, True, False], [True, False, True]):
            for layer, is_cast in zip((model.q_proj, model.k_proj, model.v_proj), order, strict=True):
                with torch.autocast(DEVICE, torch.bfloat16, enabled=is_cast):
                    assert layer(x).dtype == (torch.bfloat16 if is_cast else torch.float32)


def test_outputs_of_a_group_pass_gradients_that_begin_between_its_layers_and_change_in_place_each_by_itself():
    model, dense = attention()
    x = torch.randn(2, 48, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        assert not model.q_proj(x).requires_grad
    (found,) = torch.autograd.grad(model.k_proj(x).sum(), x)
    (expected,) = torch.autograd.grad(dense.k_proj(x).sum(), x)
    assert torch.allclose(found, expected, atol=1e-5)
    x, factor = x.detach(), torch.randn(2, 32, device=DEVICE, requires_grad=True)
    outputs = [layer(x) for layer in (model.q_proj, model.k_proj, model.v_proj)]
    outputs[0].mul_(factor)
    outputs[1].zero_()
    assert near(outputs[0], dense.q_proj(x) * factor) and near(outputs[2], dense.v_proj(x))
    (found,) = torch.autograd.grad(outputs[0].sum(), factor)
    assert near(found, dense.q_proj(x))


def test_a_compiled_layer_and_an_eager_one_take_no_output_of_one_another():
    model, dense = attention()
    torch._dynamo.reset()
    compiled = torch.compile(model.q_proj, backend="eager", fullgraph=True)
    with torch.no_grad():
        x = torch.randn(2, 48, device=DEVICE)
        assert near(compiled(x), dense.q_proj(x))
        x.mul_(2)
        assert near(model.k_proj(x), dense.k_proj(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("change", [lambda m: m.to(torch.bfloat16), copy.deepcopy, lambda m: m.to("cpu").to(DEVICE)])
def test_a_group_goes_where_its_layers_go(change, products):
    model, dense = attention()
    values = model.q_proj.values.float()
    model = change(model)
    x = torch.randn(2, 48, device=DEVICE).to(model.q_proj.values.dtype)
    with torch.no_grad():
        assert near(model(x), dense.to(x.dtype)(x))
    assert products == [64, 48]
    assert torch.equal(model.q_proj.values, values.to(x.dtype))


def test_a_layer_of_a_group_loads_another_weight(products):
    model, dense = attention()
    other = linear(16, 48, sparsity=0.8, bias=False)
    model.k_proj.load_state_dict(SparseLinear.from_linear(other).state_dict())
    dense.k_proj.weight.data.copy_(other.weight)
    x = torch.randn(2, 48, device=DEVICE)
    with torch.no_grad():
        assert near(model(x), dense(x))
        assert torch.equal(model.q_proj.weight, dense.q_proj.weight)


class OwnWords(nn.Linear):
    """As Falcon's."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_a_linear_layer_in_other_words_is_replaced_and_comes_back_itself():
    model, x = Model().eval(), torch.arange(50).view(5, 10)
    model.sparse = own = OwnWords(16, 16).eval()
    own.weight.data[torch.rand_like(own.weight) < 0.7] = 0
    before, expected = own.weight.detach().clone(), model(x)
    assert sparsify_(model, least=0.5) == ["sparse", "transposed"]
    assert torch.allclose(model(x), expected, atol=1e-5)
    unsparsify_(model)
    assert model.sparse is own and torch.equal(own.weight, before) and torch.equal(model(x), expected)


def test_a_layer_whose_weight_attention_reads_without_calling_it_stays():
    attention = nn.MultiheadAttention(16, 2).eval()
    attention.out_proj.weight.data[:8] = 0
    assert sparsify_(attention, least=0.3) == []


@pytest.mark.parametrize("backend", quickly(["eager", "aot_eager"], "aot_eager"))
def test_compiled_it_is_one_graph_that_holds_for_any_number_of_vectors(backend):
    counts, (model, dense) = [], attention()
    with torch.inference_mode():
        for each in (dense, model):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            compiled = torch.compile(each, backend=counter, fullgraph=True, dynamic=True)
            for num in (40, 3, 20, 1, 7, 1):
                x = torch.randn(num, 48, device=DEVICE)
                assert near(compiled(x), dense(x))
            counts.append(counter.frame_count)
        graph = counter.graphs[0]
    torch._dynamo.reset()
    assert counts[0] == counts[1]
    if backend == "eager":
        assert sum(node.target is torch.ops.prunus.sparse_linear for node in graph.graph.nodes) == 2


def test_compiled_it_follows_autocast_and_passes_gradients():
    model, dense = attention()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        assert compiled(torch.randn(2, 48, device=DEVICE)).dtype == torch.bfloat16
    x = torch.randn(2, 48, device=DEVICE, requires_grad=True)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(dense(x).sum(), x)
    torch._dynamo.reset()
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_operator_is_a_proper_one():
    gaps, bias = gaps_of_dense(linear().weight), torch.randn(24, device=DEVICE)
    x = torch.randn(3, 100, device=DEVICE, requires_grad=True)
    parts = [gaps.values, gaps.codes, gaps.heads, gaps.rows]
    torch.library.opcheck(torch.ops.prunus.sparse_linear.default, (x, bias, parts, [24, 100], gaps.dtype, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_few_vectors_go_one_by_one(dtype):
    weight = linear(dtype=dtype).weight.cpu()
    gaps = gaps_of_dense(weight)
    for num in (1, MOST_CPU, MOST_CPU + 1):
        x = torch.randn(num, 100).to(dtype)
        assert near(product(x, gaps), x @ weight.t())
    matrix = csr_of(gaps)
    assert torch.equal(matrix.to_dense(), weight.float())
    assert csr_of(gaps) is matrix
    gaps.values.mul_(2)
    assert torch.equal(csr_of(gaps).to_dense(), 2 * weight.float())


def test_a_device_and_numbers_that_cannot_be_are_refused_and_nothing_is_done():
    model = Model().to("meta")
    for call in (sparsify_, semi_structured_, advise):
        with pytest.raises(ValueError, match=r"^sparse\.weight is on the meta device.*load them first"):
            call(model)
    with pytest.raises(ValueError, match=r"weight is on the meta device.*load them first"):
        SparseLinear.from_linear(model.sparse)
    assert type(model.sparse) is nn.Linear
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sparsify_(Model(), vectors=0)
    with pytest.raises(ValueError, match="CUDA devices and CPUs, but the model is on xpu"):
        check_device(torch.device("xpu"))


def two_of_four(outputs, inputs, dtype=torch.bfloat16):
    weight = torch.randn(outputs, inputs)
    keep = torch.zeros(outputs * inputs // 4, 4).scatter_(1, weight.abs().view(-1, 4).topk(2, 1).indices, 1)
    return (weight * keep.view_as(weight)).to(dtype)


def structured():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16).to(DEVICE)
    for layer in model[:2]:
        layer.weight.data = two_of_four(64, 64).to(DEVICE)
    return model


def test_two_of_four_is_told_from_the_rest():
    weight = two_of_four(8, 64)
    assert is_two_of_four(weight) and is_two_of_four(torch.zeros(4, 8))
    for other in (torch.zeros(4, 6), torch.tensor([[0.0, 1, 1, 1]]), weight.t().contiguous()):
        assert not is_two_of_four(other)


def test_a_layer_that_is_not_two_of_four_is_named_before_anything_is_done():
    model = structured()
    model[1].weight.data[0, :4] = 1
    model[1].weight.data[1:3] = 0
    with pytest.raises(ValueError, match=r"^1\.weight is not 2:4"):
        semi_structured_(model)
    for only in ("1", ["1", "2"]):
        with pytest.raises(ValueError, match=r"^1\.weight is not 2:4"):
            semi_structured_(model, only=only)
    for options in ({"only": "2"}, {"exclude": ["0", "1"]}):
        with pytest.raises(ValueError, match="no linear layer that only and exclude leave is at least half zeros"):
            semi_structured_(model, **options)
    with pytest.raises(ValueError, match="no linear layer is at least half zeros"):
        semi_structured_(model[2:])
    assert all(type(layer.weight) is nn.Parameter for layer in model)


def test_types_sizes_and_devices_that_do_not_take_them_are_named():
    model = nn.Sequential(nn.Linear(36, 64)).to(torch.bfloat16)
    model[0].weight.data.zero_()
    for each, match in (
        (model, "multiple of"),
        (copy.deepcopy(model).float(), "float32, not"),
        (structured().cpu(), r"an NVIDIA GPU.*on cpu"),
    ):
        with pytest.raises(ValueError, match=match):
            semi_structured_(each)


@pytest.mark.gpu
def test_on_a_gpu_the_outputs_agree():
    model, x = structured(), torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        assert semi_structured_(model) == ["0", "1"]
        assert torch.allclose(model(x), expected, atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="no linear layer"):  # there is none left
        semi_structured_(model)
    assert sparsify_(model, least=0.4) == []
