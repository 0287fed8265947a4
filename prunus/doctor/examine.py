"""``examine(path)``: every check, one tensor in memory at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..files.reader import located
from .checkpoints import add_state, load_mapping, masks_in, rank_files, read_checkpoint, read_distributed, read_ranks
from .contents import Contents, StoredTensor
from .expected import Expected, check_expected, of_run
from .findings import Finding, Layer, Report
from .folders import read_file, read_folder, tensors_of
from .model_checks import check_digests, check_moments, check_neighbours, check_ties
from .pattern import overall
from .roles import Choice, roles
from .tensor_checks import TensorCheck, View, check_tensor


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
    given = Expected(sparsity, pattern, _tuple(include), _tuple(exclude), _tuple(allow))
    contents = open_contents(Path(path))
    with contents.stack:
        if masks is not None:
            contents.masks = _read_masks(Path(masks))
        _undo_parametrization(contents)
        return _report(contents, _merged(given, of_run(contents)))


def open_contents(path: Path) -> Contents:
    """The model, checkpoint or file at ``path``; what is none of them is a ValueError."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return read_distributed(path)
        if (path / "checkpoint.pt").is_file():
            return read_checkpoint(path / "checkpoint.pt")
        if sharded := [p.parent for p in path.glob("checkpoint-*/.metadata") if p.parent.name[11:].isdecimal()]:
            return read_distributed(max(sharded, key=lambda p: int(p.name[11:])))
        if ranks := rank_files(path):
            return read_ranks(path, ranks)
        return read_folder(path)
    path = located(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return read_file(path)
    return read_checkpoint(path)


def _report(contents: Contents, expected: Expected) -> Report:
    todo = "take the masks that were saved with this model"
    findings = [
        Finding("bad-mask", name, f"{mask.file} holds a mask for it, but there is no such tensor", todo)
        for name, mask in contents.masks.items()
        if name not in contents.tensors
    ]
    chosen = roles(contents.tensors, Choice(expected.include, expected.exclude, contents.masks))
    head = _head_width(contents.config)
    checks = {
        name: check_tensor(stored, View(chosen[name], contents.masks.get(name), expected.groups, head))
        for name, stored in contents.tensors.items()
    }
    for one in checks.values():
        findings += one.findings
    findings += check_expected(expected, list(checks.values()))
    findings += check_ties(contents, chosen, checks)
    findings += check_neighbours(contents.tensors, contents.config)
    findings += check_moments(contents)
    digest = check_digests(contents)
    findings = contents.findings + findings
    allowed = [finding for finding in findings if finding.kind in expected.allow]
    layers, pattern = _named(checks.values())
    return Report(
        path=str(contents.path),
        kind=contents.kind,
        pattern=pattern,
        layers=layers,
        findings=[finding for finding in findings if finding.kind not in expected.allow],
        notes=contents.notes + [f"allowed: {one.kind}: {one.where}: {one.what}" for one in allowed],
        asked={name: value for name, value in asdict(expected).items() if value not in (None, ())},
        digest=digest,
    )


def _named(checks: Iterable[TensorCheck]) -> tuple[list[Layer], str]:
    """The layers, with a pattern that shows only beside the others, and the pattern over all of them."""
    layers = [one.layer for one in checks]
    pattern = overall([layer for layer in layers if layer.is_prunable])
    if pattern == "layer-uniform":
        plain = [layer.is_prunable and layer.pattern == "unstructured" for layer in layers]
        layers = [replace(x, pattern=pattern) if is_plain else x for x, is_plain in zip(layers, plain, strict=True)]
    return layers, pattern


def _merged(given: Expected, run: Mapping[str, Any]) -> Expected:
    """What the caller asks for; where the caller says nothing, what the run was asked for."""
    said: dict[str, Any] = {name: value for name, value in asdict(given).items() if value not in (None, ())}
    if "sparsity" in said or "pattern" in said:
        run = {name: value for name, value in run.items() if name not in ("sparsity", "pattern")}
    return Expected(**(dict(run) | said))


def _read_masks(path: Path) -> dict[str, StoredTensor]:
    """Masks from a safetensors file, from a checkpoint, or from a Pruner's state."""
    if not path.is_file():
        raise ValueError(f"there is no file of masks {path}")
    if path.name.endswith(".safetensors"):
        found = {stored.name: stored for stored in tensors_of(path).values()}
    else:
        state, contents = load_mapping(path), Contents(path, "")
        add_state(contents, state, path.name)
        found = contents.masks or masks_in({"masks": state}, path.name)
    if not found:
        raise ValueError(f"{path} holds no masks; expected booleans or packed bits by the names of the weights")
    for stored in found.values():
        if stored.is_float and not ((values := stored.load()).eq(0) | values.eq(1)).all():
            raise ValueError(f"{stored.name} in {path} is no mask: expected booleans, packed bits, or zeros and ones")
    return found


def _undo_parametrization(contents: Contents) -> None:
    """Read ``weight_orig`` and ``weight_mask`` of ``torch.nn.utils.prune`` as the weight they stand for."""
    for name in [name for name in contents.tensors if name.endswith("_orig")]:
        plain = name.removesuffix("_orig")
        mask = contents.tensors.get(f"{plain}_mask")
        if mask is None or mask.shape != contents.tensors[name].shape:
            continue
        original, _ = contents.tensors.pop(name), contents.tensors.pop(f"{plain}_mask")
        contents.tensors[plain] = replace(original, name=plain, load=_product(original, mask))
        contents.find(
            "not-removed",
            plain,
            "it is stored as weight and mask, which needs more room and is not loaded by other tools",
            "call torch.nn.utils.prune.remove before saving",
        )


def _product(original: StoredTensor, mask: StoredTensor) -> Callable[[], Tensor]:
    return lambda: original.load() * mask.load()


def _head_width(config: Mapping[str, Any]) -> int:
    """Rows of one attention head, 0 where the configuration does not say."""
    numbers = [config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    own, width, heads = (n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 0 for n in numbers)
    return own or (width // heads if heads else 0)


def _tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
