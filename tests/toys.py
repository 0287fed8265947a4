"""Small models, data that depends on the step alone, and the loop that trains them."""

import io

import torch
from torch import nn

from prunus import AdamWPrune, Pruner, Ramp, Regrow


class Net(nn.Module):
    """A convolution, two linear layers and a norm: ragged sizes, 4-D and 2-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm(75)
        self.hidden = nn.Linear(75, 13)
        self.out = nn.Linear(13, 4, bias=False)

    def forward(self, x):
        return self.out(self.hidden(self.norm(self.conv(x).flatten(1))).tanh())


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as Hugging Face's GPT-2 has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


NUM_WEIGHTS = 27 + 75 * 13 + 13 * 4
NAMES = ["conv.weight", "hidden.weight", "out.weight"]
RAMP = Ramp(0.7, 2, 18, "linear")  # of a Pruner that is regrowing


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 5, 5, generator=generator).to(dtype)


def backward(model, step, scaler=None):
    """Gradients of the loss on the batch of this step, added to those there are."""
    dtype = next(model.parameters()).dtype
    loss = (model(batch(step, dtype)) - 1).square().mean()
    (scaler.scale(loss) if scaler else loss).backward()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1} | options)


def adamw_prune(model, **options):
    return AdamWPrune(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1} | options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, **options)


def regrowing(model, optimizer, **options):
    """A Pruner whose weights may come back until its ramp ends."""
    return Pruner(model, optimizer, **{"schedule": RAMP, "every": 4, "regrow": Regrow(0.3)} | options)


def through_a_file(value):
    """What a checkpoint gives back, read without trusting it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_of(optimizer, parameter):
    """The optimizer's tensors of the shape of a weight."""
    state = optimizer.state[parameter]
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == parameter.shape}


def assert_pruned_are_zero(pruner):
    """Weights and every optimizer state are exactly zero, where and only where weights are pruned."""
    parameters = dict(pruner.model.named_parameters())
    for name, mask in pruner.masks.items():
        assert torch.equal(parameters[name] == 0, ~mask), name
        for key, value in states_of(pruner.optimizer, parameters[name]).items():
            assert not value[~mask].any(), f"{key} of {name}"


def num_pruned(pruner):
    return sum(int((~mask).sum()) for mask in pruner.masks.values())
