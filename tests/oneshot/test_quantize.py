"""Quantising changes kept values alone: zeros and counts stay, what is lost is told by layer, and all can be undone."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from causal_models import FAMILIES, causal_model
from probe_checks import assert_same, snapshot
from probe_models import convolutions, llama, mlp
from torch import nn

from prunus import BlockTuning, Global, Repair, prune, quantize, shrink
from prunus.grids import check_on_grid, on_grids
from prunus.oneshot import Probe


def causal(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = causal_model(name, sparsity=0.5).to(dtype)
    return model, [torch.randint(0, model.config.vocab_size, (8, 24))]


def case_of(make):
    if make in FAMILIES:
        return causal(make)
    return convolutions()


def zeros_of(model):
    return {name: parameter == 0 for name, parameter in model.named_parameters()}


CASES = ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM", "convolutions"]


@pytest.mark.parametrize("with_batches", [True, False])
@pytest.mark.parametrize("make", CASES)
def test_zeros_stay_and_weights_lie_on_grids_until_it_is_undone(make, with_batches):
    model, batches = case_of(make)
    before, zeros = snapshot(model), zeros_of(model)
    result = quantize(model, batches if with_batches else (), bits=4, progress=False)
    grids = on_grids(model)
    assert set(grids) == set(result.level.weights) == {layer.name for layer in result.layers if layer.bits == 4}
    for name, on_grid in grids.items():
        check_on_grid(name, model.get_parameter(name), on_grid)
    for name, was in zeros_of(model).items():
        assert torch.equal(was, zeros[name])
    result.undo_()
    assert_same(before, snapshot(model))
    assert not on_grids(model)
    result.apply_()
    assert set(on_grids(model)) == set(grids)
    result.undo_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_fewer_bits_lose_more_and_every_layer_says_what_it_lost(bits, dtype):
    model, batches = causal("LlamaForCausalLM", dtype)
    result = quantize(model, batches, bits, progress=False)
    errors = [layer.bits_error for layer in result.layers]
    assert all(error is not None and error < {8: 1e-3, 4: 0.1, 3: 0.4}[bits] for error in errors)
    for name, on_grid in on_grids(model).items():
        check_on_grid(name, model.get_parameter(name), on_grid)
    if dtype == torch.float32:
        less = quantize(deepcopy(model), batches, 8, progress=False)
        assert max(layer.bits_error for layer in less.layers) < max(errors) or bits == 8


HOWS = {
    "solved": {},
    "tuned": {"repair": Repair(tune=BlockTuning(epochs=1, whole_epochs=1))},
    "masks": {"repair": None, "score": "wanda", "select": Global()},
    "magnitude": {"without": True},
}


@pytest.mark.parametrize("how", HOWS)
def test_pruning_with_bits_has_exact_counts_and_ends_on_grids(how):
    model, batches = causal("LlamaForCausalLM")
    before, options = snapshot(model), dict(HOWS[how])
    batches = () if options.pop("without", False) else batches
    result = prune(model, batches, 0.75, bits=4, progress=False, **options)
    assert result.num_pruned == round(0.75 * result.num_weights)
    assert set(on_grids(model)) == set(result.level.weights)
    for name, on_grid in on_grids(model).items():
        check_on_grid(name, model.get_parameter(name), on_grid)
    assert ("error, few bits" in result._repr_html_()) and "in 4 bits" in repr(result)
    values = snapshot(model)
    result.undo_()
    assert_same(before, snapshot(model))
    result.apply_()
    assert_same(values, snapshot(model))


def test_bits_a_weight_follow_the_formula():
    model, s = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512)), 0.5
    result = prune(model, (), s, bits=4, progress=False)
    expected = 1 + (1 - s) * 4 + 16 * (64 * 4 + 512 * 1) / (2 * 512 * 64)
    assert result.level.bits_a_weight == pytest.approx(expected)
    assert f"{expected:.2f} bits a weight" in repr(result)
    dense = nn.Linear(256, 8)
    assert quantize(nn.Sequential(dense), only="*", include="*", progress=False).level.bits_a_weight == 4 + 16 / 128


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(tmp_path):
    class Killed(Exception):
        pass

    def kill(done, total, what):
        if done >= 9:
            raise Killed

    for call in (partial(quantize, bits=4), partial(prune, sparsity=0.75, bits=4)):
        model, batches = causal("LlamaForCausalLM")
        whole = deepcopy(model)
        call(whole, batches, progress=False)
        before, state = snapshot(model), tmp_path / call.func.__name__
        with pytest.raises(Killed):
            call(model, batches, state=state, progress=kill)
        assert_same(before, snapshot(model))
        assert not on_grids(model)
        result = call(model, batches, state=state, progress=False)
        assert_same(snapshot(whole), snapshot(model))
        for name, on_grid in on_grids(whole).items():
            assert torch.equal(on_grid.scales, on_grids(model)[name].scales)
            assert on_grid.grid == on_grids(model)[name].grid
        assert result.level.grids.keys() == on_grids(whole).keys()


def test_what_a_later_call_changes_is_off_its_grid_and_comes_back_to_it():
    model, batches = causal("LlamaForCausalLM")
    quantize(model, batches, progress=False)
    grids, before = on_grids(model), snapshot(model)
    again = prune(model, batches, 0.75, progress=False)
    assert not on_grids(model)
    again.undo_()
    assert_same(before, snapshot(model))
    assert on_grids(model).keys() == grids.keys()
    masks = prune(model, (), 0.75, progress=False)  # zeros alone: what stays is still on its grid
    assert on_grids(model).keys() == grids.keys()
    masks.undo_()
    more = quantize(model, batches, 3, progress=False)
    assert {on_grid.grid.bits for on_grid in on_grids(model).values()} == {3}
    more.undo_()
    assert {on_grid.grid.bits for on_grid in on_grids(model).values()} == {4}


def test_adapters_are_to_be_merged_first():
    case = mlp()
    case.model.peft_config = {"default": object()}
    with pytest.raises(ValueError, match="the model has adapters; merge them first"):
        quantize(case.model, case.batches)


@pytest.mark.parametrize("bits", [5, 0, True, "4", 4.5, None])
def test_bits_that_are_not_offered_are_refused(bits):
    case = mlp()
    with pytest.raises(ValueError, match="bits must be 8, 4 or 3, got"):
        quantize(case.model, case.batches, bits)


def test_values_that_are_not_finite_a_probe_and_shrinking_afterwards_are_refused_in_one_line():
    case = llama(num_layers=2)
    model, batches = case.model, case.batches
    before = snapshot(model)
    with pytest.raises(ValueError, match="a probe and bits cannot be combined"):
        prune(model, batches, 0.5, bits=4, probe=Probe())
    name, parameter = next((n, p) for n, p in model.named_parameters() if "q_proj" in n)
    first = parameter[0, 0].item()
    parameter.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"{name} has values that are not finite"):
        quantize(model)
    assert not on_grids(model)
    parameter.data[0, 0] = first
    assert_same(before, snapshot(model))
    quantize(model, batches, progress=False)
    with pytest.raises(ValueError, match="is quantised: shrink the model first"):
        shrink(model, batches, size=0.5)


def test_a_grouped_transposed_convolution_stays_as_it_is_and_others_do_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3))
    before = model[0].weight.clone()
    result = quantize(model, [torch.randn(4, 4, 6, 6)], progress=False)
    assert torch.equal(model[0].weight, before) and set(on_grids(model)) == {"2.weight"}
    assert result.notes == ["Not in few bits, 1 of 2 layers: 0.weight (its shape does not tell its rows)."]
    assert f"{model[2].weight.numel()} weights in 1 of 2 layers" in repr(result)


@pytest.mark.parametrize("tune", [False, True])
def test_weights_that_a_later_call_leaves_out_stay_on_their_grids(tune):
    model, batches = causal("LlamaForCausalLM")
    quantize(model, batches, only="*q_proj*", progress=False)
    first = on_grids(model)
    second = quantize(model, batches, only="*k_proj*", progress=False)
    assert on_grids(model).keys() == first.keys() | second.level.grids.keys() > first.keys()
    repair = Repair(tune=BlockTuning(epochs=1, whole_epochs=1)) if tune else "auto"
    prune(model, batches, 0.75, only="*v_proj*", repair=repair, progress=False)
    assert on_grids(model).keys() == first.keys() | second.level.grids.keys()
    for name, on_grid in on_grids(model).items():
        check_on_grid(name, model.get_parameter(name), on_grid)


@pytest.mark.slow
@pytest.mark.parametrize("is_undone", [False, True])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_the_dense_model_has_the_grids_that_weights_had_before(is_quantised, is_undone):
    model, batches = causal("LlamaForCausalLM")
    if is_quantised:
        quantize(model, batches, 8, only="*q_proj*", progress=False)
    before, values = on_grids(model), deepcopy(model.state_dict())
    result = prune(model, batches, 0.75, bits=4, progress=False)
    if is_undone:
        result.undo_()
    now = on_grids(model)
    dense = result.dense()
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in values.items())
    assert {name: own.grid for name, own in on_grids(dense).items()} == {name: own.grid for name, own in before.items()}
    for name, on_grid in on_grids(dense).items():
        check_on_grid(name, dense.get_parameter(name), on_grid)
    assert {name: own.grid for name, own in on_grids(model).items()} == {name: own.grid for name, own in now.items()}


def test_weights_with_and_without_grids_are_pruned_again_after_an_undo():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3))
    result = prune(model, (), 0.5, bits=4, progress=False)
    values = snapshot(model)
    result.undo_()
    result.apply_()
    assert_same(values, snapshot(model))
    assert result.num_pruned == result.num_weights // 2


def test_a_result_says_which_weights_were_only_rounded_and_why():
    class Unreached(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.last = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.last(self.used(x).relu())

    batches = [torch.randn(20, 8)]
    note = "Rounded to the nearest values, 1 of 3 layers: unused.weight (no sample reached it)."
    assert quantize(Unreached(), batches, progress=False).notes == [note]
    assert quantize(Unreached(), progress=False).notes == []
    masks = {"score": "magnitude", "repair": None}
    assert prune(Unreached(), batches, 0.5, bits=4, progress=False, **masks).notes == [note]
    solved = prune(Unreached(), batches, 0.5, bits=4, progress=False).notes
    assert solved == ["Pruned but not repaired, 1 of 3 layers: unused.weight (no sample reached it)."]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_a_weight_without_elements_stays_as_it_is(shape):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].empty = nn.Linear(*reversed(shape))
    for batches in ([torch.randn(20, 8)], ()):
        result = quantize(model, batches, include="*", progress=False)
        assert set(on_grids(model)) == {"0.weight", "2.weight"} and result.notes == []
        assert prune(model, batches, 0.5, include="*", bits=4, progress=False).num_pruned == 64
