"""What ranks do together, and each case in one process: ``shared_work_checks.py OUT RANKS quick`` writes a file a rank.

The ranks are forked from a process that has loaded everything and made every call alone.
"""

import json
import os
import sys
import warnings
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import build, tokens
from probe_models import cnn
from torch import nn

from prunus import Global, NofM, PerLayer, PerRow, Repair, prune, quantize, shrink
from prunus.oneshot import loop
from prunus.oneshot.row_share import LargestOfAll
from prunus.oneshot.samples import digest
from prunus.oneshot.step import keep_all_but
from prunus.ranks import Ranks

FEW = Repair(iterations=7)
TEXT = [{"input_ids": tokens(7, 12)}, {"input_ids": tokens(5, 9)}]  # two stacks of samples


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    return build("llama").to(dtype), TEXT


def mixtral():
    torch.manual_seed(0)
    return build("mixtral"), [{"input_ids": tokens(24)}]


def convolutions():
    case = cnn()
    return case.model.eval(), [case.batches[0][0], case.batches[1][0]]


def pruned_llama():
    model, batches = llama()
    prune(model, sparsity=0.3)
    return model, batches


def padded_llama():
    model, _ = llama()
    mask = torch.arange(12).expand(6, 12) < torch.tensor([[3], [12], [7], [12], [5], [9]])
    return model, [{"input_ids": tokens(6, 12), "attention_mask": mask.long()}]


QUICK = {
    "solver": (llama, lambda model, batches, **how: prune(model, batches, repair=FEW, **how)),
    "2:4 by wanda": (
        llama,
        lambda model, batches, **how: prune(model, batches, score="wanda", select=NofM(2, 4), **how),
    ),
    "experts": (mixtral, lambda model, batches, **how: prune(model, batches, include="*experts*", repair=FEW, **how)),
    "convolutions": (convolutions, lambda model, batches, **how: prune(model, batches, repair=FEW, **how)),
    "pruned and in 4 bits": (llama, lambda model, batches, **how: prune(model, batches, bits=4, repair=FEW, **how)),
    "fewer neurons": (llama, lambda model, batches, **how: shrink(model, batches, neurons=0.5, **how)),
}
SLOW = {
    "70 % of bf16": (lambda: llama(torch.bfloat16), lambda model, batches, **how: prune(model, batches, 0.7, **how)),
    "padding, own targets": (
        padded_llama,
        lambda model, batches, **how: prune(model, batches, repair=Repair("own"), **how),
    ),
    "global": (llama, lambda model, batches, **how: prune(model, batches, select=Global(), **how)),
    "rows": (llama, lambda model, batches, **how: prune(model, batches, select=PerRow(), **how)),
    "fisher": (llama, lambda model, batches, **how: prune(model, batches, select=PerLayer("fisher"), **how)),
    "a mask alone": (llama, lambda model, batches, **how: prune(model, batches, score="wanda", repair=None, **how)),
    "magnitude": (llama, lambda model, batches, **how: prune(model, sparsity=0.5, **how)),
    "zeros in 4 bits": (pruned_llama, lambda model, batches, **how: quantize(model, batches, **how)),
    "fewer layers": (llama, lambda model, batches, **how: shrink(model, batches, layers=1, **how)),
    "fewer experts": (mixtral, lambda model, batches, **how: shrink(model, batches, experts=0.5, **how)),
    "fewer heads, dense targets": (
        llama,
        lambda model, batches, **how: shrink(model, batches, heads=0.5, targets="dense", **how),
    ),
}


def figures(name, **how):
    """What a call leaves: a hash of all bits, zeros by tensor, and the errors of the layers."""
    make, call = (QUICK | SLOW)[name]
    model, batches = make()
    result = call(model, batches, progress=False, **how)
    state = model.state_dict()
    repairs = result.level.repairs
    errors = {key: [repair.error, repair.bits_error] for key, repair in repairs.items()}
    zeros = {key: int((value == 0).sum()) for key, value in state.items()}
    cost = [result.cost.seconds, result.cost.forwards, result.cost.peak_bytes]
    shapes = {key: list(value.shape) for key, value in state.items()}
    return {"bits": digest(state), "errors": errors, "zeros": zeros, "shapes": shapes, "cost": cost}


def largest(ranks):
    """Scores with ties, zeros and masks: this rank's rows of what one process keeps."""
    generator, wrong = torch.Generator().manual_seed(5), []
    for number in range(24):
        rows, columns = (int(torch.randint(1, size, (), generator=generator)) for size in (40, 3000))
        shapes = {"a": (rows, columns), "b": (3, columns), "c": (1, 1)}
        scores = {name: torch.randn(shape, generator=generator).abs() for name, shape in shapes.items()}
        if number % 3:  # ties
            scores = {name: (score * number % 4).round() for name, score in scores.items()}
        live = {"a": torch.rand(shapes["a"], generator=generator) < 0.8} if number % 2 else {}
        drop = {name: int(torch.randint(score.numel() + 1, (), generator=generator)) for name, score in scores.items()}
        edges = {}
        for name, one in scores.items():
            cuts = torch.randint(len(one) + 1, (ranks.size - 1,), generator=generator).sort().values.tolist()
            edges[name] = [0, *cuts, len(one)]
        own = {name: slice(*edge[ranks.rank : ranks.rank + 2]) for name, edge in edges.items()}
        choose = LargestOfAll(drop, {name: score.numel() for name, score in scores.items()}, ranks)
        for _ in range(2):
            kept = choose({n: s[own[n]] for n, s in scores.items()}, {n: mask[own[n]] for n, mask in live.items()})
            expected = keep_all_but(drop)(scores, live)
            wrong += [number for name in scores if not torch.equal(kept[name], expected[name][own[name]])]
            scores = {name: score * 2 for name, score in scores.items()}
    return wrong


def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals(rank):
    """One line from every call that cannot be made, and whether the model is as before."""
    model, batches = llama()
    before = deepcopy(model.state_dict())
    other, few = deepcopy(model), [{"input_ids": tokens(1, 12)}]
    if rank:
        next(other.parameters()).data.view(-1)[3] += 1
    spoilt = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rows = torch.randn(6, 4)
    rows[3] = torch.nan

    def failing():
        yield batches[0]
        if rank:
            raise OSError("the disk is gone")

    lines = {
        "sparsity": said(lambda: prune(model, batches, 0.5 + 0.1 * rank, group=True)),
        "selector": said(lambda: prune(model, batches, select=PerRow() if rank else PerLayer(), group=True)),
        "samples": said(lambda: prune(model, [{"input_ids": batches[0]["input_ids"] + rank}], group=True)),
        "weights": said(lambda: prune(other, batches, group=True)),
        "state": said(lambda: prune(model, batches, state="nowhere" if rank else None, group=True)),
        "few samples": said(lambda: prune(model, few, group=True)),
        "a sample that is not finite": said(lambda: prune(spoilt, [rows], group=True)),
        "batches that fail on a rank": said(lambda: prune(model, failing(), group=True)),
        "tuning": said(lambda: prune(model, batches, repair=Repair(tune=True), group=True)),
        "a folder that a rank lacks": said(
            lambda: prune("nowhere" if rank else "model", batches, out="out", group=True)
        ),
        "a folder with other weights": said(
            lambda: prune("other" if rank else "model", batches, out=f"out_{rank}", group=True)
        ),
        "a folder and a model": said(
            lambda: prune("model" if rank else model, batches, out="out" if rank else None, group=True)
        ),
        "a folder in few bits without a repair": said(
            lambda: prune("model", batches, score="wanda", repair=None, bits=4, out="out", group=True)
        ),
        "no group": said(lambda: prune(model, batches, group="gloo")),
    }
    dist.barrier()  # the first rank has removed its folders
    unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return lines | {
        "unchanged": unchanged,
        "files": [str(path) for path in Path().glob("*") if "out" in path.name or "nowhere" in path.name],
    }


def rank_of(rank, world, out, cases):
    torch.set_num_threads(1)  # makes anew what a fork cannot take along
    dist.init_process_group("gloo", f"file://{out}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = {"small": figures("solver", group=True)}
        loop.DIVIDED = 0  # so that small layers are divided too
        done |= {name: figures(name, group=True) for name in cases}
        done["alone"] = figures("solver") if rank else None  # no other rank takes part
        done["largest"] = largest(Ranks([dist.group.WORLD], [dist.group.WORLD]))
        done["refusals"] = refusals(rank)
    done["warnings"] = sorted({str(warning.message) for warning in caught if "prunus" in warning.filename})
    Path(out, f"{rank}.json").write_text(json.dumps(done))
    dist.barrier()
    with suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(sys.argv[1])
    model = llama()[0]
    model.save_pretrained("model")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[2, 3] += 1
    model.save_pretrained("other")
    world, cases = int(sys.argv[2]), QUICK if sys.argv[3] == "quick" else SLOW
    Path("alone.json").write_text(json.dumps({name: figures(name) for name in {"solver": (), **cases}}))
    mp.start_processes(rank_of, (world, sys.argv[1], list(cases)), world, start_method="fork")
