"""Statistics of batch norms follow what the norms read in the pruned model, however the samples are cut."""

from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, snapshot
from probe_models import CNN, Residual
from torch import nn

from prunus import Repair, prune


class Twice(nn.Module):
    """One norm is called twice, and the blocks are a list."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.last = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


def rows(num):
    model = nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(*model, nn.Linear(6, 3)), torch.randn(num, 5)


MODELS = {
    "3 rows": lambda: rows(3),
    "11 rows": lambda: rows(11),
    "a chain": lambda: (Twice(), torch.randn(13, 5)),
    "images": lambda: (CNN(), torch.randn(7, 2, 8, 7)),
    "blocks of images": lambda: (
        nn.Sequential(Residual(3), Residual(3, 2), Residual(3)),
        torch.randn(6, 3, 8, 8),
    ),
}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def made(name):
    """A model in double precision whose statistics are not those of the samples."""
    torch.manual_seed(4)
    model, x = MODELS[name]()
    for norm in norms_of(model):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model.double().eval(), x.double()


@torch.no_grad()
def read_by(model, norm, x):
    """All that a norm reads in one pass over all samples, (channel, value)."""
    found = []
    handle = norm.register_forward_pre_hook(lambda _, args: found.append(args[0].transpose(0, 1).flatten(1)))
    model(x)
    handle.remove()
    return torch.cat(found, 1)


@pytest.mark.parametrize(("name", "size"), each_once(MODELS, [1, 2, None]))
def test_every_norm_moves_as_what_it_reads_whatever_the_batches(name, size):
    model, x = made(name)
    dense, before = deepcopy(model), snapshot(model)
    result = prune(model, [x], 0.5, batch_size=size)
    for norm, old in zip(norms_of(model), norms_of(dense), strict=True):
        now, then = read_by(model, norm, x), read_by(dense, old, x)
        moved = now.mean(1) - then.mean(1)
        if norm is not getattr(model, "norm", None):  # its second call reads what its renewal has changed
            torch.testing.assert_close(norm.running_mean, old.running_mean + moved)
            ratio = (now.var(1, correction=0) + norm.eps) / (then.var(1, correction=0) + norm.eps)
            torch.testing.assert_close(norm.running_var, old.running_var * ratio)
            assert norm.running_mean.sub(old.running_mean).abs().max() > 1e-4
    result.undo_()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("size", [5, 20])  # several passes, or one
@pytest.mark.parametrize(("name", "at"), each_once(["11 rows", "images"], range(0, 9, 2)))
def test_memory_that_runs_out_in_any_layer_leaves_the_statistics_as_they_would_be(name, at, size):
    model, x = made(name)
    other, _ = made(name)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.modules.batchnorm._BatchNorm)]
    layer = layers[at % len(layers)]

    def crowded(_, args):
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle = layer.register_forward_pre_hook(crowded)
    for each in (model, other):
        prune(each, [x], 0.5, batch_size=size)
    handle.remove()
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


class Unlisted(nn.Module):
    """Layers that are no list, so that no pass can start in the middle."""

    def __init__(self, num):
        super().__init__()
        for i in range(num):
            setattr(self, f"layer_{i}", Residual(3))

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def test_one_pass_renews_all_norms_where_it_holds_all_samples_and_says_how_many():
    num_calls, phases = [], []
    for batch_norm in (True, False):
        torch.manual_seed(8)
        model, x, calls = Unlisted(3), torch.randn(4, 3, 6, 6), []
        next(model.children()).register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        show = lambda _, __, phase: phases.append(phase)  # noqa: E731
        prune(model, [x], 0.5, repair=Repair(batch_norm=batch_norm), batch_size=4, progress=show)
        num_calls.append(len(calls))
    assert num_calls[0] - num_calls[1] == 2  # of the dense model and of the pruned one
    said = [phase for phase in phases if phase.startswith("statistics of batch norms, ")]
    assert said == [f"statistics of batch norms, {i + 1} of 3" for i in range(3)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_statistics_on_cuda_are_those_on_the_cpu(name):
    found = []
    for device in ("cpu", "cuda"):
        model, x = made(name)
        prune(model.to(device), [x.to(device)], 0.5, batch_size=2)
        found.append([norm.running_mean.cpu() for norm in norms_of(model)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
