"""Whatever ends or moves a shrinking, the dense model comes back, and what it is compared with is the dense model."""

import sys

import pytest
import torch
from families import build, inputs
from test_shrink import SHORT, batches, is_as_before, llama, logits, state
from torch import nn

from prunus import BlockTuning, shrink
from prunus.oneshot import originals
from prunus.oneshot.cuts import Cuts, _Blocks, _Cut
from prunus.oneshot.shrink import Shrinking
from prunus.oneshot.step import LayerRepair
from prunus.oneshot.tune import WholeLoss
from prunus.oneshot.units import Wanted

pytestmark = pytest.mark.slow

module = sys.modules[Shrinking.__module__]
WHOLE = BlockTuning(epochs=0, whole_epochs=1, batch=4)


def after(call, number=1):
    """A function that interrupts once it has done its work for the ``number``-th time."""
    num_calls = 0

    def interrupted(*args, **kwargs):
        nonlocal num_calls
        returned, num_calls = call(*args, **kwargs), num_calls + 1
        if num_calls == number:
            raise KeyboardInterrupt
        return returned

    return interrupted


@pytest.mark.parametrize(
    ("name", "number", "how"),
    [
        ("plan_of", 1, {"size": 0.6, "layers": 1}),
        ("_shrunk", 1, {"size": 0.6, "layers": 1}),
        ("_size", 2, {"size": 0.6, "layers": 1, "tune": WHOLE}),
        ("_size", 2, {"layers": 1, "tune": WHOLE}),
    ],
    ids=str,
)
def test_an_interruption_after_any_step_leaves_the_model_as_before(monkeypatch, name, number, how):
    model = llama()
    before = state(model)
    monkeypatch.setattr(module, name, after(getattr(module, name), number))
    with pytest.raises(KeyboardInterrupt):
        shrink(model, batches(), **how)
    assert is_as_before(model, before)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interruption_while_slices_are_put_back_puts_all_of_them_back(monkeypatch, number):
    model = llama()
    before = state(model)
    drop = {(f"model.layers.{i}.mlp.up_proj.weight", 0): torch.arange(4) for i in range(3)}
    cuts = Cuts.of(model, drop, [(model.config, "intermediate_size", 20)])
    cuts.apply_()
    monkeypatch.setattr(_Cut, "undo_", after(_Cut.undo_, number))
    with pytest.raises(KeyboardInterrupt):
        cuts.undo_()
    assert is_as_before(model, before) and not cuts.is_applied


def test_an_interruption_of_undo_leaves_the_dense_model(monkeypatch):
    model = llama()
    before = state(model)
    result = shrink(model, batches(), size=0.6, layers=1)
    monkeypatch.setattr(originals, "_write_", after(originals._write_, 2))
    with pytest.raises(KeyboardInterrupt):
        result.undo_()
    assert is_as_before(model, before)


class Refusing:
    """A configuration that does not take a number."""

    num = 2

    def __setattr__(self, key, value):
        raise ValueError("no")


def without_first(numbers=()):
    """Two blocks, and what takes the first of them out."""
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    return model[0], dict(model[0]._modules), Cuts.of_blocks(model, {"0": {"1": "0"}}, numbers)


def test_layers_come_back_where_a_number_cannot_be_set():
    blocks, before, cuts = without_first([(Refusing(), "num", 1)])
    with pytest.raises(ValueError, match="no"):
        cuts.apply_()
    assert dict(blocks._modules) == before and not cuts.is_applied


def test_an_interruption_while_layers_are_put_back_puts_all_of_them_back(monkeypatch):
    blocks, before, cuts = without_first()
    cuts.apply_()
    assert list(blocks) == [before["1"]]
    monkeypatch.setattr(_Blocks, "undo_", after(_Blocks.undo_))
    with pytest.raises(KeyboardInterrupt):
        cuts.undo_()
    assert dict(blocks._modules) == before and not cuts.is_applied


def test_layers_come_back_on_the_device_to_which_the_others_were_moved():
    blocks, _, cuts = without_first()
    cuts.apply_()
    blocks.to("meta")
    cuts.undo_()
    assert {parameter.device.type for parameter in blocks.parameters()} == {"meta"}


class Normed(nn.Module):
    """Two convolutions with a batch norm between them, beside a path that skips them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        return x + self.second(self.norm(self.first(x)).relu())


def test_statistics_of_batch_norms_come_back_where_the_model_was_moved():
    torch.manual_seed(0)
    model = Normed().eval()
    model(torch.randn(4, 3, 6, 6))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = shrink(model, [torch.randn(8, 3, 6, 6)], neurons=3)
    model._apply(lambda tensor: tensor.clone())  # what a move does: parameters stay, buffers are other tensors
    result.undo_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    result.apply_()
    assert len(model.norm.running_mean) == 5


def test_a_buffer_that_a_move_has_replaced_is_whole_again_with_what_the_module_holds():
    model = nn.BatchNorm1d(4)
    cuts = Cuts.of(model, {("running_mean", 0): torch.tensor([1])}, [])
    cuts.apply_()
    model.running_mean = torch.tensor([1.0, 2.0, 3.0])
    cuts.undo_()
    assert model.running_mean.tolist() == [1, 0, 2, 3]


def teachers(monkeypatch, model, data, **how):
    """The outputs of the teacher in each pass of tuning the whole model."""
    seen, call = [], WholeLoss.__call__

    def watched(self, pick):
        def hook(module, args, output):
            if not torch.is_grad_enabled() and len(told) == 0:
                told.append(output.logits.clone())

        told = []
        handle = self.calibration.model.register_forward_hook(hook)
        try:
            return call(self, pick)
        finally:
            handle.remove()
            seen.append((pick, told[0]))

    monkeypatch.setattr(WholeLoss, "__call__", watched)
    shrink(model, data, tune=WHOLE, **how)
    monkeypatch.undo()
    return seen


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_the_teacher_of_a_model_without_some_layers_is_the_dense_model_in_eval_mode(monkeypatch, offload):
    dense = logits(llama())
    model = llama().train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    for pick, output in teachers(monkeypatch, model, batches(), layers=1, offload=offload):
        torch.testing.assert_close(output, dense[pick.rows], rtol=1e-4, atol=1e-4)
    assert all(part.training for part in model.modules())


def test_the_teacher_of_a_model_without_some_experts_has_all_of_them(monkeypatch):
    data = [{key: value.repeat(4, 1) for key, value in inputs("qwen3_moe").items()}]
    with torch.no_grad():
        dense = build("qwen3_moe").eval()(**data[0]).logits
    for pick, output in teachers(monkeypatch, build("qwen3_moe").eval(), data, experts=0.5):
        torch.testing.assert_close(output, dense[pick.rows], rtol=1e-4, atol=1e-4)


def test_layers_that_went_are_moved_onto_the_device_for_the_passes_of_the_teacher(monkeypatch):
    model, moved = llama(), []
    result = shrink(llama(), batches(), layers=1)
    block = model.get_submodule(result.dropped.names[0])
    homes = {parameter: parameter.data_ptr() for parameter in block.parameters()}
    forward = block.mlp.forward

    def watched(x):
        moved.append(all(parameter.data_ptr() != home for parameter, home in homes.items()))
        return forward(x)

    block.mlp.forward = watched
    shrink(model, batches(), layers=1, tune=WHOLE, offload="cpu")
    assert moved and all(moved)


def test_frozen_weights_count_and_are_shrunk_as_others_and_stay_frozen():
    free, half, frozen = llama(), llama(), llama().requires_grad_(False)
    half.model.layers[1].requires_grad_(False)
    for model in (free, half, frozen):
        shrink(model, batches(), size=0.6, layers=1)
    for model in (half, frozen):
        assert is_as_before(model, state(free))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_a_wrapper_that_gathers_gradients_by_parameter_is_refused(monkeypatch):
    class Distributed(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    model = llama()
    with pytest.raises(ValueError, match="shrink the model inside it, then wrap it again"):
        shrink(Distributed(model), batches(), size=0.6)


def test_the_cost_has_the_passes_that_chose_layers_and_those_of_mixtures():
    result = shrink(llama(), batches(), layers=1)
    assert result.cost.forwards >= 12 * 4 and result.cost.peak_bytes and "layers" in str(result.cost)
    plain = Shrinking(llama(), batches()).run(Wanted(size=0.5))
    measured = shrink(llama(), batches(), size=0.5, split="measured")
    assert measured.cost.forwards > plain.cost.forwards and measured.cost.parts["tune"] > 0
    assert sum(measured.cost.parts.values()) <= measured.seconds


@pytest.mark.parametrize("other", [{"score": torch.nn.functional.relu}, {"refit": False}], ids=["score", "refit"])
def test_a_folder_of_another_score_is_refused(tmp_path, other):
    Shrinking(llama(), batches(), state=tmp_path / "state").run(Wanted(neurons=4))
    model = llama()
    before = state(model)
    with pytest.raises(ValueError, match="another folder"):
        Shrinking(model, batches(), state=tmp_path / "state", **other).run(Wanted(neurons=4))
    assert is_as_before(model, before)


def test_a_folder_of_another_number_of_layers_is_refused_by_that_number(tmp_path):
    shrink(llama(), batches(), layers=1, neurons=4, state=tmp_path / "state")
    with pytest.raises(ValueError, match=r"has layers = 1, not 2; give another folder"):
        shrink(llama(), batches(), layers=2, neurons=4, state=tmp_path / "state")


def test_adapters_are_to_be_merged_first():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for part in (model, model.base_model.model):
        with pytest.raises(ValueError, match="merge them first"):
            shrink(part, batches(), size=0.6)


def test_layers_that_no_sample_reached_are_said():
    result = shrink(llama(), batches(), neurons=4)
    assert "Not solved" not in str(result)
    name = result.layers[1].name
    result.level.repairs[name] = LayerRepair(not_repaired="no sample reached it")
    assert f"Not solved, as no sample reached them: 1 layers, {name} first." in str(result)


def test_shrinkings_are_undone_in_order_and_no_other():
    model = llama()
    states, results = [state(model)], []
    for how in ({"neurons": 4, "layers": 1}, {"neurons": 4, "heads": 1, "tune": SHORT}):
        results.append(shrink(model, batches(), **how))
        states.append(state(model))
    with pytest.raises(ValueError, match="changed after it was shrunk"):
        results[0].undo_()
    for result, before in zip(reversed(results), reversed(states[:-1]), strict=True):
        result.undo_()
        result.undo_()
        assert is_as_before(model, before)
