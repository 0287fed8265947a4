"""What held a model before its layers were made sparse holds it again afterwards: optimizers, and a result to undo."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from prunus import prune, save_model, save_sparse
from prunus.sparse import sparsify_, unsparsify_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def linear():
    layer = nn.Linear(100, 24, device=DEVICE).requires_grad_(False)
    layer.weight[torch.rand(24, 100, device=DEVICE) < 0.6] = 0
    return layer


def test_who_holds_a_parameter_finds_it_in_the_model_again():
    model = nn.Sequential(linear(), nn.Linear(24, 8, device=DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [*model.parameters()]
    assert sparsify_(model, least=0.3) == ["0"] and unsparsify_(model) == ["0"]
    assert all(new is old for new, old in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_parameter_that_went_to_another_type_meanwhile_is_a_new_one():
    model = nn.Sequential(linear())
    held = model[0].weight
    sparsify_(model, least=0.3)
    model.to(torch.bfloat16)
    unsparsify_(model)
    assert model[0].weight is not held and model[0].weight.dtype == torch.bfloat16


def test_pruning_is_undone_behind_sparse_layers_and_refused_while_there_are_some():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(DEVICE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = prune(model, [torch.randn(32, 16, device=DEVICE)], sparsity=0.5)
    assert sparsify_(model, least=0.3) == ["0", "2"]
    with pytest.raises(ValueError, match=r"0.weight is kept in a sparse layer: call unsparsify_\(model\) first"):
        result.undo_()
    for masks in (None, result.masks):
        with pytest.raises(ValueError, match="0 is a sparse layer"):
            save_model(model, "nowhere", masks=masks)
    unsparsify_(model)
    result.undo_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="takes a model, got str"):
        sparsify_("folder")


@pytest.mark.parametrize("least", [40, -1, float("nan")])
def test_a_share_that_is_none_is_refused(least):
    with pytest.raises(ValueError, match=r"least is a share of zeros in \[0, 1\], as 0.5"):
        sparsify_(nn.Sequential(linear()), least=least)


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_parameters_of_its_own(copy):
    model = nn.Sequential(linear())
    held, before = model[0].weight, model[0].weight.clone()
    sparsify_(model, least=0.3)
    other = copy(model)
    unsparsify_(other)
    assert other[0].weight is not held and torch.equal(other[0].weight, before)
    other[0].weight.zero_()
    unsparsify_(model)
    assert model[0].weight is held and torch.equal(held, before)


def test_no_file_takes_the_state_of_sparse_layers_and_no_pruning_their_weights(tmp_path):
    model = nn.Sequential(linear())
    sparsify_(model, least=0.3)
    with pytest.raises(ValueError, match=r"0 is a sparse layer, which no file holds: call unsparsify_"):
        save_sparse(model.state_dict(), tmp_path / "model.safetensors")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"its layers are sparse: call unsparsify_"):
        prune(model, sparsity=0.5)


def test_a_parameter_that_was_replaced_is_not_undone_in_silence():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(DEVICE)
    result = prune(model, [torch.randn(32, 16, device=DEVICE)], sparsity=0.5)
    kept = model[2].weight.clone()
    model[0].load_state_dict(deepcopy(model[0].state_dict()), assign=True)
    for call in (result.undo_, result.apply_):
        with pytest.raises(ValueError, match=r"0.weight is no longer the parameter that was pruned.*assign=True"):
            call()
    assert torch.equal(model[2].weight, kept)
