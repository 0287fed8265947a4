"""Small teachers that know something, and students pruned from them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from copy import deepcopy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from prunus.eligible import eligible
from prunus.grids import OnGrid, check_on_grid, on_grids, put_on_grid_
from prunus.ops.grid import Grid
from prunus.ops.lazy import as_rows

VOCAB, LENGTH = 1100, 12  # so many classes that the loss is computed in parts


def sequences(num, size=4, seed=0):
    """Batches of tokens that count up, so that there is something to predict."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(60, (num, size, 1), generator=generator)
    return list((starts + torch.arange(LENGTH)) % 60)


def llama(vocab_size=VOCAB, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=32, **sizes, **options)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for batch in sequences(15, 8, seed=5):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def pruned(model, sparsity=0.6):
    """A copy whose smallest weights are zero."""
    student = deepcopy(model)
    for weight in eligible(student).weights:
        flat = weight.parameter.view(-1)
        flat[flat.abs().argsort()[: round(sparsity * flat.numel())]] = 0
    return student


@torch.no_grad()
def in_codes(model, bits=4, group=8, only=""):
    """The same model, each weight that can be pruned rounded to the nearest value of its grid."""
    for weight in (each for each in eligible(model).weights if only in each.name):
        parameter, grid = weight.parameter, Grid(bits, group, weight.outputs)
        rows = as_rows(parameter, grid.outputs).float()
        scales = torch.cat([grid.fitted(part, (part != 0).float()) for part in rows.split(group, 1)], 1)
        values = grid.values(grid.codes(parameter, scales), scales, parameter.dtype)
        parameter.copy_(torch.where(parameter == 0, parameter, values))
        put_on_grid_(weight.module, weight.name.rpartition(".")[2], OnGrid(grid, scales))
    return model


def codes_of(model):
    """Codes of the kept weights on grids, each of which must be on its grid."""
    codes = {}
    for name, on_grid in on_grids(model).items():
        weight = model.get_parameter(name)
        check_on_grid(name, weight, on_grid)
        codes[name] = on_grid.grid.codes(weight, on_grid.scales)[weight != 0]
    return codes


def scales_of(model):
    return {name: on_grid.scales.clone() for name, on_grid in on_grids(model).items()}


def zeros_of(model):
    return {name: p.detach() == 0 for name, p in model.named_parameters() if p.ndim > 1}


def bits_of(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Segmenter(nn.Module):
    """Classes (sample, class, row, column) of the pixels of an image, with a batch norm and dropout."""

    def __init__(self, num_classes=3):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.dropout, self.last = nn.Dropout(0.5), nn.Conv2d(6, num_classes, 3, padding=1)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))
