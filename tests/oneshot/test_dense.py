"""The dense model comes back as a module of its own; a model that was trained after pruning is not undone."""

from copy import deepcopy
from functools import partial
from types import MethodType

import pytest
import torch
from covering import each_once
from families import assert_equal_models, build, inputs
from probe_models import cnn, convolutions, llama, mlp
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from toys import batch, net, train

from prunus import AdamWPrune, BlockTuning, Pruner, Repair, prune, shrink
from prunus.oneshot import Probe
from prunus.oneshot.changed import is_overlapping
from prunus.oneshot.originals import SAMPLE, Originals, sums_of_bits

MODELS = {"mlp": mlp, "cnn": cnn, "llama": partial(llama, num_layers=2)}
MASKS = {"score": "magnitude", "repair": None}
PROBE = {"score": "magnitude", "probe": Probe(0.1, schedule="joint")}
WAYS = {
    "masks": MASKS,
    "repair": {},
    "tuned": {"repair": Repair(tune=BlockTuning(epochs=1, whole_epochs=1, batch=4))},
    "probe": PROBE,
    "probe, repair": PROBE | {"repair": Repair(iterations=3)},
    "offload": {"offload": "cpu"},
    "nothing": {"sparsity": 0.0},
}
DTYPES = (torch.float32, torch.bfloat16)


def pruned(make, way, dtype=torch.float32):
    """A model, what it was before, and the result of pruning it."""
    case = MODELS[make](dtype)
    dense, options = deepcopy(case.model), {"sparsity": 0.5} | WAYS[way]
    if way == "offload" and make == "mlp":
        options.pop("offload")
    return case, dense, prune(case.model, case.batches, loss=case.loss, **options)


def tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def assert_same_tensors(model, other):
    found, wanted = tensors(model), tensors(other)
    assert list(found) == list(wanted) and list(model.state_dict()) == list(other.state_dict())
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and tensor.shape == wanted[name].shape, name
        assert torch.equal(tensor, wanted[name]), name


def storages(model):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(model).values() if tensor.numel()}


@pytest.mark.parametrize(("make", "way", "dtype"), each_once(MODELS, WAYS, DTYPES), ids=str)
def test_the_dense_module_has_every_bit_of_the_model_before_and_shares_nothing_with_the_pruned_one(make, way, dtype):
    case, before, result = pruned(make, way, dtype)
    after = deepcopy(case.model.train())
    dense = result.dense()
    assert type(dense) is type(before)
    assert_same_tensors(dense, before)
    assert_same_tensors(case.model, after)
    assert not storages(dense) & storages(case.model)
    assert not set(dense.modules()) & set(case.model.modules())
    assert not any(module.training for module in dense.modules()) and case.model.training
    assert not any(p.requires_grad for p in dense.parameters()) and all(p.requires_grad for p in after.parameters())
    if make == "llama":
        assert dense.lm_head.weight is dense.model.embed_tokens.weight
    assert_same_tensors(result.dense(), before)


@pytest.mark.parametrize("make", MODELS)
def test_repaired_weights_take_the_stored_memory(make):
    case, _, result = pruned(make, "tuned")
    stored, dense = result.level.originals.whole, tensors(result.dense())
    names = {tensor: name for name, tensor in tensors(case.model).items()}
    assert len(stored) > len(result.level.weights)
    for tensor, values in stored.items():
        assert dense[names[tensor]].data_ptr() == values.data_ptr()
    assert make != "cnn" or any(name.endswith("running_var") for tensor, name in names.items() if tensor in stored)


@pytest.mark.parametrize("way", ["masks", "probe", "probe, repair", "tuned"])
def test_what_the_result_does_later_never_changes_the_dense_module(way):
    case, before, result = pruned("cnn", way)
    after, modules = deepcopy(case.model), [result.dense()]
    for _ in range(2):
        result.undo_()
        assert_same_tensors(case.model, before)
        modules.append(result.dense())
        result.apply_()
        assert_same_tensors(case.model, after)
        modules.append(result.dense())
        with result.masks_alone():
            pass
        assert_same_tensors(case.model, after)
        modules.append(result.dense())
    if "probe" in way:
        result.retake_(0.5)
        modules.append(result.dense())
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.fill_(7)
    for dense in modules:
        assert_same_tensors(dense, before)


def test_a_tensor_that_was_changed_several_times_is_what_it_was_before_the_first_change():
    torch.manual_seed(0)
    for ways in (["part", "part"], ["part", "whole"], ["whole", "part"], ["part", "whole", "part"]):
        originals, tensor = Originals(), torch.randn(7, 5)
        before = tensor.clone()
        for way in ways:
            if way == "part":
                originals.prune_(tensor, torch.rand(7, 5) < 0.5)
            else:
                originals.save_all(tensor)
                tensor += 1
        now, lent = tensor.clone(), originals.lend()[tensor]
        assert torch.equal(lent, before) and torch.equal(tensor, now)
        originals.restore_()
        assert torch.equal(tensor, before) and torch.equal(lent, before)


def test_hooks_stay_behind_except_for_those_of_torch_and_of_the_model_itself():
    class Counting(nn.Linear):
        num = 0

        def __init__(self):
            super().__init__(8, 8)
            self.register_forward_hook(self.count)

        def count(self, *_):
            self.num += 1

    calls, own, normed = [], Counting(), spectral_norm(nn.Linear(8, 4))
    model = nn.Sequential(own, normed, nn.Linear(4, 3)).eval()
    result = prune(model, [torch.randn(20, 8)], 0.5, **MASKS)

    class Recorder:
        def __deepcopy__(self, memo):
            raise AssertionError("a hook was copied")

        def __call__(self, *_):
            calls.append(model)

    recorder = Recorder()
    for module in model.modules():
        module.register_forward_hook(recorder.__call__)
        module.register_forward_hook(lambda *_: calls.append(model), always_call=True)
        module.register_forward_pre_hook(lambda *_: calls.append(model), with_kwargs=True)
        module.register_full_backward_hook(recorder.__call__)
    dense, num = result.dense(), own.num
    x = torch.randn(2, 8, requires_grad=True)
    dense(x).sum().backward()
    assert not calls and own.num == num and dense[0].num == num + 1
    assert len(dense[1]._forward_pre_hooks) == 1 and dense[1].weight.data_ptr() != normed.weight.data_ptr()
    model(x)
    assert calls


def test_models_of_transformers_give_their_hidden_states_as_before():
    case = llama(torch.float32)
    wanted = case.model.eval()(**case.batches[0], output_hidden_states=True).hidden_states
    dense = prune(case.model, case.batches, 0.5).dense()
    states = dense(**case.batches[0], output_hidden_states=True).hidden_states
    assert len(states) == len(wanted) and all(torch.equal(a, b) for a, b in zip(states, wanted, strict=True))
    assert dense.config is not case.model.config


def refused(result, what):
    with pytest.raises(ValueError) as error:
        result.dense()
    line = str(error.value)
    assert "cannot be copied, so dense() does not work; load the dense model again" in line and what in line
    assert "\n" not in line


def test_what_cannot_be_copied_is_refused_in_one_line_and_the_model_stays():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    before, result = deepcopy(model), prune(model, sparsity=0.5)
    after = deepcopy(model)
    model.kept = model(torch.randn(2, 6))
    refused(result, "deepcopy")
    del model.kept
    forward = model[1].forward
    for wrapped in (
        lambda x: forward(x) + 1,
        MethodType(lambda self, x: forward(x) + 1, model[1]),
        partial(lambda scale, x: forward(x) * scale, 2.0),
        lambda x, inner=model[1]: inner(x),
    ):
        model[1].forward = wrapped
        refused(result, "1.forward is a function that calls the model itself")
    model[1].forward = partial(nn.Linear.forward, model[1])
    dense = result.dense()
    assert_same_tensors(dense, before)
    assert torch.equal(dense(torch.ones(1, 6)), before(torch.ones(1, 6)))
    del model[1].forward
    model[1].__class__ = type("Single", (nn.Linear,), {"__deepcopy__": lambda self, memo: self})
    refused(result, "its __deepcopy__ does not copy 1.weight")
    assert_same_tensors(model, after)
    result.undo_()
    assert_same_tensors(model, before)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
        self.register_buffer("scale", torch.randn(3), persistent=False)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1]) * self.scale


def parametrized():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4))


def overlapping():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = nn.Parameter(model[0].weight.data)
    return model


ODD = {
    "recurrent": (Recurrent, (20, 5, 6), {"include": "lstm.weight*"}),
    "parametrized": (parametrized, (20, 6), {}),
    "overlapping": (overlapping, (20, 6), {}),
    "channels last": (lambda: convolutions()[0].to(memory_format=torch.channels_last).float(), (9, 2, 8, 7), {}),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("repair", ["auto", None])
def test_odd_models_come_back_too(name, repair):
    make, shape, options = ODD[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    before = deepcopy(model)
    assert is_overlapping(model) == (name == "overlapping")
    result = prune(model, [x], 0.5, score="magnitude", repair=repair, **options)
    after = deepcopy(model)
    dense = result.dense()
    assert_same_tensors(dense, before)
    assert_same_tensors(model, after)
    assert torch.equal(dense(x), before(x)) and not torch.equal(model(x), before(x))
    assert not storages(dense) & storages(model)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mixtral", {"experts": 0.5}),
        ("llama", {"size": 0.7}),
        ("llama", {"layers": 1, "neurons": 0.5}),
        ("bert", {"size": 0.8}),
    ],
    ids=str,
)
def test_removed_units_are_in_the_dense_module_and_stay_out_of_the_model(name, how):
    model, inner = build(name), inputs(name)
    before = deepcopy(model)
    result = shrink(model, [inner], **how)
    after, config, parameters = deepcopy(model), model.config.to_dict(), list(model.parameters())
    dense = result.dense()
    assert_equal_models(dense, before, inner)
    assert dense.config.to_dict() == before.config.to_dict() and model.config.to_dict() == config
    assert_equal_models(model, after, inner)
    assert all(own is was for own, was in zip(model.parameters(), parameters, strict=True))
    assert not storages(dense) & storages(model)
    result.undo_()
    assert_equal_models(result.dense(), before, inner)
    assert_equal_models(model, before, inner)
    result.apply_()
    assert_equal_models(model, after, inner)
    next(iter(model.parameters())).data += 1
    with pytest.raises(ValueError, match="trained or changed after it was shrunk"):
        result.undo_()


def calls(result):
    return {
        "undo_": result.undo_,
        "apply_": result.apply_,
        "dense": result.dense,
        "retake_": lambda: result.retake_(0.5),
        "masks_alone": lambda: result.masks_alone().__enter__(),
    }


def assert_refused(result, model, first):
    """Every call that needs the model as pruning left it is refused in one line, and changes nothing."""
    before = deepcopy(model)
    for name, call in calls(result).items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == (
            f"the model was trained or changed after it was pruned (first in {first}); {name} would bring back "
            "only what pruning changed; load the dense model again, or take result.dense() before you train"
        )
    assert_same_tensors(model, before)


def zeros_kept(model):
    optimizer = AdamWPrune(model.parameters(), lr=0.01)
    Pruner(model, optimizer, masks="zeros")
    return optimizer


@pytest.mark.parametrize("optimizer", [lambda model: torch.optim.AdamW(model.parameters(), 1e-5), zeros_kept])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_was_trained_is_refused_until_its_bits_are_back(optimizer, dtype):
    model = net(dtype=dtype)
    before, samples = deepcopy(model), [batch(0, dtype)]
    result = prune(model, samples, 0.5, score="magnitude", probe=Probe(0.5, schedule="joint"), loss=square)
    trainer, bits = optimizer(model), deepcopy(model.state_dict())
    dense = result.dense()
    train(model, trainer, range(2))
    assert_refused(result, model, "conv.weight")
    assert_same_tensors(dense, before)
    model.load_state_dict(bits)
    assert_same_tensors(result.dense(), before)
    result.undo_()
    assert_same_tensors(model, before)


def square(output, _=None):
    return output.square().mean()


def test_one_parameter_that_learned_is_enough_even_where_nothing_else_may_be_pruned():
    model = net()
    result = prune(model, [batch(0)], 0.5, probe=Probe(0.5, schedule="joint"), score="magnitude", loss=square)
    model.requires_grad_(False)
    model.norm.bias.requires_grad_(True)
    train(model, torch.optim.SGD([model.norm.bias], 1e-3), range(1))
    assert_refused(result, model, "norm.bias")


def test_after_undo_a_trained_model_is_refused_except_by_undo():
    model = net()
    result = prune(model, [batch(0)], 0.5, probe=Probe(0.5, schedule="joint"), score="magnitude", loss=square)
    result.undo_()
    train(model, torch.optim.SGD(model.parameters(), 1e-2), range(1))
    learned = deepcopy(model)
    result.undo_()
    assert_same_tensors(model, learned)
    train(model, torch.optim.SGD(model.parameters(), 1e-2), range(1))
    for name, call in calls(result).items():
        if name != "undo_":
            with pytest.raises(ValueError, match=rf"after undo_ restored it \(first in .*\); {name} is for"):
                call()


@pytest.mark.parametrize("make", MODELS)
def test_a_pruning_on_top_is_undone_first(make):
    case, before, first = pruned(make, "repair")
    second = prune(case.model, case.batches, 0.8, loss=case.loss)
    with pytest.raises(ValueError, match="trained or changed after it was pruned"):
        first.undo_()
    second.undo_()
    first.undo_()
    first.undo_()
    assert_same_tensors(case.model, before)


@pytest.mark.parametrize("way", ["masks", "repair"])
def test_a_model_that_moved_or_was_wrapped_or_laid_out_anew_is_undone_with_its_buffers(way):
    case, before, result = pruned("cnn", way)
    after = deepcopy(case.model)
    for change in (
        lambda model: model.double().float(),  # other buffers, as on another device, with the same bits
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: torch.compile(model, backend="eager"),
        lambda model: model.requires_grad_(False).train(),
    ):
        change(case.model)
        assert_same_tensors(result.dense(), before)
        result.undo_()
        assert_same_tensors(case.model, before)
        change(case.model)
        result.apply_()
        assert_same_tensors(case.model, after)
    case.model.bfloat16()
    with pytest.raises(ValueError, match=r"trained or changed after it was pruned \(first in stem.weight\)"):
        result.undo_()


def test_a_result_is_undone_after_a_call_that_failed_half_way():
    case, before, result = pruned("cnn", "probe, repair")

    def fail():
        case.model.stem.weight.data += result.level.originals.save_all(case.model.stem.weight)
        raise KeyboardInterrupt

    result.level.repair_again = fail
    with pytest.raises(KeyboardInterrupt):
        result.retake_(0.5)
    assert not torch.equal(case.model.stem.weight, before.stem.weight)
    result.undo_()
    assert_same_tensors(case.model, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_bit_of_every_element_counts_in_the_sum(dtype):
    torch.manual_seed(0)
    for shape in ((), (1,), (3, 2)):
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
        as_bytes, before = model.w.data.view(-1).view(torch.uint8), sums_of_bits(model)
        for place in range(len(as_bytes)):
            for bit in range(8):
                as_bytes[place] ^= 1 << bit
                assert sums_of_bits(model) != before
                as_bytes[place] ^= 1 << bit
        assert sums_of_bits(model) == before


def test_changes_that_cancel_and_signs_and_not_a_number_and_nothing_at_all_are_told_apart():
    model = nn.Module()
    model.none, model.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor([1.0, 2.0, -0.0, torch.nan]))
    model.count = nn.Parameter(torch.arange(3), requires_grad=False)
    sums = [sums_of_bits(model)]
    for values in ([2.0, 1.0, -0.0, torch.nan], [1.0, 2.0, 0.0, torch.nan], [1.0, 2.0, -0.0, torch.inf]):
        model.one.data = torch.tensor(values)
        sums.append(sums_of_bits(model))
    assert len({each["one"] for each in sums}) == 4 and all(each["none"] == 0 for each in sums)
    model.one.data = torch.tensor([1.0, 2.0, -0.0, torch.nan])
    assert sums_of_bits(model) == sums[0] and set(sums[0]) == {"none", "one"}
    assert sums_of_bits(nn.ReLU()) == {}


@pytest.mark.parametrize("num_rows", [SAMPLE // 64 - 1, SAMPLE // 64, SAMPLE // 64 + 1, 5 * SAMPLE // 64])
def test_large_tensors_are_sampled_in_every_row_and_column(num_rows):
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(num_rows, 64), requires_grad=False)
    zero = sums_of_bits(model)
    lines = [*model.w.data[:: num_rows // 9], *model.w.data.T[::7]]
    for line in lines:
        line.fill_(1)
        assert sums_of_bits(model) != zero
        line.fill_(0)
    model.w.data[3, 3] = 1
    one = sums_of_bits(model)
    model.w.data = model.w.data.T.contiguous().T
    assert sums_of_bits(model) == one


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["masks", "repair", "tuned", "offload"])
@pytest.mark.parametrize("make", MODELS)
def test_a_model_on_cuda_has_a_dense_module_in_main_memory_where_weights_were_repaired(make, way):
    case = MODELS[make](torch.float32)
    before, options = deepcopy(case.model), {"sparsity": 0.5} | WAYS[way]
    if way == "offload":
        if make == "mlp":
            pytest.skip("it has no blocks")
        options["offload"] = "cuda"
    else:
        case.model.cuda()
    result = prune(case.model, case.batches, loss=case.loss, **options)
    after = deepcopy(case.model)
    dense = result.dense()
    devices = {tensor.device.type for tensor in tensors(dense).values()}
    assert devices == {"cuda" if way == "masks" else "cpu"}
    assert_same_tensors(dense.cpu(), before)
    assert_same_tensors(case.model, after)
    for device in ("cpu", "cuda"):
        case.model.to(device)
        assert_same_tensors(result.dense().cpu(), before)
        result.undo_()
        assert_same_tensors(case.model.cpu(), before)
        case.model.to(device)
        result.apply_()
        assert_same_tensors(case.model.cpu(), after.cpu())
    sums = sums_of_bits(case.model.cpu())
    assert sums_of_bits(case.model.cuda()) == sums
    next(case.model.parameters()).data += 1
    with pytest.raises(ValueError, match="trained or changed after it was pruned"):
        result.undo_()
