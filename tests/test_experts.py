"""Experts that are stacked in one tensor are pruned by default, each by its own inputs; routers stay dense."""

import pytest
import torch
from covering import each_once
from families import build, inputs

from prunus import NofM, OneShot, PerLayer, PerRow, Pruner, Ramp, prune
from prunus.eligible import eligible
from prunus.sparsity_report import report

FAMILIES = ("mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3", "granitemoe", "jamba")
INPUT_DIM = {"gpt_oss": 1}  # (expert, in, out); of all others 2


@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_experts_are_found_with_their_axes_and_routers_and_biases_stay_dense(name):
    model = build(name)
    found = eligible(model)
    experts = [weight for weight in found.weights if ".experts." in weight.name]
    assert len(experts) >= 2
    assert {weight.outputs for weight in experts} == {(0, 3 - INPUT_DIM.get(name, 2))}
    assert not any("router" in weight.name or weight.name.endswith("gate.weight") for weight in found.weights)
    assert not any("bias" in weight.name for weight in found.weights)
    prune(model, sparsity=0.5)
    shown = report(model, found)
    assert shown.sparsity == pytest.approx(0.5, abs=1e-4) and shown.sparsity_of_all > 0.25
    assert "% of all" in str(shown)


@pytest.mark.parametrize("select", [PerRow(), NofM(2, 4)], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_rows_and_neighbours_go_along_the_inputs_of_an_expert(name, select):
    model = build(name)
    prune(model, sparsity=0.5, select=select)
    for weight in eligible(model).weights:
        if ".experts." in weight.name:
            rows = weight.parameter.movedim(INPUT_DIM.get(name, 2), 2)
            groups = rows if isinstance(select, PerRow) else rows.unflatten(2, (-1, 4))
            assert ((groups == 0).sum(-1) == groups.shape[-1] // 2).all()


@torch.no_grad()
def reference_norms(model, batch):
    """Norms of what each expert of Mixtral or gpt_oss multiplies, from the routes that its module gets."""
    squares = {}

    def add(module, args, kwargs):
        x, routes, *_ = (*args, *kwargs.values())
        x = x.flatten(0, -2)
        for expert in range(module.num_experts):
            read = x[(routes.reshape(len(x), -1) == expert).any(1)]
            if type(module).__name__ == "GptOssExperts":
                hidden = module._apply_gate(read @ module.gate_up_proj[expert] + module.gate_up_proj_bias[expert])
            else:
                gate, up = (read @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                hidden = module.act_fn(gate) * up
            for key, value in (("gate_up_proj", read), ("down_proj", hidden)):
                sums = squares.setdefault(module, {}).setdefault(key, [0.0] * module.num_experts)
                sums[expert] = sums[expert] + value.double().square().sum(0)

    handles = [
        module.register_forward_pre_hook(add, with_kwargs=True)
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
    ]
    for tokens in batch["input_ids"]:
        model(tokens[None])
    for handle in handles:
        handle.remove()
    return {
        f"{path}.{key}": torch.stack(sums).sqrt()
        for path, module in model.named_modules()
        for key, sums in squares.get(module, {}).items()
    }


def assert_rows_lost_the_least(pruned, dense, norm, dim):
    """Half of each row is zero, and of experts that inputs reached the half with the least |w| ||x||."""
    scores, zero = dense.abs().movedim(dim, 2) * norm.unsqueeze(1), pruned.movedim(dim, 2) == 0
    reached = (norm > 0).any(1)
    lost = scores[reached].argsort(2)[..., : scores.shape[2] // 2]
    assert reached.any() and zero[reached].gather(2, lost).all()
    assert (zero.sum(2) == scores.shape[2] // 2).all()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_wanda_ranks_experts_by_their_own_inputs(name):
    model, batch = build(name), inputs(name)
    how = model.config._experts_implementation
    norms = reference_norms(model, batch)
    dense = {weight.name: weight.parameter.detach().clone() for weight in eligible(model).weights}
    prune(model, [batch], 0.5, score="wanda", repair=None)
    assert model.config._experts_implementation == how and len(norms) == 4
    for key, norm in norms.items():
        assert_rows_lost_the_least(model.get_parameter(key), dense[key], norm, INPUT_DIM.get(name, 2))


@pytest.mark.parametrize(("name", "score"), each_once(["mixtral", "gpt_oss"], ["magnitude", "wanda", "fisher", None]))
def test_experts_go_through_every_way_after_training(name, score):
    model, batch = build(name), inputs(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = prune(model, [batch], 0.5, score=score, repair=None if score else "auto")
    assert result.sparsity == pytest.approx(0.5, abs=0.01)
    experts = [layer for layer in result.layers if ".experts." in layer.name]
    assert len(experts) == 4 and all((layer.error is None) == (score is not None) for layer in experts)
    result.undo_()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_pruned_in_training_to_the_weight(name):
    model, batch = build(name).train(), inputs(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.6, 0, 8), every=2)
    for _ in range(10):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = eligible(model).weights
    zeros = sum(int((weight.parameter == 0).sum()) for weight in weights)
    assert zeros == round(0.6 * sum(weight.parameter.numel() for weight in weights))
    assert any(".experts." in weight.name for weight in weights) and pruner.report().sparsity_of_all > 0.3


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_wanda_ranks_experts_by_their_own_inputs_in_training(name, is_checkpointed):
    model, batch = build(name).train(), inputs(name)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # weights stay, so that every step sees the same inputs
    norms = reference_norms(model, batch)
    how, values = (
        model.config._experts_implementation,
        {key: model.get_parameter(key).detach().clone() for key in norms},
    )
    pruner = Pruner(model, optimizer, score="wanda", select=PerRow(), schedule=OneShot(0.5, 2))
    for _ in range(3):
        with torch.device("cpu"):  # a mode that opens and closes around the model's own products
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.config._experts_implementation == how and pruner.report().sparsity == pytest.approx(0.5, abs=0.01)
    for key, norm in norms.items():
        assert_rows_lost_the_least(model.get_parameter(key), values[key], norm, INPUT_DIM.get(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("select", [PerLayer(), PerRow()], ids=str)
def test_experts_stored_by_inputs_are_repaired_as_those_stored_by_outputs(select):
    """A Mixtral whose experts lie in memory as (expert, in, out) ends with the same weights."""
    model, turned, batch = build("mixtral"), build("mixtral"), inputs("mixtral")
    for layer in turned.model.layers:
        _turn(layer.mlp.experts)
    results = [prune(each, [batch], 0.5, select=select) for each in (model, turned)]
    for one, other in zip(*(result.layers for result in results), strict=True):
        assert one.name == other.name and other.not_repaired == one.not_repaired
        value, found = model.get_parameter(one.name), turned.get_parameter(one.name)
        assert torch.allclose(value, found if value.ndim == 2 else found.transpose(1, 2), rtol=1e-3, atol=1e-4)
        assert one.error == pytest.approx(other.error, rel=1e-3) and one.error < one.mask_error


def _turn(experts):
    """Experts of Mixtral that hold their weights as (expert, in, out) and multiply by them as gpt_oss does."""
    experts.is_transposed = True
    for key, parameter in list(experts.named_parameters()):
        experts.register_parameter(key, torch.nn.Parameter(parameter.detach().transpose(1, 2).contiguous()))

    def forward(x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(experts.num_experts):
            token, place = torch.where(index == expert)
            gate, up = (x[token] @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = (experts.act_fn(gate) * up) @ experts.down_proj[expert]
            out.index_add_(0, token, hidden * weights[token, place, None])
        return out

    experts.forward = forward
