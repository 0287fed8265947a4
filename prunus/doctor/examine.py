"""``examine(path)``: every check, one tensor in memory at a time."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..eligible import matches
from ..masks import Masks, digest
from ..ops import bits
from .findings import WARNINGS, Diagnosis, Expected, Finding
from .model_checks import check_blocks, check_digests, check_expected, check_optimizer_state, check_ties
from .pattern import overall
from .sources import Contents, StoredTensor, read_contents, read_masks
from .tensor_checks import TensorCheck, check_tensor, roles, stored_mask


def examine(
    path: str | Path,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    masks: str | Path | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
    strict: bool = False,
) -> Diagnosis:
    """Check the model or checkpoint at ``path``, and return what it is and what is wrong with it.

    ``sparsity`` and ``pattern`` (``global``, ``layer``, ``row`` or ``N:M``) are what you expect, ``masks`` is a file
    of masks. Globs over names: ``include`` adds to the weights that are pruned by default, ``only`` restricts them,
    and ``exclude`` wins. Findings of the kinds in ``allow`` become notes. Dead rows and columns are warnings, or
    findings if ``strict``.
    """
    names = ((one,) if isinstance(one, str) else tuple(one) for one in (include, exclude, only, allow))
    expected = Expected(sparsity, pattern, *names)
    with ExitStack() as stack:
        contents = read_contents(Path(path), stack)
        if not contents.tensors:
            raise ValueError(f"{path} holds no tensors; expected those of a model")
        if masks is not None:
            contents.masks = read_masks(Path(masks), stack)
        return _diagnosis(contents, expected, strict)


def _diagnosis(contents: Contents, expected: Expected, strict: bool) -> Diagnosis:
    findings, settings = _undo_parametrization(contents), contents.pruned.get("settings", {})
    for name, mask in contents.masks.items():
        if name not in contents.tensors:
            findings.append(Finding("bad-mask", name, f"{mask.file} holds a mask for it, but there is no such tensor"))
    rows = [row for row in contents.pruned.get("layers", ()) if isinstance(row, dict) and "num_pruned" in row]
    pruned = {str(row.get("name")): row["num_pruned"] for row in rows}  # how many weights ``prunus prune`` says it took
    is_named = all(name in contents.tensors for name in pruned)  # not where files name tensors as the model does not
    expected = Expected(**(_of_prune(contents, expected, bool(pruned) and is_named) | expected.given))
    chosen = roles(contents.tensors, expected, contents.masks, pruned if is_named and not contents.masks else ())
    checks = {
        name: check_tensor(stored, chosen[name], contents.masks.get(name), expected.groups)
        for name, stored in contents.tensors.items()
    }
    masks_digest = digest_of(contents.masks, contents.tensors) if contents.masks else None
    findings += [finding for check in checks.values() for finding in check.findings]
    findings += check_expected(expected, checks.values())
    findings += _fewer_zeros(pruned, checks)
    findings += check_blocks(contents)
    findings += check_ties(contents, chosen, checks)
    findings += check_optimizer_state(contents)
    findings += check_digests(contents, masks_digest)
    is_quantized = bool(settings.get("gguf_file")) or str(settings.get("model", "")).endswith(".gguf")
    allow = {*expected.allow, *(("excluded",) if is_quantized else ())}  # zeros that were there before
    allowed = [f"allowed: {one.kind}: {one.where}: {one.what}" for one in findings if one.kind in allow]
    findings = [one for one in findings if one.kind not in allow]
    warnings = [one for one in findings if one.kind in WARNINGS and not strict]
    layers = [check.layer for check in checks.values()]
    pattern = overall(layer for layer in layers if layer.is_prunable)
    if pattern == "layer-uniform":  # which shows only beside other layers
        is_plain = [layer.is_prunable and layer.pattern == "unstructured" for layer in layers]
        layers = [replace(x, pattern=pattern) if plain else x for x, plain in zip(layers, is_plain, strict=True)]
    return Diagnosis(
        path=str(contents.path),
        kind=contents.kind,
        pattern=pattern,
        layers=layers,
        findings=[one for one in findings if one not in warnings],
        warnings=warnings,
        notes=contents.notes + allowed,
        asked=expected.given,
        digest=masks_digest,
    )


def _undo_parametrization(contents: Contents) -> list[Finding]:
    """Read ``weight_orig`` and ``weight_mask`` of ``torch.nn.utils.prune`` as the weight they stand for."""
    findings = []
    for name in [name for name in contents.tensors if name.endswith("_orig")]:
        plain = name.removesuffix("_orig")
        mask = contents.tensors.get(f"{plain}_mask")
        if mask is None or mask.shape != contents.tensors[name].shape:
            continue
        original, _ = contents.tensors.pop(name), contents.tensors.pop(f"{plain}_mask")
        load = partial(lambda weight, mask: weight.load() * mask.load(), original, mask)
        contents.tensors[plain] = replace(original, name=plain, load=load)
        what = "it is stored as weight and mask, which needs more room and is not loaded by other tools"
        findings.append(Finding("not-removed", plain, what))
    return findings


def _fewer_zeros(pruned: Mapping[str, Any], checks: Mapping[str, TensorCheck]) -> list[Finding]:
    findings = []
    for name, num in pruned.items():
        if name in checks and isinstance(num, int) and (zeros := checks[name].layer.num_zeros) < num:
            what = f"{zeros:,} of its weights are zero, but result.json says that {num:,} were pruned"
            findings.append(Finding("too-dense", name, what, "prune the model anew, or remove result.json"))
    return findings


def _of_prune(contents: Contents, expected: Expected, is_named: bool) -> dict[str, Any]:
    """Patterns of names, and groups, that ``prunus prune`` was asked for, as far as its result says."""
    settings, asked = contents.pruned.get("settings", {}), {}
    for option in ("include", "exclude", "only"):
        globs = settings.get(option)
        for glob in globs if isinstance(globs, list) else ():
            if isinstance(glob, str) and any(matches(name, [glob]) for name in contents.tensors):
                asked[option] = (*asked.get(option, ()), glob)
    is_open = expected.sparsity is None and expected.pattern is None  # else the caller's word counts
    return asked | ({"pattern": "2:4"} if is_open and is_named and settings.get("scope") == "2:4" else {})


def digest_of(masks: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> str | None:
    """``masks.digest`` of stored masks, one bit a weight in memory; None if a mask does not fit its tensor."""
    weights, packed = {}, {}
    for name, stored in masks.items():
        shape = tensors[name].shape if name in tensors else stored.shape
        mask = stored_mask(stored, shape)
        if mask is None:
            return None
        weights[name], packed[name] = torch.empty(shape, device="meta"), bits.pack(mask)
    return digest(Masks(weights, packed))
