"""The model card of a folder that Prunus writes: README.md as the Hub shows it, and a picture of the layers.

A card depends on what was done and written alone, with no date and no timing, so that the same command writes the same
card. Another README.md in the folder is that of the source, and stays beside it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from .. import __version__
from ..files.json_file import read_json
from ..files.reader import SMALL
from ..files.writer import SavedTensor
from ..plot import PICTURE, finite, layers_svg

CARD = "README.md"
MARK = "<!-- written by prunus -->"
FROM_SOURCE = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MOST_FRONT_MATTER = 1 << 16  # letters of a README in which its front matter ends
LOAD_SMALL = "from prunus import load_model\n\nmodel = load_model({where})"
DOWNLOAD = "from huggingface_hub import snapshot_download\n"
LOAD_PLAIN = "from transformers import {kind}\n\nmodel = {kind}.from_pretrained({where})"
DATA = ("eval_tokens", "eval_text", "eval_batches", "tokens", "text", "batches")
METHOD = {"sparsity": "sparsity asked for", "score": "score", "scope": "weights are compared by", "probe": "probe"}
METHOD |= {"allocate": "sparsity over layers", "bits": "bits of a kept weight"}
METHOD |= {"samples": "calibration samples", "seed": "seed"}
COUNTED = ("sparsity", "parameters")  # what rows hold beside the metric
SIZES = {"weights": "weights of the blocks", "parameters": "parameters", "num_bytes": "bytes"}


@dataclass(frozen=True)
class CardFacts:
    """What the folder itself does not say: its final name, what it was made from, and how the model was pruned."""

    name: str  # of the folder
    # name, num_weights, num_pruned, sparsity, bits of codes; of a shrunk model name and share of units; errors, if any
    layers: Sequence[Mapping[str, Any]]
    source: str = ""  # folder, file, or name on the Hub
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # sparsity and metric of models compared
    settings: Mapping[str, Any] = field(default_factory=dict)  # of ``prunus prune`` or ``prunus shrink``
    of_prunable: bool = False  # whether ``layers`` are those that may be pruned; otherwise all matrices
    repo: str | None = None  # name on the Hub under which it will be
    command: str = ""  # that made it
    removed: Sequence[str] = ()  # from a shrunk model, in words
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of a shrunk one, before and after


def facts_of_files(part: Path, shapes: Mapping[str, tuple[int, ...]], rows: Sequence[SavedTensor]) -> dict[str, Any]:
    """Facts from the tensors that were written, and from the result.json of ``prunus prune`` that lies beside them."""
    known: dict[str, Any] = {}
    with suppress(ValueError):
        known = read_json(part / "result.json")
    compared, settings = (value if isinstance(value := known.get(key), dict) else {} for key in ("rows", "settings"))
    listed: Any = known["layers"] if isinstance(known.get("layers"), list) else []
    pruned = {str(layer.get("name")): layer for layer in listed if isinstance(layer, dict) and "num_pruned" in layer}
    matrices = {row.name: row for row in rows if len(shapes.get(row.name, ())) > 1 and row.numel}
    of_prunable = bool(pruned) and pruned.keys() <= matrices.keys()
    layers = []
    for name in pruned if of_prunable else matrices:
        row, total = matrices[name], matrices[name].numel
        zeros = total - row.num_nonzero + row.num_negative_zeros
        errors = {kind: pruned[name].get(kind) for kind in ("mask_error", "error")} if of_prunable else {}
        counts = {"num_weights": total, "num_pruned": zeros, "sparsity": zeros / total, "bits": row.bits}
        layers.append({"name": name, **counts, **errors})
    compared = {name: row for name, row in compared.items() if isinstance(row, dict)}
    about = {"settings": settings, "command": str(known.get("command") or "")}
    return {"layers": layers, "rows": compared, "of_prunable": of_prunable, **about}


def write_card(folder: Path, facts: CardFacts) -> None:
    card = folder / CARD
    origin = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if card.is_file() and MARK not in origin:
        names = (f"SOURCE_README{'' if number == 1 else number}.md" for number in count(1))
        card.rename(folder / next(name for name in names if not (folder / name).exists()))
    units = bool(facts.sizes) and not any("num_pruned" in layer for layer in facts.layers)
    what = "Units removed from each layer" if units else "Sparsity of each layer"
    if picture := layers_svg(facts.layers) if facts.layers else "":
        (folder / PICTURE).write_text(picture, encoding="utf-8")
    front = _front_matter(folder, facts, _top_level(origin), is_ours=MARK in origin)
    parts = [
        MARK,
        f"# {_line(facts.repo or facts.name)}",
        _summary(folder, facts),
        *([f"![{what}]({PICTURE})"] if picture else []),
        *_quality(facts),
        *_method(facts),
        f"## Load it\n\n{_how_to_load(folder, facts)}",
        *([f"## Size\n\n{_sizes(facts)}"] if facts.sizes else []),
        *([] if units else [f"## Sparsity by kind of weight\n\n{_kinds(facts.layers)}"]),
        f"## Versions and digests\n\n{_versions(folder)}",
    ]
    card.write_text("\n".join(["---", *front, "---", ""]) + "\n\n".join(parts) + "\n", encoding="utf-8")


def hub_name(source: str) -> str | None:
    """The name on the Hub of what a model was loaded from, if its path or its configuration has one."""
    path = Path(source)
    if not path.exists():
        return source if HUB_NAME.fullmatch(source) else None
    for part in path.resolve().parts:
        if match := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", part):  # the cache of huggingface_hub
            return "/".join(match.groups())
    with suppress(OSError, ValueError):
        name = read_json(path / "config.json").get("_name_or_path")
        return name if isinstance(name, str) and HUB_NAME.fullmatch(name) and not Path(name).exists() else None
    return None


def _top_level(text: str) -> dict[str, str]:
    match = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", text[:MOST_FRONT_MATTER], re.DOTALL)
    blocks = re.findall(r"^([A-Za-z_]+):(.*(?:\n[ \t-].*)*)", match[1], re.MULTILINE) if match else []
    return {key: f"{key}:{value}".rstrip() for key, value in blocks}


def _front_matter(folder: Path, facts: CardFacts, origin: Mapping[str, str], *, is_ours: bool) -> Iterator[str]:
    if is_ours and "base_model" in origin:
        yield origin["base_model"]
    elif base := hub_name(facts.source):
        yield f"base_model: {base}"
    yield from (origin[key] for key in FROM_SOURCE if key in origin)
    if (folder / "config.json").is_file():
        yield f"library_name: {'prunus' if _is_small(folder) else 'transformers'}"
    yield "\n- ".join(["tags:\n- prunus", *(["shrunk"] if facts.sizes else ["pruned", "sparse"])])


def _summary(folder: Path, facts: CardFacts) -> str:
    origin = str(facts.settings.get("model") or facts.source)
    what = _line(hub_name(origin) or (Path(origin).name if origin else "the model"))
    if facts.sizes:
        before, after = (facts.sizes[when]["parameters"] for when in ("before", "after"))
        text = f"{what}, smaller: {after:,} of {before:,} parameters stay. Removed: {_line(', '.join(facts.removed))}."
    else:
        pruned, total = (sum(layer[key] for layer in facts.layers) for key in ("num_pruned", "num_weights"))
        kind = "prunable weights" if facts.of_prunable else "weights in the matrices"
        text = f"{pruned / max(1, total):.2%} of the {total:,} {kind} of {what} are zero{_bits(facts.layers)}."
    kept = [path.name for path in sorted(folder.iterdir()) if path.name.lower().startswith(("licen", "source_readme"))]
    return text + (f" From its source: {', '.join(f'[{name}]({name})' for name in kept)}." if kept else "")


def _bits(layers: Sequence[Mapping[str, Any]]) -> str:
    coded = [layer["bits"] for layer in layers if layer.get("bits")]
    if not coded:
        return ""
    where = "" if len(coded) == len(layers) else f" of {len(coded)} of {len(layers)} matrices"
    return f"; kept weights{where} are in {' or '.join(map(str, sorted(set(coded))))} bits"


def _quality(facts: CardFacts) -> Iterator[str]:
    metric = next((name for row in facts.rows.values() for name in row if name not in COUNTED), None)
    if metric is None:
        return
    kinds = ("parameters", "sparsity")
    sizes = [kind for kind in kinds if any(finite(row.get(kind)) is not None for row in facts.rows.values())]
    if sizes == [*kinds] and not any(row.get("sparsity") for row in facts.rows.values()):
        sizes.remove("sparsity")  # of a shrunk model without zeros
    headings = ["model", *sizes, _line(metric)]
    lines = [f"| {' | '.join(headings)} |", "|---|" + "---:|" * (1 + len(sizes))]
    for name, row in facts.rows.items():
        value = finite(row.get(metric))
        cells = [_counted(kind, row.get(kind)) for kind in sizes]
        cells.append("not finite" if value is None else f"{value:.4f}")
        lines.append(f"| {' | '.join([_line(name), *cells])} |")
    data = next((facts.settings[key] for key in DATA if facts.settings.get(key)), None)
    where = f", {_line(Path(str(data)).name)}" if data else ""
    yield f"## Quality\n\nOn held-out data{where}:\n\n" + "\n".join(lines)


def _counted(kind: str, value: Any) -> str:
    number = finite(value)
    if number is None:
        return ""
    return f"{number:.2%}" if kind == "sparsity" else f"{number:,}"


def _method(facts: CardFacts) -> Iterator[str]:
    settings = facts.settings
    if not settings:
        return
    is_probed = settings.get("probe", "none") != "none"
    is_repaired = bool(settings.get("repair_probe")) if is_probed else not settings.get("no_repair")
    said = {text: settings.get(key) for key, text in METHOD.items()}
    lines = [f"- {text}: {_line(value)}" for text, value in said.items() if value not in (None, "auto", "none")]
    chosen = "which weights stay, and what they must be, was" if settings.get("score") == "auto" else "weights were"
    repair = f"{chosen} solved for, block after block" if is_repaired else "none, masks alone"
    tuned = ", then tuned to the outputs of the dense model" if settings.get("tune") else ""
    lines += [f"- repair: {repair}{tuned}"] if "score" in settings else []
    lines += [f"- recovery: {_line(settings['recovery'])}"] if settings.get("recovery") else []
    shown = re.sub(r"`|[^ -~]", " ", facts.command)  # what would end the block of code
    yield "## Method\n\n" + "\n".join(lines) + (f"\n\n```sh\n{shown}\n```" if shown else "")


def _sizes(facts: CardFacts) -> str:
    lines = ["| | before | after | stays |", "|---|---:|---:|---:|"]
    for key, text in SIZES.items():
        before, after = (facts.sizes[when][key] for when in ("before", "after"))
        lines.append(f"| {text} | {before:,} | {after:,} | {after / max(1, before):.1%} |")
    return "\n".join(lines)


def _how_to_load(folder: Path, facts: CardFacts) -> str:
    name = re.sub(r"[`\s]", "-", facts.name)  # a name of the user's that would end the block of code
    where, is_small = json.dumps(facts.repo or name), _is_small(folder)
    if (folder / "config.json").is_file():
        if is_small:
            path = f"snapshot_download({where})" if facts.repo else where
            return f"```python\n{DOWNLOAD if facts.repo else ''}{LOAD_SMALL.format(where=path)}\n```"
        kind: Any = None
        with suppress(ValueError):
            kinds = read_json(folder / "config.json").get("architectures")
            kind = kinds[0] if isinstance(kinds, list) and kinds else None
        kind = kind if isinstance(kind, str) and kind.isidentifier() else "AutoModel"
        return f"```python\n{LOAD_PLAIN.format(kind=kind, where=where)}\n```"
    if (folder / "checkpoint.pt").is_file() or (folder / "run.json").is_file():
        return f"```sh\nprunus eval {quote(name)}\n```"
    load = "from prunus import load_sparse as load" if is_small else "from safetensors.torch import load_file as load"
    file = json.dumps(f"{name}/{SMALL if is_small else 'model.safetensors'}")
    return f"```python\n{load}\n\nmodel.load_state_dict(load({file}))\n```"


def _kinds(layers: Sequence[Mapping[str, Any]]) -> str:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\d+", "*", layer["name"]), []).append(layer)
    lines = ["| weights | number | zero | sparsity |", "|---|---:|---:|---:|"]
    for kind, alike in kinds.items():
        pruned, total = (sum(layer[key] for layer in alike) for key in ("num_pruned", "num_weights"))
        code = re.sub(r"[`|]|[^ -~]", " ", kind)[:200]
        lines.append(f"| `{code}` | {len(alike)} | {pruned:,} | {pruned / max(1, total):.2%} |")
    return "\n".join(lines)


def _versions(folder: Path) -> str:
    lines = [f"- prunus {__version__}"]
    for package in ("torch", *(["transformers"] if (folder / "config.json").is_file() else [])):
        with suppress(PackageNotFoundError):
            lines.append(f"- {package} {version(package)}")
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("checkpoint.pt")]):
        with path.open("rb") as file:
            lines.append(f"- {path.name}: sha256 `{hashlib.file_digest(file, 'sha256').hexdigest()}`")
    return "\n".join(lines)


def _is_small(folder: Path) -> bool:
    return any(path.name.startswith(Path(SMALL).stem) for path in folder.glob("*.safetensors"))


def _line(value: Any) -> str:
    """Text from outside as one line that is nothing but text in Markdown."""
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))[:200]
