"""What held a model before its layers were made sparse holds it again afterwards: optimizers, and a result to undo."""

import pickle
import warnings
from copy import deepcopy

import pytest
import torch
from causal_models import causal_model
from torch import nn

from prunus import load_model, prune, save_model, save_sparse
from prunus.sparse import linear as layers
from prunus.sparse import load_packed, sparsify_, unsparsify_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COPIES = {
    "itself": lambda model: model,
    "deepcopy": deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


def linear(inputs=100, outputs=24):
    layer = nn.Linear(inputs, outputs, device=DEVICE).requires_grad_(False)
    layer.weight[torch.rand_like(layer.weight) < 0.6] = 0
    return layer


def two_layers():
    return nn.Sequential(linear(), linear(24, 8))


def test_who_holds_a_parameter_finds_it_in_the_model_again_unless_it_went_to_another_type():
    model = nn.Sequential(linear(), nn.Linear(24, 8, device=DEVICE))
    held = [*model.parameters()]
    assert sparsify_(model, least=0.3) == ["0"] and unsparsify_(model) == ["0"]
    assert all(new is old for new, old in zip(model.parameters(), held, strict=True))
    sparsify_(model, least=0.3)
    unsparsify_(model.to(torch.bfloat16))
    assert model[0].weight is not held[0] and model[0].weight.dtype == torch.bfloat16


def test_pruning_is_undone_behind_sparse_layers_and_refused_while_there_are_some():
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(DEVICE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = prune(model, [torch.randn(32, 16, device=DEVICE)], sparsity=0.5)
    assert sparsify_(model, least=0.3) == ["0", "2"]
    with pytest.raises(ValueError, match=r"0.weight is in a sparse layer: call unsparsify_\(model\) first"):
        result.undo_()
    for masks in (None, result.masks):
        with pytest.raises(ValueError, match="0 is a sparse layer"):
            save_model(model, "nowhere", masks=masks)
    unsparsify_(model)
    result.undo_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_model_and_a_share_that_is_none_are_refused():
    with pytest.raises(ValueError, match="takes a model, got str"):
        sparsify_("folder")
    for least in (40, -1, float("nan")):
        with pytest.raises(ValueError, match=r"least must be a share of zeros in \[0, 1\], such as 0.5"):
            sparsify_(nn.Sequential(linear()), least=least)


@pytest.mark.parametrize("copy", ["deepcopy", "pickle"])
def test_a_copy_has_parameters_of_its_own(copy):
    model = nn.Sequential(linear())
    held, before = model[0].weight, model[0].weight.clone()
    sparsify_(model, least=0.3)
    other = COPIES[copy](model)
    unsparsify_(other)
    assert other[0].weight is not held and torch.equal(other[0].weight, before)
    other[0].weight.zero_()
    unsparsify_(model)
    assert model[0].weight is held and torch.equal(held, before)


def test_no_file_takes_the_state_of_sparse_layers_and_no_pruning_their_weights(tmp_path):
    model = nn.Sequential(linear())
    sparsify_(model, least=0.3)
    with pytest.raises(ValueError, match=r"0 is a sparse layer, which cannot be saved: call unsparsify_"):
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


REFUSED = r"the model has sparse layers.*call prunus\.sparse\.unsparsify_\(model\)"


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("part", ["model", "model.layers", ""])
def test_save_pretrained_writes_no_weights_of_sparse_layers_and_all_of_dense_ones(part, copy, tmp_path):
    model = causal_model(sparsity=0.6, num_hidden_layers=1).to(DEVICE)
    before = deepcopy(model.state_dict())
    assert sparsify_(model.get_submodule(part), least=0.5)  # a part knows nothing of the model around it
    model = COPIES[copy](model)
    with pytest.raises(ValueError, match=REFUSED):
        model.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"]
    if part == "":  # as trainers do it
        with pytest.raises(ValueError, match=REFUSED):
            model.save_pretrained(tmp_path, state_dict=model.state_dict())
        assert not list(tmp_path.iterdir())
    assert model.state_dict() and pickle.dumps(model)  # which others may still ask for
    unsparsify_(model)
    model.save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name].to(DEVICE), value) for name, value in before.items())


def test_a_packed_model_is_refused_by_save_pretrained_and_learns_once_it_is_dense(tmp_path):
    save_model(causal_model(sparsity=0.6, num_hidden_layers=1), tmp_path / "small")
    model = load_packed(tmp_path / "small", least=0.5)
    with pytest.raises(ValueError, match=REFUSED):
        model.save_pretrained(tmp_path / "plain", state_dict=model.state_dict())
    assert unsparsify_(model)
    wanted = {name: parameter.requires_grad for name, parameter in load_model(tmp_path / "small").named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted


def steps(model):
    """What is said in two steps; the input has its gradients."""
    layers.warn_of_training.cache_clear()
    x = torch.randn(4, 100, device=DEVICE, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x).sum().backward()
    assert x.grad.any()
    return [str(each.message) for each in said]


def test_training_a_model_of_sparse_layers_is_said_to_be_in_vain_once_and_inputs_have_gradients():
    model = two_layers().requires_grad_(True)
    assert sparsify_(model, least=0.3) == ["0", "1"]
    (said,) = steps(model)
    assert "do not train" in said and "unsparsify_(model)" in said and "model.eval()" in said and "\n" not in said


def test_nothing_is_said_of_frozen_layers_of_inference_and_of_dense_layers():
    frozen, evaluated, dense = (two_layers() for _ in range(3))
    evaluated.requires_grad_(True).eval()
    assert sparsify_(frozen, least=0.3) and sparsify_(evaluated, least=0.3)
    assert steps(frozen) == steps(evaluated) == steps(dense.requires_grad_(True)) == []
    assert sparsify_(dense, least=0.3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        dense(torch.randn(4, 100, device=DEVICE))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_is_changed_in_inference_mode_passes_gradients_and_learns_after_it(is_loaded):
    model = two_layers().requires_grad_(True)
    with torch.inference_mode(not is_loaded):
        sparsify_(model, least=0.3)
    with torch.inference_mode():
        if is_loaded:
            model.load_state_dict(deepcopy(model.state_dict()))
        model(torch.randn(2, 100, device=DEVICE))
    x = torch.randn(2, 100, device=DEVICE, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.any()
    with torch.inference_mode():
        assert unsparsify_(model) == ["0", "1"]
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(parameter.grad is not None and not parameter.is_inference() for parameter in model.parameters())
