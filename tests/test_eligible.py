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


def names_of(found):
    return [weight.name for weight in found.weights]


def outputs_of(found):
    return {weight.name: weight.outputs for weight in found.weights}


def test_linear_and_convolution_weights_are_found_in_model_order_and_the_last_layer_too():
    found = eligible(Net())
    assert names_of(found) == ["conv.weight", "hidden.weight", "out.weight"]
    assert found.dense == {}


@pytest.mark.parametrize(
    ("layer", "outputs"),
    [
        (nn.Linear(4, 3), (0,)),
        (nn.Conv1d(2, 3, 2), (0,)),
        (nn.Conv2d(2, 4, 3, groups=2), (0,)),
        (nn.Conv3d(2, 3, 2), (0,)),
        (nn.ConvTranspose2d(2, 3, 2), (1,)),
        (Conv1D(3, 4), (1,)),
    ],
    ids=str,
)
def test_a_row_is_all_inputs_of_one_output(layer, outputs):
    assert outputs_of(eligible(nn.Sequential(layer))) == {"0.weight": outputs}


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(6), nn.BatchNorm2d(6), nn.Embedding(5, 6), nn.Bilinear(3, 3, 2)], ids=str
)
def test_norms_biases_embeddings_and_other_modules_are_not_pruned(layer):
    found = eligible(nn.Sequential(nn.Linear(4, 6), layer))
    assert names_of(found) == ["0.weight"]


def test_a_tied_head_is_counted_once_and_left_dense():
    found = eligible(Language(tied=True))
    assert names_of(found) == ["block.fc.weight", "block.proj.weight"]
    assert set(found.dense) == {"wte.weight", "wpe.weight"} and "head" in found.dense["wte.weight"]


def test_a_tied_head_is_pruned_once_when_asked_for_by_its_name():
    found = eligible(Language(tied=True), include="wte.weight")
    assert names_of(found) == ["wte.weight", "block.fc.weight", "block.proj.weight"]
    assert found.weights[0].outputs == (0,)


def test_a_head_of_its_own_is_left_dense_only_where_the_model_says_it_is_one():
    assert "head.weight" in names_of(eligible(Language(tied=False)))
    found = eligible(Language(tied=False, getter=True))
    assert "head.weight" not in names_of(found) and "head" in found.dense["head.weight"]
    assert "head.weight" in names_of(eligible(Language(tied=False, getter=True), include="head"))


def test_a_model_without_output_embeddings_may_say_so():
    model = Net()
    model.get_output_embeddings = lambda: None
    assert len(eligible(model).weights) == 3


def test_a_weight_shared_by_two_layers_is_counted_once():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    assert names_of(eligible(model)) == ["0.weight", "2.weight"]


def test_patterns_match_parameters_or_their_modules_and_exclude_wins():
    assert names_of(eligible(Net(), exclude="hidden")) == ["conv.weight", "out.weight"]
    assert names_of(eligible(Net(), exclude=["hidden.weight", "out.*"])) == ["conv.weight"]
    assert names_of(eligible(Net(), include="out", exclude="*o*")) == ["hidden.weight"]
    assert eligible(Net(), exclude="hidden").dense == {"hidden.weight": "excluded"}


def test_only_restricts_the_default_weights_and_what_include_adds():
    left_out = eligible(Net(), only=["hidden", "out.*"])
    assert names_of(left_out) == ["hidden.weight", "out.weight"]
    assert left_out.dense == {"conv.weight": "not named by only"}
    assert names_of(eligible(Net(), only="*o*", exclude="out")) == ["conv.weight"]
    some = ["wte", "block.fc"]
    assert names_of(eligible(Language(), include="wte", only=some)) == ["wte.weight", "block.fc.weight"]
    assert names_of(eligible(Language(), only=some)) == ["block.fc.weight"]


def test_only_reaches_the_pruner_and_the_parameter_groups():
    model = Net()
    alone = parameter_groups(model, only="hidden")[0]["params"]
    assert len(alone) == 1 and alone[0] is model.hidden.weight
    pruner = Pruner(model, torch.optim.AdamW(model.parameters()), schedule=Constant(0.5), only="hidden")
    assert list(pruner.masks) == ["hidden.weight"]


def test_a_module_with_a_bias_may_be_asked_for_by_its_name():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Bilinear(4, 4, 3), nn.Linear(3, 2))
    assert names_of(eligible(model, include="1")) == ["1.weight", "2.weight"]


def test_an_exclude_may_match_biases_and_norms_too():
    found = eligible(Net(), exclude=["norm", "*.bias", "conv"])
    assert names_of(found) == ["hidden.weight", "out.weight"] and set(found.dense) == {"conv.weight"}


def test_other_weights_of_two_or_more_dimensions_are_pruned_when_asked_for():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 5, 4))
            self.gate = nn.Linear(4, 3)

    assert names_of(eligible(Experts())) == ["gate.weight"]
    assert outputs_of(eligible(Experts(), include="experts")) == {"experts": (0, 1), "gate.weight": (0,)}


def test_attention_projections_are_pruned_when_asked_for():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 2))
    assert names_of(eligible(model)) == ["0.out_proj.weight", "1.weight"]
    found = eligible(model, include="*in_proj_weight")
    assert names_of(found) == ["0.in_proj_weight", "0.out_proj.weight", "1.weight"]


def test_frozen_weights_are_pruned_after_training_where_they_are_named():
    model = Net()
    model.conv.weight.requires_grad_(False)
    assert eligible(model).dense == {"conv.weight": "frozen"}
    assert "conv.weight" in names_of(eligible(model, include="conv"))
    assert eligible(model, include="conv", trained=model.parameters()).dense == {"conv.weight": "frozen"}
    model.requires_grad_(False)
    result = prune(model, sparsity=0.5, include="*")
    assert result.sparsity == 0.5 and not any(p.requires_grad for p in model.parameters())


def test_frozen_weights_and_weights_no_optimizer_holds_stay_dense_with_a_reason():
    model = Net()
    model.conv.weight.requires_grad_(False)
    found = eligible(model, trained=[model.conv.weight, model.out.weight])
    assert names_of(found) == ["out.weight"]
    assert found.dense == {"conv.weight": "frozen", "hidden.weight": "not held by the optimizer"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager"),
        lambda model: nn.ModuleDict({"module": model}),
        lambda model: torch.compile(nn.ModuleDict({"module": model}), backend="eager"),
        lambda model: nn.ModuleDict({"module": torch.compile(model, backend="eager")}),
    ],
    ids=["compiled", "ddp", "compiled ddp", "ddp of compiled"],
)
def test_wrappers_leave_no_trace_in_names_and_patterns(wrap):
    found = eligible(wrap(Net()), exclude="hidden")
    assert names_of(found) == ["conv.weight", "out.weight"] and set(found.dense) == {"hidden.weight"}


def test_a_wrapped_models_head_is_found():
    class Parallel(nn.Module):
        def __init__(self, module) -> None:
            super().__init__()
            self.module = module

    model = Language(tied=False, getter=True)
    for wrapped in (Parallel(model), torch.compile(model, backend="eager"), Parallel(Parallel(model))):
        assert names_of(eligible(wrapped)) == ["block.fc.weight", "block.proj.weight"]


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


def test_two_weights_never_share_one_plain_name():
    class Adapter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.module = nn.Linear(4, 4)

    found = eligible(nn.Sequential(Adapter()))
    assert len(found.weights) == 2 == len(set(names_of(found)))


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
        (nn.LayerNorm(4), {}, "no weight"),
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


def test_an_embedding_with_sparse_gradients_cannot_be_masked_in_training_and_stays_dense():
    model = nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True), "out": nn.Linear(4, 3)})
    found = eligible(model, include="words", trained=model.parameters())
    assert [weight.name for weight in found.weights] == ["out.weight"] and "sparse" in found.dense["words.weight"]
    assert len(eligible(model, include="words").weights) == 2  # after training it may be pruned


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
    with pytest.raises(ValueError, match=r"no weight to prune.*include=\['weight_ih_l0', 'weight_hh_l0'\] takes them"):
        eligible(nn.LSTM(4, 4))


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError])
def test_a_model_that_cannot_say_where_its_embeddings_are_has_none(error):
    class Model(torch.nn.Sequential):
        def get_input_embeddings(self):
            raise error("it has no embeddings")

    assert [weight.name for weight in eligible(Model(torch.nn.Linear(4, 4))).weights] == ["0.weight"]


class OwnWords(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


class Inherits(OwnWords):
    pass


class Clamps(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class DropsWhenTraining(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Pairs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Rounds(nn.Linear):
    def forward(self, x):
        return super().forward(x.bfloat16().to(x.dtype))


class Adapts(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(sizes[0]))  # trained, it will matter

    def forward(self, x):
        return super().forward(x + self.more)


def instance_forward():
    layer = nn.Linear(6, 4)
    layer.forward = lambda x: 2 * x
    return layer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(6, 4), True),
        (lambda: OwnWords(6, 4), True),
        (lambda: OwnWords(6, 4, bias=False), True),
        (lambda: Inherits(6, 4, dtype=torch.bfloat16), True),
        (lambda: OwnWords(6, 4, device="meta"), True),
        (lambda: Clamps(6, 4), False),
        (lambda: DropsWhenTraining(6, 4), False),
        (lambda: Pairs(6, 4), False),
        (lambda: Rounds(6, 4), False),
        (lambda: Adapts(6, 4), False),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), False),
        (instance_forward, False),
        (lambda: nn.Conv1d(6, 4, 1), False),
    ],
)
def test_a_layer_is_linear_if_it_computes_what_nn_linear_does(make, expected):
    layer = make()
    before = layer.state_dict(), layer.training, dict(vars(layer))
    assert is_linear(layer) is expected
    assert dict(vars(layer)) == before[2] and layer.training == before[1]
    assert all(value.is_meta or torch.equal(value, before[0][name]) for name, value in layer.state_dict().items())
