"""One study from several: runs made on different machines, or a copy without what is large."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...files.json_file import read_json, write_json
from ..run import read_run
from .folder import Folder, damage
from .keys import key_of
from .plan import extended
from .results import update

KEPT = ("run.json", "metrics.jsonl", "result.json", "cell.json", "failed.json")
LARGE = ("masks.safetensors", "checkpoint.pt")
NUM_LOSSES = 50  # about so many stay in a slim copy
AGREE = ("loss", "accuracy", "sparsity", "digest")


def merge(paths: Sequence[Path], out: Path, *, slim: bool = False) -> dict[str, Any]:
    """Write all runs of the studies in ``paths`` into ``out``; returns what they say together.

    They must share base and data, and a run that two of them finished must have ended alike. ``slim`` leaves
    out masks, checkpoints and most of metrics.jsonl between evaluations. Nothing is written on refusal.
    """
    if not paths:
        raise ValueError("name the studies to merge: prunus study merge A B --out C")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another --out")
    folders = [Folder(path) for path in paths]
    plan = folders[0].plan()
    for folder in folders[1:]:
        plan = extended(plan, folder.plan(), folders[0].path)
    for folder in folders:
        folder.check_runs(plan)
    runs = _runs(folders)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    whole = Folder(part)
    whole.write(plan, _environment(folders))
    for source in runs.values():
        _copy(source, part / "runs" / source.name, slim)
    for notes in [folder.path / "notes.md" for folder in folders if (folder.path / "notes.md").is_file()][:1]:
        shutil.copy2(notes, part / "notes.md")
    values = update(whole)
    if slim:
        for path in (part / "study.json", *part.glob("runs/*/run.json")):
            write_json(path, without_places(read_json(path)))
    shutil.rmtree(part / "locks")
    if out.is_dir():
        out.rmdir()
    part.replace(out)
    return values


def _runs(folders: Sequence[Folder]) -> dict[str, Path]:
    """The folder of each computation: a finished one before one that failed or is damaged; two finished must agree."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.path.glob("runs/*/run.json")):
            run = path.parent
            if not any((run / name).is_file() for name in ("result.json", "failed.json")):
                continue
            other = found.setdefault(key_of(read_run(run)), run)
            if other == run or damage(run):
                continue
            if not damage(other):
                _check_agree(other, run)
            else:
                found[key_of(read_run(run))] = run
    return found


def _check_agree(first: Path, second: Path) -> None:
    ours, theirs = read_json(first / "result.json"), read_json(second / "result.json")
    for name in AGREE:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{first} and {second} are the same run but ended with {name} {ours.get(name)} and {theirs.get(name)};"
                " move one of them away"
            )


def _environment(folders: Sequence[Folder]) -> dict[str, Any]:
    """The first study's environment; each run has its own in its run.json."""
    return read_json(folders[0].path / "study.json")["environment"] | {"merged": [str(f.path) for f in folders]}


def _copy(source: Path, target: Path, slim: bool) -> None:
    target.mkdir(parents=True)
    for name in KEPT if slim else (*KEPT, *LARGE):
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)
    if slim and (target / "metrics.jsonl").is_file():
        lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
        (target / "metrics.jsonl").write_text("".join(_slimmed(lines)))


def _slimmed(lines: Sequence[str]) -> Iterator[str]:
    """Lines of evaluations and of the layers, step and sparsity of events, and some of the losses between."""
    every = [json.loads(line) for line in lines]
    rare = max(1, sum("loss" in values for values in every) // NUM_LOSSES)
    num_losses = 0
    for line, values in zip(lines, every, strict=True):
        num_losses += "loss" in values
        if "event" in values:
            event = {name: values["event"][name] for name in ("step", "sparsity")}
            yield json.dumps({"step": values["step"], "event": event}) + "\n"
        elif "eval" in values or "layers" in values or num_losses % rare == 0:
            yield line


def without_places(value: Any) -> Any:
    """The same values with the last part of every path alone: where files lay on some machine tells nobody else."""
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "./", "../", "~")) else value
