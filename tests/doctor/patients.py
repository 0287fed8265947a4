"""Small models on disk, healthy ones and ones made sick on purpose."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from prunus.masks import digest
from prunus.ops import bits

CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4}
LAYERS = 3
WEIGHTS = {
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.up_proj.weight": (40, 16),
    "mlp.down_proj.weight": (16, 40),
}


def healthy(dtype=torch.float32, tied=True):
    """A small Llama's tensors, without a single zero."""
    torch.manual_seed(1)
    tensors = {"model.embed_tokens.weight": torch.randn(32, 16), "model.norm.weight": torch.ones(16)}
    for layer in range(LAYERS):
        for name, shape in WEIGHTS.items():
            tensors[f"model.layers.{layer}.{name}"] = torch.randn(shape)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(16)
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(16)
    if not tied:
        tensors["lm_head.weight"] = torch.randn(32, 16)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def weights_of(tensors):
    return [name for name in tensors if name.endswith("proj.weight")]


def prune_rows_(tensors, sparsity=0.5):
    """Zero ``round(s n)`` smallest of every row of every weight."""
    for name in weights_of(tensors):
        weight = tensors[name]
        lowest = weight.abs().float().argsort(1)[:, : round(sparsity * weight.shape[1])]
        weight.scatter_(1, lowest, torch.zeros_like(weight))
    return tensors


def prune_layers_(tensors, sparsity=0.5):
    """Zero ``round(s n)`` smallest of every weight."""
    for name in weights_of(tensors):
        flat = tensors[name].view(-1)
        flat[flat.abs().float().argsort()[: round(sparsity * len(flat))]] = 0
    return tensors


def prune_globally_(tensors, sparsity=0.5):
    """Zero ``round(s N)`` smallest of all weights; the first layers lose more."""
    names = weights_of(tensors)
    scores = torch.cat([tensors[name].abs().float().flatten() * (1 + i / 40) for i, name in enumerate(names)])
    keep = torch.ones_like(scores, dtype=torch.bool)
    keep[scores.argsort()[: round(sparsity * len(scores))]] = False
    for name, mask in zip(names, keep.split([tensors[n].numel() for n in names]), strict=True):
        tensors[name] *= mask.view_as(tensors[name])
    return tensors


def prune_groups_(tensors, n=2, m=4):
    """Keep the ``n`` largest of every ``m``."""
    for name in weights_of(tensors):
        weight = tensors[name]
        groups = weight.view(-1, m)
        lowest = groups.abs().float().argsort(1)[:, : m - n]
        groups.scatter_(1, lowest, torch.zeros_like(groups))
    return tensors


def state_of(tensors):
    """A Pruner's state with the masks of the zeros, and its digest."""
    masks = {name: tensors[name] != 0 for name in weights_of(tensors)}
    packed = {name: bits.pack(mask) for name, mask in masks.items()}
    return {"step": 9, "due": False, "masks": packed, "movement": {}, "digest": digest(masks)}


def folder(path: Path, tensors, config=None, shards=1):
    """A Hugging Face folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True} | (config or {})))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    placed = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(placed.values())):
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": placed}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def kinds(report):
    """Kinds of the findings, each once."""
    return {finding.kind for finding in report.findings}


def places(report):
    """Kind and place of every finding."""
    return {(finding.kind, finding.where) for finding in report.findings}


def found(report, kind):
    """The one finding of a kind."""
    (one,) = [finding for finding in report.findings if finding.kind == kind]
    return one


def layer(report, name):
    return next(layer for layer in report.layers if layer.name == name)
