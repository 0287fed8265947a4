"""Repair as it is defined: group after group over whole models, by what layers read in the dense and the pruned one."""

from copy import deepcopy

import torch

from prunus.eligible import eligible
from prunus.oneshot.gram import Gram
from prunus.oneshot.layers import readers
from prunus.oneshot.solver import solve
from prunus.oneshot.step import keep_all_but


def rows_of(model, name, batches):
    """What the layer of a weight multiplies in whole passes, batch by batch: (..., in)."""
    weights, seen = [weight for weight in eligible(model, name).weights if weight.name == name], []
    (reader,) = readers(model, weights)[name]
    with reader.seen_by(lambda reader, inputs: seen.append(reader.rows(*inputs)[0])):
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    return seen


@torch.no_grad()
def moments_of(pruned, dense, name, batches):
    """Moments of what a layer reads in both models, padding left out."""
    gram, both = Gram(), (rows_of(model, name, batches) for model in (pruned, dense))
    for batch, x, x_dense in zip(batches, *both, strict=True):
        gram.add(x, x_dense, batch["attention_mask"].bool() if isinstance(batch, dict) else None)
    return gram.moments()


@torch.no_grad()
def repaired_plainly(model, batches, groups, sparsity, repair):
    """A copy of the model, pruned and repaired."""
    dense, pruned = deepcopy(model).eval(), deepcopy(model).eval()
    for names in groups:
        weights = {name: pruned.get_parameter(name).flatten(1) for name in names}
        counts = {name: round(sparsity * weight.numel()) for name, weight in weights.items()}
        moments = moments_of(pruned, dense, names[0], batches)
        for name, change in solve(weights, moments, keep_all_but(counts), repair).items():
            parameter = pruned.get_parameter(name)
            parameter.copy_(change.weight.view(parameter.shape))
    return pruned


def llama_groups(num_layers):
    """Names of the weights that read the same input, in order."""
    attention = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    groups = [*attention, ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    return [[f"model.layers.{i}.{part}.weight" for part in group] for i in range(num_layers) for group in groups]
