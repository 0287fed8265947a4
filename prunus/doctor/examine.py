"""``examine(path)``: every check, one tensor in memory at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from . import promises
from .asked import Asked, of_run
from .checkpoint import add_state, load, masks_of
from .digests import check_digests
from .folder import tensors_of
from .look import Seen, View, look
from .names import Choice, roles
from .pattern import overall
from .report import Finding, Layer, Report
from .source import Source, Stored, open_source
from .whole import check_moments, check_neighbours, check_ties


def examine(
    path: str | Path,
    *,
    sparsity: float | None = None,
    pattern: str | None = None,
    masks: str | Path | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    allow: str | Sequence[str] = (),
) -> Report:
    """What the model or checkpoint at ``path`` is, and where it is not what it promises.

    ``sparsity`` and ``pattern`` (``global``, ``layer``, ``row`` or ``N:M``) are what was asked for; a
    training checkpoint says so itself. ``masks`` is a file of masks; ``allow`` are kinds of findings
    that are meant, and become notes.
    """
    given = Asked(sparsity, pattern, _tuple(include), _tuple(exclude), _tuple(allow))
    source = open_source(Path(path))
    with source.stack:
        if masks is not None:
            source.masks = _read_masks(Path(masks))
        _undo_parametrization(source)
        return _report(source, _merged(given, of_run(source)))


def _report(source: Source, asked: Asked) -> Report:
    findings = [_no_tensor(name, mask) for name, mask in source.masks.items() if name not in source.tensors]
    chosen = roles(source.tensors, Choice(asked.include, asked.exclude, source.masks))
    head = _head_width(source.config)
    seen = {
        name: look(stored, View(chosen[name], source.masks.get(name), asked.groups, head))
        for name, stored in source.tensors.items()
    }
    for one in seen.values():
        findings += one.findings
    findings += promises.check(asked, list(seen.values()))
    findings += check_ties(source, chosen, seen)
    findings += check_neighbours(source.tensors, source.config)
    findings += check_moments(source)
    digest = check_digests(source)
    findings = source.findings + findings
    allowed = [finding for finding in findings if finding.kind in asked.allow]
    layers, pattern = _named(seen.values())
    return Report(
        path=str(source.path),
        kind=source.kind,
        pattern=pattern,
        layers=layers,
        findings=[finding for finding in findings if finding.kind not in asked.allow],
        notes=source.notes + [f"allowed: {one.kind}: {one.where}: {one.what}" for one in allowed],
        asked={name: value for name, value in asdict(asked).items() if value not in (None, ())},
        digest=digest,
    )


def _named(seen: Iterable[Seen]) -> tuple[list[Layer], str]:
    """The layers, with a pattern that shows only beside the others, and the pattern over all of them."""
    layers = [one.layer for one in seen]
    pattern = overall([layer for layer in layers if layer.is_prunable])
    if pattern == "layer-uniform":
        plain = [layer.is_prunable and layer.pattern == "unstructured" for layer in layers]
        layers = [replace(x, pattern=pattern) if is_plain else x for x, is_plain in zip(layers, plain, strict=True)]
    return layers, pattern


def _merged(given: Asked, run: Mapping[str, Any]) -> Asked:
    """What the caller asks; where nothing was said, what the run asked."""
    said: dict[str, Any] = {name: value for name, value in asdict(given).items() if value not in (None, ())}
    if "sparsity" in said or "pattern" in said:
        run = {name: value for name, value in run.items() if name not in ("sparsity", "pattern")}
    return Asked(**(dict(run) | said))


def _read_masks(path: Path) -> dict[str, Stored]:
    """Masks from a safetensors file, from a checkpoint, or from a Pruner's state."""
    if not path.is_file():
        raise ValueError(f"there is no file of masks {path}")
    if path.name.endswith(".safetensors"):
        found = {stored.name: stored for stored in tensors_of(path).values()}
    else:
        state, source = load(path), Source(path, "")
        add_state(source, state, path.name)
        found = source.masks or masks_of({"masks": state}, path.name)
    if not found:
        raise ValueError(f"{path} holds no masks; expected booleans or packed bits by the names of the weights")
    for stored in found.values():
        if stored.is_float and not ((values := stored.load()).eq(0) | values.eq(1)).all():
            raise ValueError(f"{stored.name} in {path} is no mask: expected booleans, packed bits, or zeros and ones")
    return found


def _undo_parametrization(source: Source) -> None:
    """Read ``weight_orig`` and ``weight_mask`` of ``torch.nn.utils.prune`` as the weight they stand for."""
    for name in [name for name in source.tensors if name.endswith("_orig")]:
        plain = name.removesuffix("_orig")
        mask = source.tensors.get(f"{plain}_mask")
        if mask is None or mask.shape != source.tensors[name].shape:
            continue
        original, _ = source.tensors.pop(name), source.tensors.pop(f"{plain}_mask")
        source.tensors[plain] = Stored(plain, original.shape, original.dtype, original.place, _product(original, mask))
        source.find(
            "not-removed",
            plain,
            "it is stored as weight and mask, which needs more room and is not loaded by other tools",
            "call torch.nn.utils.prune.remove before saving",
        )


def _product(original: Stored, mask: Stored) -> Any:
    def load_product() -> Tensor:
        return original.load() * mask.load()

    return load_product


def _no_tensor(name: str, mask: Stored) -> Finding:
    what = f"{mask.place} holds a mask for it, but there is no such tensor"
    return Finding("bad-mask", name, what, "take the masks that were saved with this model")


def _head_width(config: Mapping[str, Any]) -> int:
    """Rows of one attention head, 0 where the configuration does not say."""
    numbers = [config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    own, width, heads = (n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 0 for n in numbers)
    return own or (width // heads if heads else 0)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
