"""The weights that may be pruned are found in any model, and the others are named with a reason."""

import ast
import re
import warnings

import pytest
import torch
from torch import nn
from toys import Conv1D, Net

from prunus import Constant, Pruner, parameter_groups, prune
from prunus.eligible import eligible, is_linear, plain_name


class Language(nn.Module):
    """Embeddings, one block, and a head that may be tied to the embedding."""

    def __init__(self, tied=True, getter=False) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.wpe = nn.Embedding(5, 6)
        self.block = nn.ModuleDict({"norm": nn.LayerNorm(6), "fc": Conv1D(8, 6), "proj": Conv1D(6, 8)})
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        if getter:
            self.get_output_embeddings = lambda: self.head


class Wrapped(nn.Module):
    """A model as data parallelism wraps it."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 5, 4))
        self.gate = nn.Linear(4, 3)


class Adapter(nn.Linear):
    """Has a part of its own name, as wrappers have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.module = nn.Linear(4, 4)


def model_with(getter, value):
    """A Net with a method that returns ``value`` or raises it."""

    def get():
        if isinstance(value, Exception):
            raise value
        return value

    model = Net()
    setattr(model, getter, get)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def tied():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    return model


def frozen():
    model = Net()
    model.conv.weight.requires_grad_(False)
    return model


def between(layer):
    return nn.Sequential(nn.Linear(4, 6), layer)


ATTENTION = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 2))
BILINEAR = nn.Sequential(nn.Embedding(5, 4), nn.Bilinear(4, 4, 3), nn.Linear(3, 2))
HEADED = Language(tied=False, getter=True)
NET, BLOCK = "conv hidden out", "block.fc block.proj"
FOUND = {  # model, options, modules whose weights are found, in the order of the model
    "linear and convolution, the last layer too": (Net(), {}, NET),
    "layer norm": (between(nn.LayerNorm(6)), {}, "0"),
    "batch norm": (between(nn.BatchNorm2d(6)), {}, "0"),
    "embedding": (between(nn.Embedding(5, 6)), {}, "0"),
    "bilinear": (between(nn.Bilinear(3, 3, 2)), {}, "0"),
    "a tied head, once where it is asked for": (Language(), {"include": "wte.weight"}, f"wte {BLOCK}"),
    "a head that the model does not name": (Language(tied=False), {}, f"{BLOCK} head"),
    "a head that it names": (HEADED, {}, BLOCK),
    "a head that is asked for": (HEADED, {"include": "head"}, f"{BLOCK} head"),
    "no output embeddings": (model_with("get_output_embeddings", None), {}, NET),
    "no input embeddings": (model_with("get_input_embeddings", NotImplementedError()), {}, NET),
    "input embeddings that fail": (model_with("get_input_embeddings", AttributeError()), {}, NET),
    "a shared weight, once": (tied(), {}, "0 2"),
    "a module excluded": (Net(), {"exclude": "hidden"}, "conv out"),
    "parameters excluded": (Net(), {"exclude": ["hidden.weight", "out.*"]}, "conv"),
    "exclude wins": (Net(), {"include": "out", "exclude": "*o*"}, "hidden"),
    "biases and norms excluded too": (Net(), {"exclude": ["norm", "*.bias", "conv"]}, "hidden out"),
    "only": (Net(), {"only": ["hidden", "out.*"]}, "hidden out"),
    "only with exclude": (Net(), {"only": "*o*", "exclude": "out"}, "conv"),
    "only with include": (Language(), {"include": "wte", "only": ["wte", "block.fc"]}, "wte block.fc"),
    "only adds nothing": (Language(), {"only": ["wte", "block.fc"]}, "block.fc"),
    "a module with a bias": (BILINEAR, {"include": "1"}, "1 2"),
    "attention": (ATTENTION, {}, "0.out_proj 1"),
    "two that share no name": (nn.Sequential(Adapter()), {}, "0 0.module"),
    "compiled": (compiled(Net()), {"exclude": "hidden"}, "conv out"),
    "ddp": (Wrapped(Net()), {"exclude": "hidden"}, "conv out"),
    "compiled ddp": (compiled(Wrapped(Net())), {"exclude": "hidden"}, "conv out"),
    "ddp of compiled": (Wrapped(compiled(Net())), {"exclude": "hidden"}, "conv out"),
    "head of ddp": (Wrapped(HEADED), {}, BLOCK),
    "head of compiled": (compiled(HEADED), {}, BLOCK),
    "head of wrapped twice": (Wrapped(Wrapped(HEADED)), {}, BLOCK),
}


def test_weights_are_found_under_plain_names_in_the_order_of_the_model():
    for case, (model, options, modules) in FOUND.items():
        names = [weight.name for weight in eligible(model, **options).weights]
        assert names == [f"{module}.weight" for module in modules.split()], case


WORDS = nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "out": nn.Linear(4, 3)})
FROZEN, OUT = frozen(), Net()
DENSE = {  # model, options, why its other matrices stay dense
    "nothing": (Net(), {}, {}),
    "a tied head": (Language(), {}, {"wte.weight": "embedding or head", "wpe.weight": "embedding"}),
    "a head": (HEADED, {"exclude": "w?e"}, {"head.weight": "head", "wte.weight": "excluded", "wpe.weight": "excluded"}),
    "excluded": (Net(), {"exclude": ["hidden", "norm"]}, {"hidden.weight": "excluded"}),
    "not named": (Net(), {"only": ["hidden", "out"]}, {"conv.weight": "not named by only"}),
    "frozen": (FROZEN, {}, {"conv.weight": "frozen"}),
    "frozen, named after training": (FROZEN, {"include": "conv"}, {}),
    "frozen, named in training": (FROZEN, {"include": "conv", "trained": FROZEN.parameters}, {"conv.weight": "frozen"}),
    "no optimizer": (OUT, {"trained": OUT.out.parameters, "exclude": "hidden"},
        {"conv.weight": "not held by the optimizer", "hidden.weight": "excluded"}),
    "sparse gradients": (WORDS, {"include": "words", "trained": WORDS.parameters}, {"words.weight": "sparse"}),
    "sparse, after training": (WORDS, {"include": "words"}, {}),
}  # fmt: skip


def test_matrices_that_stay_dense_are_named_with_the_reason():
    for case, (model, options, reasons) in DENSE.items():
        dense = eligible(
            model, **{name: value() if callable(value) else value for name, value in options.items()}
        ).dense
        assert dense.keys() == reasons.keys() and all(reasons[name] in why for name, why in dense.items()), case


@pytest.mark.parametrize(
    ("layer", "include", "outputs"),
    [
        (nn.Linear(4, 3), (), {"0.weight": (0,)}),
        (nn.Conv1d(2, 3, 2), (), {"0.weight": (0,)}),
        (nn.Conv2d(2, 4, 3, groups=2), (), {"0.weight": (0,)}),
        (nn.Conv3d(2, 3, 2), (), {"0.weight": (0,)}),
        (nn.ConvTranspose2d(2, 3, 2), (), {"0.weight": (1,)}),
        (Conv1D(3, 4), (), {"0.weight": (1,)}),
        (Experts(), (), {"0.gate.weight": (0,)}),
        (Experts(), "0.experts", {"0.experts": (0, 1), "0.gate.weight": (0,)}),
        (nn.MultiheadAttention(8, 2), "*in_proj_weight", {"0.in_proj_weight": (0,), "0.out_proj.weight": (0,)}),
    ],
    ids=str,
)
def test_a_row_is_all_inputs_of_one_output(layer, include, outputs):
    found = eligible(nn.Sequential(layer), include=include).weights
    assert {weight.name: weight.outputs for weight in found} == outputs


def test_only_reaches_the_pruner_and_the_parameter_groups():
    model = Net()
    alone = parameter_groups(model, only="hidden")[0]["params"]
    assert len(alone) == 1 and alone[0] is model.hidden.weight
    pruner = Pruner(model, torch.optim.AdamW(model.parameters()), schedule=Constant(0.5), only="hidden")
    assert list(pruner.masks) == ["hidden.weight"]


def test_frozen_weights_are_pruned_after_training_where_they_are_named():
    model = Net().requires_grad_(False)
    assert prune(model, sparsity=0.5, include="*").sparsity == 0.5
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("weight", "weight"),
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("module._orig_mod.a.weight", "a.weight"),
        ("module.module.a.weight", "a.weight"),
        ("a._orig_mod.weight", "a.weight"),
        ("submodule.weight", "submodule.weight"),
        ("my_module.0.weight", "my_module.0.weight"),
        ("a.modules.weight", "a.modules.weight"),
    ],
)
def test_plain_names_lose_the_prefixes_of_wrappers_and_nothing_else(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (Net(), {"include": "typo*"}, "typo"),
        (Net(), {"exclude": ["hidden", "typo"]}, "typo"),
        (Net(), {"include": "hidden.bias"}, "hidden.bias"),
        (Net(), {"include": "norm"}, "norm.weight"),
        (Net(), {"only": "typo*"}, "typo"),
        (Net(), {"only": ["hidden", "norm"]}, "norm.weight"),
        (Net(), {"exclude": "*"}, "excluded"),
        (Net(), {"trained": []}, "not held"),
        (nn.Sequential(nn.Embedding(3, 4)), {}, "0.weight"),
        (nn.LayerNorm(4), {}, "no prunable weight"),
    ],
)
def test_what_cannot_be_pruned_is_one_line_that_names_it(model, options, text):
    with pytest.raises(ValueError, match=text) as error:
        eligible(model, **options)
    assert "\n" not in str(error.value)


def test_weights_that_would_have_one_name_are_refused():
    """As where a model has a part called module beside others: one mask would stand for two weights."""
    model = nn.ModuleDict({"fc": nn.Linear(3, 4), "module": nn.ModuleDict({"fc": nn.Linear(4, 5)})})
    with pytest.raises(ValueError, match=r"^fc\.weight and module\.fc\.weight are both fc\.weight[^\n]*$"):
        eligible(model)


def attention(**options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options), 2)


def train_with(model, **options):
    return Pruner(model, torch.optim.AdamW(model.parameters()), schedule=Constant(0.5), **options)


def prune_at_once(model, **options):
    return prune(model, sparsity=0.5, **options)


LARGE = {
    "attention": (attention, "layers.*.self_attn.in_proj_weight"),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(4, 4), nn.Linear(4, 4)), "0.weight_hh_l0"),
}


@pytest.mark.parametrize("take", [train_with, prune_at_once])
@pytest.mark.parametrize(("make", "pattern"), LARGE.values(), ids=LARGE)
def test_a_large_part_that_stays_dense_is_named_once_with_the_pattern_that_takes_it(take, make, pattern):
    with pytest.warns(UserWarning, match=r"stay dense.*include=\[") as caught:
        take(make())
    texts = [str(one.message) for one in caught if "stay dense" in str(one.message)]
    assert len(texts) == 1 and repr(pattern) in texts[0] and "\n" not in texts[0]
    assert {one.filename for one in caught if "stay dense" in str(one.message)} == {__file__}
    found = re.search(r"include=(\[.*?\])", texts[0])[1]
    for option in ("include", "exclude"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = make()
            take(model, **{option: ast.literal_eval(found)})


def test_a_small_part_frozen_weights_and_embeddings_need_no_warning():
    frozen = attention()
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("in_proj" not in name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for model in (nn.Sequential(nn.LSTM(2, 2), nn.Linear(40, 40)), frozen, Language(), Net()):
            train_with(model)


def test_a_model_of_such_weights_alone_says_what_takes_them():
    with pytest.raises(ValueError, match=r"no prunable weight.*include=\['weight_ih_l0', 'weight_hh_l0'\] adds them"):
        eligible(nn.LSTM(4, 4))


def linear_by(forward, **options):
    """A layer of six inputs and four outputs of a class that computes ``forward(layer, x, its own forward)``."""

    class Own(nn.Linear):
        def forward(self, x):
            return forward(self, x, super().forward)

    return Own(6, 4, **options)


def by_hand(layer, x, _):
    return x @ layer.weight.T if layer.bias is None else x @ layer.weight.T + layer.bias


class Adapts(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(sizes[0]))  # trained, it will matter

    def forward(self, x):
        return super().forward(x + self.more)


def with_a_forward_of_its_own():
    layer = nn.Linear(6, 4)
    layer.forward = lambda x: 2 * x
    return layer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(6, 4), True),
        (lambda: linear_by(by_hand), True),
        (lambda: linear_by(by_hand, bias=False), True),
        (lambda: linear_by(by_hand, dtype=torch.bfloat16), True),
        (lambda: linear_by(by_hand, device="meta"), True),
        (lambda: linear_by(lambda layer, x, own: own(x.clamp(-100, 100))), False),
        (lambda: linear_by(lambda layer, x, own: own(nn.functional.dropout(x, 0.5, layer.training))), False),
        (lambda: linear_by(lambda layer, x, own: (own(x), x)), False),
        (lambda: linear_by(lambda layer, x, own: own(x.bfloat16().to(x.dtype))), False),
        (lambda: Adapts(6, 4), False),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), False),
        (with_a_forward_of_its_own, False),
        (lambda: nn.Conv1d(6, 4, 1), False),
    ],
)
def test_a_layer_is_linear_if_it_computes_what_nn_linear_does(make, expected):
    layer = make()
    before = layer.state_dict(), layer.training, dict(vars(layer))
    assert is_linear(layer) is expected
    assert dict(vars(layer)) == before[2] and layer.training == before[1]
    assert all(value.is_meta or torch.equal(value, before[0][name]) for name, value in layer.state_dict().items())
