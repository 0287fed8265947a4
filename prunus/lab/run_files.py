"""What is stored of a run: the files of its folder, or one line of a slim study's ``runs.jsonl``. Loads no torch.

A line of ``runs.jsonl`` holds the name of the run's folder and the content of its files by their names:
``{"folder": ..., "run.json": {...}, "cell.json": {...}, "result.json": {...}, "metrics.jsonl": [...]}``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.atomic import write_atomically
from ..files.json_file import read_json, to_json
from ..files.regular import check_regular
from .run import Run, read_run, run_of
from .schema import Spec, check

SLIM = "runs.jsonl"
SLIM_FILES = ("run.json", "cell.json", "result.json", "failed.json")
MAX_POINTS = 60  # of each curve in a slim study
EVENT = ("step", "sparsity", "rates")  # what charts show of an event, and the record of its rates


@dataclass(frozen=True)
class RunFiles:
    """The files of a run or a study, read from ``path`` or, in a slim study, from a ``line`` of runs.jsonl."""

    path: Path  # the run's folder; of a slim run, where it would be
    line: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def has(self, file: str) -> bool:
        return (self.path / file).is_file() if self.line is None else file in self.line

    def load(self, file: str) -> dict[str, Any]:
        """The object in a file; ValueError where it cannot be read or is something else."""
        if self.line is None:
            return read_json(self.path / file)
        values = self.line.get(file)
        if not isinstance(values, dict):
            raise ValueError(f"{self.path / file} should hold an object, but holds a {type(values).__name__}")
        return values

    def load_checked(self, file: str, spec: Spec) -> dict[str, Any]:
        """The object in a file, with the fields that ``spec`` says."""
        values = self.load(file)
        check(values, spec, f"{self.path / file}: ", "it")
        return values

    def run(self) -> Run:
        return read_run(self.path) if self.line is None else run_of(self.load("run.json"), self.path / "run.json")

    def metrics(self) -> Iterator[Any]:
        """Lines of metrics.jsonl; None in place of the first that is damaged, and nothing after it."""
        if self.line is not None:
            yield from self.line["metrics.jsonl"]
            return
        path = self.path / "metrics.jsonl"
        check_regular(path)
        for text in path.read_text(errors="replace").splitlines():
            try:
                yield json.loads(text)
            except (ValueError, RecursionError):
                yield None
                return


def has_step(line: Any) -> bool:
    """Whether a line of metrics.jsonl is an object with a step, as all of them should be."""
    return isinstance(line, dict) and type(line.get("step")) is int


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = list(RunFiles(folder).metrics())
    for number, line in enumerate(lines, 1):
        if not has_step(line):
            raise ValueError(f"{folder / 'metrics.jsonl'}: line {number} is damaged: it is not an object with a step")
    return lines


def slim_runs(study: Path) -> list[RunFiles]:
    path, runs = study / SLIM, []
    for number, text in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from None
        folder = line.get("folder") if isinstance(line, dict) else None
        has_lines = isinstance(line, dict) and isinstance(line.get("metrics.jsonl"), list)
        if not isinstance(folder, str) or Path(folder).name != folder or not has_lines:
            raise ValueError(f"{path}: line {number} is not a run of a study")
        runs.append(RunFiles(study / "runs" / folder, line))
    return runs


def write_slim(study: Path, runs: Iterable[RunFiles]) -> None:
    """Write ``runs.jsonl``: all of a run that tables read, exactly, and its curves thinned."""
    lines = "".join(to_json(_slim_line(run)) + "\n" for run in runs)
    write_atomically(study / SLIM, lambda file: file.write(lines.encode()))


def _slim_line(run: RunFiles) -> dict[str, Any]:
    line: dict[str, Any] = {"folder": run.name}
    for file in filter(run.has, SLIM_FILES):
        try:
            line[file] = run.load(file)
        except ValueError:  # kept as it is, so that the study says what is wrong with it
            line[file] = (run.path / file).read_text(errors="replace") if run.line is None else run.line[file]
    if isinstance(line.get("run.json"), dict):
        line["run.json"] = without_paths(line["run.json"])
    lines = list(filter(has_step, run.metrics())) if run.has("metrics.jsonl") else []
    return line | {"metrics.jsonl": _thin_curves(lines)}


def _thin_curves(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluations and layers whole; of losses and events at most 60 each, with step and value, the last always."""
    kept = {i: line for i, line in enumerate(lines) if "eval" in line or "layers" in line}
    for kind in ("loss", "event"):
        places = [i for i, line in enumerate(lines) if kind in line and i not in kept]
        stride = max(1, -(-len(places) // MAX_POINTS))
        for i in places[::-stride]:
            value = lines[i][kind]
            if kind == "event" and isinstance(value, dict):
                value = {name: value[name] for name in EVENT if name in value}
            kept[i] = {"step": lines[i]["step"], kind: value}
    return [kept[i] for i in sorted(kept)]


def without_paths(value: Any) -> Any:
    """The same values with the last part of every path alone: where files lay on some machine helps nobody else."""
    if isinstance(value, dict):
        return {name: without_paths(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_paths(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "./", "../", "~")) else value
