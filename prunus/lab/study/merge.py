"""One study from several: runs made on different machines, or a slim copy."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...files.atomic import new_folder
from ...files.json_file import read_json, write_json
from ..run_files import SLIM, RunFiles, without_paths, write_slim
from .results import update
from .study_folder import Folder, damage
from .study_plan import extended, key_of

COPIED = ("run.json", "metrics.jsonl", "result.json", "cell.json", "failed.json", "masks.safetensors")
AGREE = ("loss", "accuracy", "sparsity", "digest")


def merge(paths: Sequence[Path], out: Path, *, slim: bool = False) -> dict[str, Any]:
    """Write all runs of the studies in ``paths`` into ``out``; returns what they say together.

    They must share base and data, and a run that two of them finished must have ended alike. A ``slim`` study has
    its runs in one file, without masks and checkpoints and with thinned curves. Nothing is written on refusal.
    """
    if not paths:
        raise ValueError("name the studies to merge: prunus study merge A B --out C")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another --out")
    folders = [Folder(path) for path in paths]
    for folder in folders:
        _refuse_links(folder.path)
    plan = folders[0].plan()
    for folder in folders[1:]:
        plan = extended(plan, folder.plan(), folders[0].path)
    for folder in folders:
        folder.check_runs(plan)
    runs = _runs(folders)
    environment = read_json(folders[0].path / "study.json").get("environment")  # each run has its own in its run.json
    environment = environment if isinstance(environment, dict) else {}
    merged = {"merged": [str(path) for path in paths]} if len(paths) > 1 else {}
    with new_folder(out) as part:
        whole = Folder(part)
        whole.write(plan, environment | merged)
        for run in runs:
            if run.line is None:
                target = part / "runs" / run.name
                target.mkdir()
                for name in COPIED if slim else (*COPIED, "checkpoint.pt"):
                    if run.has(name):
                        shutil.copy2(run.path / name, target / name)
        if slim_ones := [run for run in runs if run.line is not None]:
            write_slim(part, slim_ones)
        for notes in [path / "notes.md" for path in paths if (path / "notes.md").is_file()][:1]:
            shutil.copy2(notes, part / "notes.md")
        values = update(whole)
        if slim:
            write_slim(part, whole.runs().values())
            shutil.rmtree(part / "runs")
            write_json(part / "study.json", without_paths(read_json(part / "study.json")))
        shutil.rmtree(part / "locks")
    return values


def _refuse_links(study: Path) -> None:
    """ValueError where a link leads out of the folder: what it points to would be copied as part of the study."""
    root = Path(os.path.realpath(study))
    paths = [study / name for name in ("study.json", SLIM, "notes.md", "runs")]
    paths += [path for pattern in ("runs/*", "runs/*/*") for path in study.glob(pattern)]
    for path in paths:
        if not (real := Path(os.path.realpath(path))).is_relative_to(root):
            raise ValueError(f"{path} is a link out of the study, to {real}; replace it with what it points to")


def _runs(folders: Sequence[Folder]) -> list[RunFiles]:
    """Each computation once: a finished run before one that failed or is damaged; two finished ones must agree."""
    by_key: dict[str, RunFiles] = {}
    for run in [run for folder in folders for run in folder.runs().values()]:
        if not run.has("run.json") or not (run.has("result.json") or run.has("failed.json")):
            continue
        key = key_of(run.run())
        other = by_key.setdefault(key, run)
        if other is run or damage(run):
            continue
        if damage(other):
            by_key[key] = run
            continue
        ours, theirs = other.load("result.json"), run.load("result.json")
        for name in AGREE:
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"{other.path} and {run.path} are the same run but ended with {name} {ours.get(name)} and "
                    f"{theirs.get(name)}; move one of them away"
                )
    return list(by_key.values())
