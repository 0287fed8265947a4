"""Small teachers that know something, and students pruned from them."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from copy import deepcopy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from prunus.eligible import eligible

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
