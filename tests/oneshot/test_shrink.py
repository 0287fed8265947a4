"""A shrunk model is an ordinary smaller one: exact numbers, the outputs of what stays, and the dense model again."""

import math
import re
from copy import deepcopy

import pytest
import torch
from covering import quickly
from families import SIZES, assert_equal_models, build, inputs, text, tokens
from torch import nn

from prunus import BlockTuning, prune, recover, shrink
from prunus.lab.data import TokenShape
from prunus.lab.models import GPT
from prunus.oneshot.shrink import Shrinking
from prunus.oneshot.units import Plan, Slices, UnitLayer, Wanted, Widths

transformers = pytest.importorskip("transformers")
LLAMA = SIZES | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
SHORT = BlockTuning(epochs=1, whole_epochs=2, batch=4)


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.ndim > 1 else 1)  # layers that matter
    return model.to(dtype)


def batches(num=12):
    return [{"input_ids": tokens(num, 10)}]


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}, sizes(model)


def sizes(model):
    """What the configuration says, but for what saving it adds."""
    return {key: value for key, value in model.config.to_dict().items() if key not in ("architectures", "dtype")}


def is_as_before(model, before):
    weights, config = before
    now = model.state_dict()
    return (
        now.keys() == weights.keys()
        and all(torch.equal(now[name], value) for name, value in weights.items())
        and sizes(model) == config
    )


@torch.no_grad()
def logits(model):
    return model(**batches()[0]).logits


@pytest.mark.parametrize("dtype", quickly([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize(
    "how",
    [
        {"size": 0.6},
        {"neurons": 5},
        {"neurons": 0.5, "heads": 1},
        {"layers": 1, "heads": 0.5},
        {"neurons": 0.3, "multiple": 8},
        {"size": 0.5, "targets": "dense"},
    ],
    ids=str,
)
def test_every_layer_keeps_the_number_and_plain_transformers_loads_the_folder(how, dtype, tmp_path):
    model = llama(dtype)
    before, parameters = state(model), list(model.parameters())
    result = shrink(model, batches(), **how)
    config = model.config
    if "neurons" in how:
        wanted = 24 - 5 if how["neurons"] == 5 else 24 - round(how["neurons"] * 24)
        assert config.intermediate_size == wanted // how.get("multiple", 1) * how.get("multiple", 1)
    if "heads" in how:
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 4)
    assert config.num_hidden_layers == 3 - how.get("layers", 0) == len(model.model.layers)
    for layer in result.layers:
        assert len(set(layer.kept)) == len(layer.kept) < layer.num
        assert layer.error <= layer.mask_error + 1e-6
    model.save_pretrained(tmp_path)
    assert_equal_models(type(model).from_pretrained(tmp_path, dtype=dtype), model, batches()[0])
    shrunk = state(model)
    for _ in range(2):
        result.undo_()
        assert is_as_before(model, before)
        assert all(own is was for own, was in zip(model.parameters(), parameters, strict=True))
        result.apply_()
        assert is_as_before(model, shrunk)


def plan_of(fields, allowed=None):
    """Blocks of the shape that a configuration says, as a plan of units."""
    layers = {field[1]: UnitLayer(*field) for field in fields}
    return Plan([*layers.values()], {}, lambda field: allowed or range(1, layers[field].num + 1), lambda left: [])


def qwen():
    """A block of Qwen2.5-1.5B on the meta device: 12 heads in 2 groups, 8,960 neurons."""
    with torch.device("meta"):
        shapes = {"q": (1536, 1536), "k": (1536, 256), "v": (1536, 256), "o": (1536, 1536)}
        shapes |= {"gate": (1536, 8960), "up": (1536, 8960), "down": (8960, 1536)}
        model = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
    groups = {"q.weight": (0, 768), "k.weight": (0, 128), "v.weight": (0, 128), "o.weight": (1, 768)}
    heads = {name: Slices(dim, torch.arange(2 * width).view(2, width)) for name, (dim, width) in groups.items()}
    each = torch.arange(8960)[:, None]
    neurons = {"gate.weight": Slices(0, each), "up.weight": Slices(0, each), "down.weight": Slices(1, each)}
    fields = [("heads", "groups", "o.weight", heads), ("neurons", "width", "down.weight", neurons)]
    return model, fields


def test_a_size_keeps_the_largest_number_of_weights_that_is_not_above_it():
    model, fields = qwen()
    widths = Widths(model, plan_of(fields), [name for name, _ in model.named_parameters()])
    total = widths.num_weights({})
    assert widths.of_size(0.75 * total, Wanted(size=0.75)) == {"groups": 2, "width": 6421}
    for size in (0.3, 0.5, 0.61, 0.9):
        left = widths.of_size(size * total, Wanted(size=size))
        assert left["groups"] == math.ceil(2 * size) and widths.num_weights(left) <= size * total
        assert widths.num_weights(left | {"width": left["width"] + 1}) > size * total
        rounded = widths.of_size(size * total, Wanted(size=size, multiple=64))
        assert rounded["width"] == left["width"] // 64 * 64
    with pytest.raises(ValueError, match=r"size=0\.05 leaves no neuron: .* give a larger size"):
        widths.of_size(0.05 * total, Wanted(size=0.05))


def test_heads_of_a_size_are_not_fewer_than_it_says_where_the_class_takes_only_some_numbers():
    model, fields = qwen()
    widths = Widths(model, plan_of(fields[:1], [2]), [name for name, _ in model.named_parameters()])
    with pytest.raises(ValueError, match=r"cannot remove 1 of 2 head groups: .* numbers that can go: none"):
        widths.by_hand(Wanted(heads=1))
    widths = Widths(model, plan_of(fields, [2]), [name for name, _ in model.named_parameters()])
    assert widths.of_size(0.5 * widths.num_weights({}), Wanted(size=0.5))["groups"] == 2


def test_a_size_keeps_all_heads_on_request_and_takes_its_weights_from_the_neurons():
    model, fields = qwen()
    widths = Widths(model, plan_of(fields), [name for name, _ in model.named_parameters()])
    total = widths.num_weights({})
    for size in (0.2, 0.5, 0.9):
        left = widths.of_size(size * total, Wanted(size=size, heads=0))
        assert left.keys() == {"width"} and widths.num_weights(left) <= size * total
        assert widths.num_weights({"width": left["width"] + 1}) > size * total
    with pytest.raises(ValueError, match="leaves no neuron"):
        widths.of_size(0.1 * total, Wanted(size=0.1, heads=0))
    with pytest.raises(ValueError, match="the model has no other units"):
        Widths(model, plan_of(fields[:1]), ["q.weight"]).of_size(1, Wanted(size=0.5, heads=0))
    with pytest.raises(ValueError, match="heads must be a number to remove, at least 1"):
        Wanted(heads=0)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({}, "pass size=, the share that stays"),
        ({"size": 0.7, "neurons": 0.2}, "give either size, or neurons and heads"),
        ({"size": 0.7, "heads": 1}, "with size, heads=0 keeps all heads"),
        ({"size": 70}, "above 0 and below 1, got 70"),
        ({"size": 0.01}, "leaves no neuron"),
        ({"neurons": 24}, "neurons=24 would remove 24 of 24"),
        ({"neurons": -1}, "a number to remove, at least 1, or a fraction between 0 and 1, got -1"),
        ({"neurons": True}, "got True"),
        ({"heads": 2}, "so that at least one stays"),
        ({"layers": 3}, "layers=3 would remove 3 of 3"),
        ({"experts": 0.5}, "has no experts to drop"),
        ({"size": 0.7, "multiple": 0}, "multiple must be a whole number of at least 1"),
        ({"size": 0.4, "multiple": 16}, "of 24 neurons would stay, fewer than multiple=16; remove less"),
        ({"size": 0.7, "multiple": 100}, "multiple=100 is more than the 24 neurons of a layer"),
        ({"neurons": 3, "multiple": 100}, "multiple=100 is more than the 24 neurons of a layer"),
        ({"size": 0.7, "split": "odd"}, "split must be even or measured"),
        ({"layers": 1, "split": "measured"}, "give size= and no layers="),
        ({"size": 0.7, "targets": "both"}, "targets must be own or dense"),
        ({"size": 0.7, "tune": 3}, r"tune must be True, False or BlockTuning(...)"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_in_one_line_and_nothing_changes(how, line):
    model = llama()
    before = state(model)
    with pytest.raises(ValueError) as error:
        shrink(model, batches(), **how)
    assert line in str(error.value) and "\n" not in str(error.value)
    assert is_as_before(model, before)


@pytest.mark.parametrize("how", [{"size": 0.7}, {"heads": 1}, {"layers": 1}], ids=str)
def test_samples_and_weights_that_are_nan_are_named_and_not_the_class(how):
    model = llama()
    before = state(model)
    inputs = model.get_input_embeddings()(text()["input_ids"]).detach()
    inputs[0, 1, 2] = math.nan
    with pytest.raises(ValueError, match=r"gives NaN for .* sample; check that .*inputs and the model's weights"):
        shrink(model, [{"inputs_embeds": inputs}], **how)
    assert is_as_before(model, before)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"gives NaN for .* sample"):
        shrink(model, batches(), **how)


def test_a_shared_weight_is_called_that():
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate_proj\.weight is shared with another layer"):
        shrink(model, batches(), neurons=0.25)


def test_what_is_no_batches_is_refused_in_words_of_shrink():
    with pytest.raises(ValueError, match=r"got 0\.7; give a list or a loader, and a number by name, .* size=0\.7"):
        shrink(llama(), 0.7, neurons=1)


def test_a_size_that_leaves_no_unit_says_what_the_fewest_take():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    with pytest.raises(ValueError, match="leaves no neuron: with the fewest that can stay") as error:
        shrink(model, [torch.randn(32, 8)], size=0.02)
    least, total, most = re.findall(r"\d+", re.sub(",", "", str(error.value).partition("stay")[2]))
    assert (total, most) == ("1664", "33") and 33 < int(least) < 1664


def test_a_class_that_ties_heads_to_its_width_says_so_and_names_what_can_go():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with pytest.raises(ValueError, match="neurons"):
        shrink(model, [text()], heads=1)
    result = shrink(model, [text()], size=0.8)
    assert {layer.kind for layer in result.layers} == {"neurons"}


def test_an_exception_in_the_middle_leaves_the_model_as_before(monkeypatch):
    model = llama()
    before = state(model)

    def progress(done, total, what):
        if "layers.1.mlp" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shrink(model, batches(), size=0.6, layers=1, progress=progress)
    assert is_as_before(model, before)


@pytest.mark.slow
def test_a_shrinking_that_was_interrupted_ends_with_the_same_bits(tmp_path):
    whole, model = llama(), llama()
    shrink(whole, batches(), size=0.6, tune=SHORT)

    def progress(done, total, what):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shrink(model, batches(), size=0.6, tune=SHORT, state=tmp_path / "state", progress=progress)
    shrink(model, batches(), size=0.6, tune=SHORT, state=tmp_path / "state")
    assert is_as_before(model, state(whole))
    with pytest.raises(ValueError, match="another folder"):
        shrink(llama(), batches(), size=0.5, tune=SHORT, state=tmp_path / "state")


def test_blocks_that_are_moved_one_at_a_time_give_the_same_bits():
    held, moved = llama(), llama()
    shrink(held, batches(), size=0.6)
    shrink(moved, batches(), size=0.6, offload="cpu")
    assert is_as_before(moved, state(held))


def test_zeros_of_a_pruned_model_stay_zeros_where_their_units_stay():
    model = llama()
    prune(model, batches(), 0.5)
    zeros = {name: value == 0 for name, value in model.state_dict().items() if value.ndim > 1}
    result = shrink(model, batches(), neurons=0.25)
    for layer in result.layers:
        path = layer.name.removesuffix("down_proj.weight")
        kept = torch.tensor(layer.kept)
        now, was = model.state_dict()[layer.name], zeros[layer.name][:, kept]
        assert torch.equal(now == 0, was)
        assert torch.equal(model.state_dict()[f"{path}up_proj.weight"] == 0, zeros[f"{path}up_proj.weight"][kept])


def distance(model, wanted):
    return float((logits(model) - wanted).square().mean())


def test_solved_values_are_nearer_to_the_dense_model_than_old_ones_and_tuned_values_are_nearer_still():
    wanted, distances = logits(llama()), []
    for refit, tuning in ((False, None), (True, None), (True, BlockTuning(epochs=4, whole_epochs=8, batch=4))):
        model = llama()
        Shrinking(model, batches(), tuning, refit=refit).run(Wanted(neurons=0.5))
        distances.append(distance(model, wanted))
    assert distances[0] > distances[1] > distances[2]


@pytest.mark.slow
def test_a_model_without_some_layers_is_tuned_towards_the_whole_dense_model():
    wanted, plain, tuned = logits(llama()), llama(), llama()
    shrink(plain, batches(), layers=1)
    result = shrink(tuned, batches(), layers=1, tune=BlockTuning(epochs=0, whole_epochs=20, whole_lr=3e-3, batch=4))
    assert result.level.tuned_whole is not None and result.level.tuned_whole.helped
    assert distance(tuned, wanted) < distance(plain, wanted)


@pytest.mark.slow
def test_a_measured_split_keeps_the_mixture_that_is_nearest_to_the_dense_model():
    model = llama()
    before = state(model)
    result = shrink(model, batches(), size=0.5, split="measured")
    best = min(result.mixtures, key=lambda one: one.distance)
    assert [one.layers for one in result.mixtures] == [0, 1]
    assert model.config.num_hidden_layers == 3 - best.layers
    assert result.after.weights <= 0.5 * result.before.weights
    result.undo_()
    assert is_as_before(model, before)


@pytest.mark.slow
def test_a_shrunk_model_recovers_from_its_dense_one():
    model = llama()
    result = shrink(model, batches(), size=0.6)
    dense, loss = result.dense(), distance(model, logits(llama()))
    recover(model, dense, batches() * 24, steps=20, lr=3e-3, held_out=batches())
    assert distance(model, logits(llama())) < loss and torch.equal(logits(dense), logits(llama()))
    with pytest.raises(ValueError, match="trained or changed after it was shrunk"):
        result.undo_()


def test_a_plain_model_keeps_its_size_too():
    model = GPT(2, 4, 32, TokenShape(32, 8))
    data = [torch.randint(0, 32, (6, 8))]
    dense = deepcopy(model)
    result = shrink(model, data, size=0.6)
    assert 0.5 < result.after.weights / result.before.weights <= 0.6
    result.undo_()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


@pytest.mark.slow
def test_the_result_says_what_went_and_draws_it():
    model = llama()
    result = shrink(model, batches(), size=0.6, layers=1)
    said = str(result)
    assert "of 24 neurons a layer" in said and "1 of 3 layers" in said and "weights stay" in said
    assert result.after.parameters == sum(p.numel() for p in model.parameters())
    assert result.after.num_bytes == 4 * result.after.parameters
    assert math.isclose(result.after.weights / result.before.weights, 0.6, abs_tol=0.05)
    pytest.importorskip("matplotlib")
    assert "<table" in result._repr_html_()


def test_no_sample_that_reaches_a_layer_is_said():
    model = build("t5")
    before = state(model)
    with pytest.raises(ValueError, match="no calibration samples"):
        shrink(model, [], size=0.8)
    assert is_as_before(model, before)
    assert shrink(model, [inputs("t5")], size=0.9).layers
