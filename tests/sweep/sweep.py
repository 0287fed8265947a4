"""Every family of the table through training, one-shot pruning, repair, export, the doctor, sparse runs and cuts.

``python tests/sweep/sweep.py`` writes what held and what did not to ``docs/evidence/support.json``, and from that the
page ``support.md`` beside it; ``--only`` runs a few families anew, ``--checks`` a few checks, ``--resume`` the families
that a sweep which was ended has left, and ``--page`` writes the page alone. A second version of transformers, in a
folder of its own before the path (PYTHONPATH), adds a record beside the first.
"""

import argparse
import inspect
import json
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
import transformers  # noqa: E402
from families import assert_equal_models, build  # noqa: E402
from page import CHECKS, ONE_SHOT, YES, page, version_key  # noqa: E402
from table import TABLE  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from prunus import Pruner, Ramp, load_model, prune, save_model  # noqa: E402
from prunus.cli import main as prunus_command  # noqa: E402
from prunus.doctor import examine  # noqa: E402
from prunus.eligible import eligible  # noqa: E402
from prunus.oneshot.calibration import Calibration  # noqa: E402
from prunus.oneshot.config_units import config_plan  # noqa: E402
from prunus.oneshot.cuts import Cuts  # noqa: E402
from prunus.oneshot.drop_layers import drop_layers_  # noqa: E402
from prunus.oneshot.units import tensor_of  # noqa: E402
from prunus.sparse.linear import sparsify_  # noqa: E402
from prunus.sparsity_report import report  # noqa: E402

RECORDS = HERE.parents[1] / "docs" / "evidence"
NUM_LAYERS = re.compile("n_layers?|(decoder_)?(num_)?((hidden|encoder|decoder)_)?layers|depth")
LONGEST = 200  # characters of a reason
State = dict[str, Tensor]


def sweep(name: str, only: Sequence[str] = CHECKS) -> dict[str, Any]:
    """What each check of a family came to: ``yes``, or why not."""
    kind, _, inputs = TABLE[name]
    if not hasattr(transformers, kind):
        return {"class": kind, "missing": True}
    found: dict[str, Any] = {"class": kind}
    with warnings.catch_warnings(), redirect_stdout(StringIO()), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            model, batch = build(name, TABLE), inputs()
            loss = None if _own_loss(model, batch) is not None else _squares
            zeros = report(model, eligible(model))
        except Exception as error:
            return found | {"not built": _reason(error)}
        reasons = Counter(layer.dense for layer in zeros.layers if layer.dense)
        found |= {"parameters": zeros.num_parameters, "prunable": zeros.num_prunable, "dense": dict(reasons)}
        checks: dict[str, Callable[[], str]] = {
            "layers": lambda: _shallower(name, Path(folder)),
            "training": lambda: _trained(build(name, TABLE), batch),
            **{score: lambda score=score: _pruned(model, batch, score, loss) for score in ONE_SHOT},
            "repair": lambda: _repaired(model, batch),
            "export": lambda: _exported(model, batch, Path(folder)),
            "doctor": lambda: _examined(Path(folder)),
            "sparse run": lambda: _run_sparse(model, build(name, TABLE), batch),
            "neurons": lambda: _cut(build(name, TABLE), batch, "neurons", Path(folder)),
            "heads": lambda: _cut(build(name, TABLE), batch, "heads", Path(folder)),
        }
        for check, run in checks.items():
            if check not in only:
                continue
            torch.manual_seed(0)
            try:
                found[check] = run()
            except Exception as error:
                found[check] = _reason(error).replace(f"{folder}/", "")
            if check == "repair" and not report(model, eligible(model)).num_zeros:
                prune(model, sparsity=0.5)  # for what comes after
    return found


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split()) or "an assertion of the sweep failed"
    return f"{type(error).__name__}: {said[:LONGEST]}"


def _squares(output: Any, _: Any = None) -> Tensor:
    """A loss for models without one: the mean square of what they return."""
    leaves = [leaf for leaf in pytree.tree_leaves(_plain(output)) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).mean()


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output


def _own_loss(model: nn.Module, batch: State) -> Tensor | None:
    """The loss that a model computes from labels; the next tokens are labels of its own."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    labels = {"labels": batch["input_ids"]} if "input_ids" in batch else {}
    return getattr(model(**(labels | batch)), "loss", None)


def _trained(model: nn.Module, batch: State) -> str:
    """60 % in 20 steps, to the weight."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    pruner = Pruner(model, optimizer, schedule=Ramp(0.6, 0, 16), every=4, no_gradient="dense")
    for _ in range(20):
        loss = _own_loss(model, batch)
        loss = _squares(model(**batch)) if loss is None else loss
        assert loss.isfinite(), "the loss is not finite"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    masks, shown = pruner.masks, pruner.report()
    num_pruned = sum(int((~mask).sum()) for mask in masks.values())
    assert num_pruned == round(0.6 * shown.num_prunable), f"{num_pruned} of {shown.num_prunable} are pruned"
    parameters = dict(model.named_parameters())
    assert not any(parameters[name][~mask].any() for name, mask in masks.items()), "a pruned weight is not zero"
    dense = [layer for layer in shown.layers if layer.dense and "gradient" in layer.dense]
    return f"{YES}; {len(dense)} of {len(masks) + len(dense)} stay dense: no gradient reaches them" if dense else YES


def _check_undo(model: nn.Module, result: Any, before: State) -> None:
    """The model comes back bit for bit."""
    result.undo_()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert not changed, f"undo_ did not restore {changed[0]}"


def _pruned(model: nn.Module, batch: State, score: str, loss: Any) -> str:
    before, exclude = deepcopy(model.state_dict()), ()
    loss = loss if score == "fisher" else None
    try:
        result = prune(model, [batch], 0.5, score=score, loss=loss, repair=None)
    except ValueError as error:
        if "no sample reached" not in str(error):
            raise
        exclude = str(error).partition("no sample reached ")[2].partition(": modules")[0].split(", ")
        result = prune(model, [batch], 0.5, score=score, loss=loss, repair=None, exclude=exclude)
    zeros = report(model, eligible(model, exclude=exclude))
    assert zeros.num_zeros == result.num_pruned, f"{zeros.num_zeros} zeros, {result.num_pruned} pruned"
    if score == "wanda":  # by rows, each of which is rounded
        assert abs(result.sparsity - 0.5) < 0.1, f"the sparsity is {result.sparsity}"
    else:
        assert result.num_pruned == round(0.5 * zeros.num_prunable), f"{result.num_pruned} of {zeros.num_prunable}"
    _check_undo(model, result, before)
    of = len(result.level.weights) + len(exclude)
    return f"{YES}; {len(exclude)} of {of} are to be excluded: no sample reaches them" if exclude else YES


def _repaired(model: nn.Module, batch: State) -> str:
    """The model stays repaired, for what comes after."""
    before = deepcopy(model.state_dict())
    result = prune(model, [batch], 0.5)
    layers = result.layers
    wrong = [layer.name for layer in layers if layer.num_pruned != round(0.5 * layer.num_weights)]
    assert not wrong, f"{wrong[0]} has another sparsity"
    _check_undo(model, result, before)
    result.apply_()
    known = [layer for layer in layers if layer.error is not None and layer.mask_error is not None]
    left = Counter(layer.not_repaired for layer in layers if layer.not_repaired)
    whys = "; ".join(f"{num} of {len(layers)} by magnitude: {reason}" for reason, num in left.items())
    if not known:
        return f"no: {whys}"[:LONGEST]
    odd = [x.name for x in known if not math.isfinite((x.error or 0) + (x.mask_error or 0))]
    assert not odd, f"the error of {odd[0] if odd else ''} is no finite number"
    assert sum(x.error or 0 for x in known) <= sum(x.mask_error or 0 for x in known), "the error is not lower"
    return f"{YES}; {whys}"[:LONGEST] if left else YES


def _exported(model: nn.Module, batch: State, folder: Path) -> str:
    """From memory and from a plain folder, by the command, to the same tensors and outputs."""
    save_model(model, folder / "memory")
    assert_equal_models(load_model(folder / "memory"), model, batch)
    model.save_pretrained(folder / "plain")
    prunus_command(["export", str(folder / "plain"), "--out", str(folder / "small"), "--check"])
    wanted = type(model).from_pretrained(folder / "plain")
    assert_equal_models(wanted, model, batch)
    assert_equal_models(load_model(folder / "small"), model, batch)
    return YES


def _shallower(name: str, folder: Path) -> str:
    """A model of five layers loses one, and its folder is that of an ordinary model."""
    kind, values, inputs = TABLE[name]
    model, batch = build(name, {name: (kind, _deeper(values), inputs)}), inputs()
    drop_layers_(Calibration(model, [batch]), 1)
    model.save_pretrained(folder / "shallower")
    assert_equal_models(type(model).from_pretrained(folder / "shallower"), model, batch)
    return YES


def _deeper(values: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with five layers, or three in each stage."""
    deeper = {key: _deeper(value) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in values.items():
        if NUM_LAYERS.fullmatch(key) and isinstance(value, int):
            deeper[key] = 5
        elif key in ("layer_types", "attention_window"):
            deeper[key] = (value * 3)[:5]
        elif key == "attention_types":
            deeper[key] = [[value[0][0], 2], [["global"], 1]]
        elif key in ("depths", "depth", "block_sizes"):
            deeper[key] = [3 for _ in value]
    return deeper


def _examined(folder: Path) -> str:
    for name in ("memory", "plain", "small"):
        if findings := examine(folder / name).findings:
            return f"{name}: {findings[0]}"[:LONGEST]
    return YES


@torch.no_grad()
def _run_sparse(model: nn.Module, sparse: nn.Module, batch: State) -> str:
    pruned = {weight.name for weight in eligible(model).weights}
    sparse.load_state_dict(model.state_dict())
    wanted = model(**batch)
    replaced = {f"{name}.weight" for name in sparsify_(sparse, least=0.3)}
    found = sparse(**batch)
    for a, b in zip(pytree.tree_leaves(_plain(found)), pytree.tree_leaves(_plain(wanted)), strict=True):
        if torch.is_tensor(a):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    left = Counter(type(w.module).__name__ for w in eligible(model).weights if w.name not in replaced)
    kinds = ", ".join(left)
    if not pruned & replaced:
        return f"no: it has nn.Linear and Conv1D, not {kinds}"
    return f"{YES}; {left.total()} of {len(pruned)} run dense: {kinds}" if left else YES


@torch.no_grad()
def _cut(model: nn.Module, batch: State, kind: str, folder: Path) -> str:
    """A quarter of the units, different ones in each layer, to an ordinary folder; then they come back."""
    before = deepcopy(model.state_dict())
    plan = config_plan(Calibration(model, [batch]))
    if kind in plan.reasons:
        return f"no: {plan.reasons[kind]}"[:LONGEST]
    layers = [layer for layer in plan.layers if layer.kind == kind]
    most = {layer.field: layer.num - max(1, layer.num // 4) for layer in layers}
    left = {field: max(num for num in plan.allowed(field) if num <= most[field]) for field in most}
    gone = {layer: torch.randperm(layer.num)[left[layer.field] :] for layer in layers}
    wanted = _unread_outputs(model, batch, gone)
    cuts = Cuts.of_units(model, gone, plan.numbers(left))
    cuts.apply_()
    model.save_pretrained(folder / kind)
    loaded, said = type(model).from_pretrained(folder / kind, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], f"keys that are missing or left over: {said}"
    assert_equal_models(loaded, model, batch)
    for a, b in zip(_tensors(model(**batch)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
    _check_undo(model, cuts, before)
    stays = [f"{field} cannot be cut: {reason}" for field, reason in plan.left_out[kind].items()]
    return f"{YES}; {'; '.join(stays)}"[:LONGEST] if stays else YES


def _unread_outputs(model: nn.Module, batch: State, gone: dict[Any, Tensor]) -> list[Tensor]:
    """What a model gives where its consumers do not read some units."""
    consumers = {layer: tensor_of(model, layer.consumer) for layer in gone}
    whole = {weight: weight.clone() for weight in consumers.values()}
    for layer, units in gone.items():
        slices = layer.slices[layer.consumer]
        consumers[layer].index_fill_(slices.dim, slices.places[units].flatten(), 0)
    outputs = _tensors(model(**batch))
    for weight, values in whole.items():
        weight.copy_(values)
    return outputs


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(_plain(output)) if torch.is_tensor(leaf)]


def _start(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say about tiny models; errors are returned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="families to run anew; all others stay")
    parser.add_argument("--checks", nargs="*", default=CHECKS, choices=CHECKS, help="checks to run anew")
    parser.add_argument("--resume", action="store_true", help="run the families that the record lacks")
    parser.add_argument("--out", type=Path, default=RECORDS / "support.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--page", action="store_true", help="write the page of the record that is there")
    given = parser.parse_args()
    record = json.loads(given.out.read_text()) if given.out.is_file() else {}
    if not given.page:
        began, version = time.monotonic(), transformers.__version__
        is_part = given.only or given.resume or given.checks is not CHECKS
        known = record.get(version, {}).get("families", {}) if is_part else {}
        names = given.only or [name for name in TABLE if not given.resume or name not in known]
        with ProcessPoolExecutor(given.jobs, get_context("spawn"), _start) as pool:
            futures = {pool.submit(sweep, name, given.checks): name for name in names}
            for future in as_completed(futures):
                found = future.result()
                known[futures[future]] = known.get(futures[future], {}) | found
                odd = {check: text for check in CHECKS if not (text := found.get(check, YES)).startswith(YES)}
                print(f"{len(known)}/{len(TABLE)} {futures[future]} {odd or ''}", flush=True)
                families = {name: known[name] for name in TABLE if name in known}
                record[version] = {"torch": torch.__version__.partition("+")[0], "families": families}
                record = dict(sorted(record.items(), key=lambda item: version_key(item[0]), reverse=True))
                given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"{len(names)} families in {time.monotonic() - began:.0f} s")
    given.out.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
