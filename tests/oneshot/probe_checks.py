"""What must come back of a model, what is found out about it, and comparisons of two such."""

import torch

from prunus.oneshot.calibration import Calibration
from prunus.oneshot.options import Method
from prunus.oneshot.scoring import Scores


def bits_of(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def snapshot(model):
    """Everything of a model that must come back: bits, dtypes, modes, flags, hooks and patched methods."""
    tensors = {name: (t.dtype, t.device, bits_of(t).clone()) for name, t in model.state_dict(keep_vars=True).items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    modules = [
        (m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()
    ]
    return tensors, flags, modules


def assert_same(before, after, weights_too=True):
    for name, (dtype, device, value) in before[0].items():
        assert after[0][name][:2] == (dtype, device)
        if weights_too or "running" in name or "num_batches" in name:
            assert torch.equal(after[0][name][2], value), name
    assert before[1:] == after[1:]


def assert_same_masks(expected, result):
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.masks.items())


def zeros(model, names):
    return {name: int((model.get_parameter(name) == 0).sum()) for name in names}


def num_zeros(result):
    return sum(int((weight.parameter == 0).sum()) for weight in result.level.weights.values())


def findings(model, batches, loss=None):
    """What the inspection of a model finds, and the names of its weights."""
    calibration = Calibration(model, batches)
    with calibration.open():
        return Scores(calibration, Method(loss=loss)).engine().findings, set(calibration.weights)
