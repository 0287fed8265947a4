"""The gradient probe as it is defined: gradients by autograd, one sample at a time, nothing stored or rebuilt.

Written to be read beside the definition, and slow. The engine must decide what this decides.
"""

import torch

from prunus.eligible import eligible
from prunus.input_statistics import input_squares
from prunus.ops.lazy import Lazy
from prunus.score import magnitude, wanda


def split(batches):
    """Every sample as a batch that holds it alone."""
    alone = []
    for batch in batches:
        whole = [batch] if torch.is_tensor(batch) else list(batch.values() if isinstance(batch, dict) else batch)
        for i in range(len(whole[0])):
            parts = [part[i : i + 1] for part in whole]
            if torch.is_tensor(batch):
                alone.append(parts[0])
            else:
                alone.append(dict(zip(batch, parts, strict=True)) if isinstance(batch, dict) else tuple(parts))
    return alone


def record(model, loss_of, samples, weights):
    """Maximum over samples of ``|dLoss / dW|`` for each of the weights, by name."""
    largest = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for sample in samples:
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is weight for weight in weights.values()))
        loss = loss_of(model, sample)
        if loss.requires_grad:  # else it depends on none of the weights
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    largest[name] = torch.maximum(largest[name], gradient.abs())
    return largest


def norms(model, loss_of, samples, weights):
    """Sum of squares of the inputs, one sample at a time; attention masks are honoured."""
    sums = {}

    def hook(name, sample):
        def add(module, args):
            mask = sample.get("attention_mask") if isinstance(sample, dict) else None
            x = args[0][0] if mask is None else args[0][0][mask[0].bool()]
            sums[name] = sums.get(name, 0) + input_squares(module, x).double()

        return add

    for sample in samples:
        handles = [w.module.register_forward_pre_hook(hook(w.name, sample)) for w in weights]
        with torch.no_grad():
            loss_of(model, sample)
        for handle in handles:
            handle.remove()
    return {name: value.sqrt().float() for name, value in sums.items()}


def candidates(model, loss_of, samples, weights, settings):
    """True where the strategy would prune."""
    found = norms(model, loss_of, samples, weights) if settings["score"] == "wanda" else {}
    sources = {}
    for w in weights:
        values = w.parameter.detach()
        reads = {"weight": values} | ({"input_norm": found[w.name]} if found else {})
        of = wanda if found else magnitude
        sources[w.name] = Lazy(w.name, values, of, reads, dtype=values.dtype, outputs=w.outputs)
    masks = settings["select"](sources, settings["sparsity"])
    return {name: ~mask for name, mask in masks.items()}


def probe_reference(model, loss_of, batches, settings, blocks=None):
    """Masks (True where the weight stays) after one level; the model is pruned.

    ``settings``: score, select, sparsity, schedule, order, tau, reduction. ``blocks`` lists the names that a block
    holds, for the block schedule.
    """
    model.eval()
    weights = eligible(model).weights
    parameters = {w.name: w.parameter for w in weights}
    samples = split(batches)
    chosen = candidates(model, loss_of, samples, weights, settings)
    schedule, tau, r = settings["schedule"], settings["tau"], settings.get("reduction", 0.1)

    if schedule == "joint":
        groups = [list(parameters)]
    else:
        groups = blocks if schedule == "block" else [[name] for name in parameters]
        groups = groups[::-1] if settings["order"] == "reverse" else groups

    pruned = {}
    for group in groups:
        probed = {name: parameters[name] for name in group}
        before = record(model, loss_of, samples, probed)
        originals = {name: parameters[name].detach().clone() for name in group}
        with torch.no_grad():
            for name in group:
                parameters[name].copy_(torch.where(chosen[name], originals[name] * r, originals[name]))
        after = record(model, loss_of, samples, probed)
        with torch.no_grad():
            for name in group:
                allowed = after[name] <= (1 + tau) * before[name]
                pruned[name] = chosen[name] & allowed & after[name].isfinite() & before[name].isfinite()
                parameters[name].copy_(originals[name])
                parameters[name].masked_fill_(pruned[name], 0.0)
    return {name: ~where for name, where in pruned.items()}
