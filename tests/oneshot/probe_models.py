"""Small models with their samples and losses, for the probe and its reference."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

DATA = os.environ.get("PRUNUS_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="needs PRUNUS_DATA, the folder of real models and tokens")


def entropy(output, target):
    return F.cross_entropy(output, target)


def pair_loss(model, sample):
    return entropy(model(sample[0]), sample[1])


def own_loss(model, sample):
    if torch.is_tensor(sample):
        sample = {"input_ids": sample}
    labels = sample.get("labels", sample["input_ids"])
    if "labels" not in sample and "attention_mask" in sample:
        labels = labels.masked_fill(sample["attention_mask"] == 0, -100)
    return model(**{**sample, "labels": labels}).loss


class Case:
    """A model, its batches, the loss for ``prune`` and that for the reference, and the names in each block."""

    def __init__(self, model, batches, loss, loss_of, blocks):
        self.model, self.batches, self.loss, self.loss_of, self.blocks = model, batches, loss, loss_of, blocks


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.Linear(14, 11), nn.Tanh(), nn.Linear(11, 4)).to(dtype)
    batches = [(torch.randn(n, 9, dtype=dtype), torch.randint(0, 4, (n,))) for n in (3, 1, 4)]
    return Case(model, batches, entropy, pair_loss, [["0.weight"], ["2.weight"], ["4.weight"]])


class Residual(nn.Module):
    def __init__(self, width, stride=1, groups=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, (3, 1), padding=(2, 0), dilation=2)
        self.act = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(width, width, 1, stride)

    def forward(self, x):
        y = self.act(self.norm(self.conv1(x)))
        return self.act(self.conv2(y) + self.short(x))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect")
        self.blocks = nn.ModuleList([Residual(4, 2), Residual(4, groups=2), Residual(4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def cnn(dtype=torch.float64):
    torch.manual_seed(1)
    model = CNN().to(dtype)
    for _ in range(3):  # statistics that are not those of a fresh norm
        model(torch.randn(8, 2, 8, 7, dtype=dtype) * 2 + 1)
    batches = [(torch.randn(n, 2, 8, 7, dtype=dtype), torch.randint(0, 3, (n,))) for n in (2, 3)]
    parts = ("conv1", "conv2", "short")
    blocks = [["stem.weight"], *[[f"blocks.{i}.{part}.weight" for part in parts] for i in range(3)], ["head.weight"]]
    return Case(model, batches, entropy, pair_loss, blocks)


PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def llama_blocks(num_layers):
    parts = PROJECTIONS + FEED_FORWARD
    return [[f"model.layers.{i}.{part}.weight" for part in parts] for i in range(num_layers)]


def llama(dtype=torch.float64, tie=True, num_layers=3):
    """A Llama with grouped queries, drawn at random, and padded samples of two lengths."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tie,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    first = torch.randint(0, 31, (3, 9))
    mask = torch.ones_like(first)
    mask[1, 6:] = 0
    mask[2, :2] = 0
    batches = [{"input_ids": first, "attention_mask": mask}]
    second = torch.randint(0, 31, (2, 7))
    batches.append({"input_ids": second, "attention_mask": torch.ones_like(second)})
    return Case(model, batches, None, own_loss, llama_blocks(num_layers))


def stories260k(dtype=torch.float64):
    import numpy as np

    transformers = pytest.importorskip("transformers")
    folder = Path(DATA)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "models/stories260K", dtype=dtype)
    tokens = np.fromfile(folder / "tokens/tinystories_calib.tok512.u16", np.uint16)[: 4 * 24].astype(np.int64)
    batches = [torch.from_numpy(tokens.reshape(4, 24))]
    return Case(model, batches, None, own_loss, llama_blocks(model.config.num_hidden_layers))


CASES = {"mlp": mlp, "cnn": cnn, "llama": partial(llama, num_layers=2)}


class Plain(nn.Module):
    """Convolutions in a list of blocks, with a layer before them and one after."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, (1, 3), stride=2)])
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x.mean((2, 3)))


def convolutions():
    torch.manual_seed(3)
    return Plain().double(), [torch.randn(n, 2, 8, 7, dtype=torch.float64) for n in (5, 9, 9)]
