"""``examine(path)``: every check, one tensor in memory at a time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..eligible import matches
from ..files.reader import located
from .checkpoints import add_state, load_mapping, masks_in, read_checkpoint, read_distributed
from .contents import Contents, StoredTensor, digest_of, widened
from .findings import WARNINGS, Diagnosis, Expected, Finding
from .folders import read_file, read_folder, repeated_tensors, tensors_of
from .model_checks import check_digests, check_expected, check_optimizer_state, check_prune_result, check_ties
from .pattern import overall
from .roles import roles
from .tensor_checks import check_tensor


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
    """What the model or checkpoint at ``path`` is, and where it is not what it promises.

    ``sparsity`` and ``pattern`` (``global``, ``layer``, ``row`` or ``N:M``) are what was asked for, ``masks`` is a file
    of masks. Globs over names: ``include`` adds to the weights that are pruned by default, ``only`` restricts them to
    what it matches, and ``exclude`` wins. Findings of the kinds in ``allow`` become notes. Dead rows and columns are
    warnings, findings if ``strict``.
    """
    names = ((one,) if isinstance(one, str) else tuple(one) for one in (include, exclude, only, allow))
    expected = Expected(sparsity, pattern, *names)
    contents = open_contents(Path(path))
    with contents.stack:
        if not contents.tensors and not contents.findings:
            raise ValueError(f"{path} holds no tensors; expected those of a model")
        if masks is not None:
            contents.masks = _read_masks(Path(masks))
        _undo_parametrization(contents)
        return _diagnosis(contents, expected, strict)


def open_contents(path: Path) -> Contents:
    """The model, checkpoint or file at ``path``; what is none of them is a ValueError."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return read_distributed(path)
        if (path / "checkpoint.pt").is_file():
            return read_checkpoint(path / "checkpoint.pt")
        if sharded := [p.parent for p in path.glob("checkpoint-*/.metadata") if p.parent.name[11:].isdecimal()]:
            return read_distributed(max(sharded, key=lambda p: int(p.name[11:])))
        return read_folder(path)
    path = located(path)
    is_safetensors = path.name.endswith((".safetensors", ".safetensors.index.json"))
    return read_file(path) if is_safetensors else read_checkpoint(path)


def _diagnosis(contents: Contents, expected: Expected, strict: bool) -> Diagnosis:
    findings, settings = contents.findings, contents.pruned.get("settings", {})
    for name, mask in contents.masks.items():
        if name not in contents.tensors:
            what = f"{mask.file} holds a mask for it, but there is no such tensor"
            contents.find("bad-mask", name, what, "take the masks that were saved with this model")
    pruned = _pruned_names(contents)
    expected = Expected(**(_of_prune(contents, settings, expected) | expected.given))
    chosen = roles(contents.tensors, expected, contents.masks, () if contents.masks else pruned)
    checks = {
        name: check_tensor(stored, chosen[name], contents.masks.get(name), expected.groups)
        for name, stored in contents.tensors.items()
    }
    digest = digest_of(contents.masks, contents.tensors) if contents.masks else None
    findings += [finding for check in checks.values() for finding in check.findings]
    findings += check_expected(expected, checks.values())
    findings += check_prune_result(contents, checks)
    findings += check_ties(contents, chosen, checks)
    findings += check_optimizer_state(contents)
    findings += check_digests(contents, digest)
    kinds: dict[str, list[Finding]] = {"allowed": [], "warning": [], "finding": []}
    is_quantized = bool(settings.get("gguf_file")) or str(settings.get("model", "")).endswith(".gguf")
    allow = {*expected.allow, *(("excluded",) if is_quantized else ())}  # zeros that were there before
    for one in findings:
        is_warning = one.kind in WARNINGS and not strict
        kinds["allowed" if one.kind in allow else "warning" if is_warning else "finding"].append(one)
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
        findings=kinds["finding"],
        warnings=kinds["warning"],
        notes=contents.notes + [f"allowed: {one.kind}: {one.where}: {one.what}" for one in kinds["allowed"]],
        asked=expected.given,
        digest=digest,
    )


def _pruned_names(contents: Contents) -> list[str]:
    """Weights that ``prunus prune`` says it pruned; none where the files name tensors differently from the model."""
    names = [str(row.get("name")) for row in contents.pruned.get("layers", ()) if isinstance(row, dict)]
    return names if all(name in contents.tensors for name in names) else []


def _of_prune(contents: Contents, settings: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """Patterns of names, and groups, that ``prunus prune`` was asked for, as far as its result says."""
    asked: dict[str, Any] = {}
    for option in ("include", "exclude", "only"):
        globs = settings.get(option)
        for glob in globs if isinstance(globs, list) else ():
            if isinstance(glob, str) and any(matches(name, [glob]) for name in contents.tensors):
                asked[option] = (*asked.get(option, ()), glob)
    is_open = expected.sparsity is None and expected.pattern is None  # else the caller's word counts
    if is_open and settings.get("scope") == "2:4" and _pruned_names(contents):
        asked["pattern"] = "2:4"
    return asked


def _read_masks(path: Path) -> dict[str, StoredTensor]:
    """Masks from a safetensors file, from a checkpoint, or from a Pruner's state."""
    if not path.is_file():
        raise ValueError(f"there is no file of masks {path}")
    if path.name.endswith(".safetensors"):
        masks = {stored.name: stored for stored in tensors_of(path)}
        if twice := repeated_tensors(path):
            raise ValueError(f"{path} holds {twice[0]!r} twice; save the masks anew")
    else:
        state, contents = load_mapping(path), Contents(path, "")
        add_state(contents, state, path.name)
        masks = contents.masks or masks_in(state, path.name)
    if not masks:
        raise ValueError(f"{path} holds no masks; expected booleans or packed bits by the names of the weights")
    for stored in masks.values():
        if stored.is_float and not ((values := widened(stored.load())).eq(0) | values.eq(1)).all():
            raise ValueError(f"{stored.name} in {path} is no mask: expected booleans, packed bits, or zeros and ones")
    return masks


def _undo_parametrization(contents: Contents) -> None:
    """Read ``weight_orig`` and ``weight_mask`` of ``torch.nn.utils.prune`` as the weight they stand for."""
    for name in [name for name in contents.tensors if name.endswith("_orig")]:
        plain = name.removesuffix("_orig")
        mask = contents.tensors.get(f"{plain}_mask")
        if mask is None or mask.shape != contents.tensors[name].shape:
            continue
        original, _ = contents.tensors.pop(name), contents.tensors.pop(f"{plain}_mask")
        load = partial(lambda weight, mask: weight.load() * mask.load(), original, mask)
        contents.tensors[plain] = replace(original, name=plain, load=load)
        what = "it is stored as weight and mask, which needs more room and is not loaded by other tools"
        contents.find("not-removed", plain, what, "call torch.nn.utils.prune.remove before saving")
