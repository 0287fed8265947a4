"""The gradient probe as its definition says it: 2 L B passes, one sample and one layer at a time, nothing shared.

Written to be read beside the definition, and slow. What the fast engine decides must be what this decides.
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


def record(model, loss_of, samples, weight):
    """Maximum over samples of ``|dLoss / dW|``."""
    largest = torch.zeros_like(weight)
    for sample in samples:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is weight)
        loss = loss_of(model, sample)
        if loss.requires_grad:  # else the weight has no part in it
            (gradient,) = torch.autograd.grad(loss, [weight])
            largest = torch.maximum(largest, gradient.abs())
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


def ordered(names, sizes, order):
    if order == "size":
        return sorted(names, key=lambda name: -sizes[name])
    return list(reversed(names)) if order == "reverse" else list(names)


def probe_reference(model, loss_of, batches, settings, blocks=None):
    """Masks (True where the weight stays) after one level; the model is pruned.

    ``settings``: score, select, sparsity, schedule, order, tau, reduction. ``blocks`` lists the names that a block
    holds, for the block schedule.
    """
    model.eval()
    weights = eligible(model).weights
    parameters = {w.name: w.parameter for w in weights}
    sizes = {name: p.numel() for name, p in parameters.items()}
    samples = split(batches)
    chosen = candidates(model, loss_of, samples, weights, settings)
    schedule, tau, r = settings["schedule"], settings["tau"], settings.get("reduction", 0.1)

    if schedule == "joint":
        groups = [list(parameters)]
    elif schedule == "block":
        groups = sorted(blocks, key=lambda g: -sum(sizes[n] for n in g)) if settings["order"] == "size" else blocks
        groups = groups[::-1] if settings["order"] == "reverse" else groups
    else:
        groups = [[name] for name in ordered(list(parameters), sizes, settings["order"])]

    pruned = {}
    for group in groups:
        before = {name: record(model, loss_of, samples, parameters[name]) for name in group}
        originals = {name: parameters[name].detach().clone() for name in group}
        with torch.no_grad():
            for name in group:
                parameters[name].copy_(torch.where(chosen[name], originals[name] * r, originals[name]))
        after = {name: record(model, loss_of, samples, parameters[name]) for name in group}
        with torch.no_grad():
            for name in group:
                allowed = after[name] <= (1 + tau) * before[name]
                pruned[name] = chosen[name] & allowed & after[name].isfinite() & before[name].isfinite()
                parameters[name].copy_(originals[name])
                if schedule != "jacobi":
                    parameters[name].masked_fill_(pruned[name], 0.0)
    with torch.no_grad():
        for name, where in pruned.items():
            parameters[name].masked_fill_(where, 0.0)
    return {name: ~where for name, where in pruned.items()}
