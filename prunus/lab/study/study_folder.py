"""The folder of a study: what was planned, what is finished, what failed, and which runs are claimed."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.json_file import read_json, write_json
from ..run_files import RunFiles, slim_runs
from .study_plan import FORMAT, Cell, Plan, canonical, extended, key_of

NUMBERS = ("accuracy", "sparsity", "num_prunable", "tokens", "examples", "seconds")  # every result has them
QUALITIES = ("loss", "perplexity")  # null if the training diverged


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def exists(self) -> bool:
        return (self.path / "study.json").is_file()

    def run(self, cell: Cell) -> Path:
        """Where a cell is trained."""
        return self.path / "runs" / cell.folder

    def plan(self) -> Plan:
        """The plan in study.json."""
        path = self.path / "study.json"
        if not path.is_file():
            raise ValueError(f"{self.path} is not a study: it has no study.json")
        values = read_json(path)
        if values.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {values.get('format')!r}; this version reads {FORMAT}")
        try:
            return Plan.from_json(values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error!r}") from error

    def join(self, plan: Plan, environment: Mapping[str, Any]) -> Plan:
        """Write ``plan`` here, together with what is planned here already; returns both."""
        self._check_is_free(locked=False)
        with self.locked("study", wait=True):  # another process may add to the plan at the same time
            self._check_is_free(locked=True)
            whole = extended(self.plan(), plan, self.path) if self.exists else plan
            self.check_runs(whole)
            self.write(whole, environment)
        return whole

    def _check_is_free(self, *, locked: bool) -> None:
        """Refuse a folder that holds something and is no study; until we have the lock another may be making one."""
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        begins = "locks" in names and (names == {"locks"} or not locked)
        if names and not self.exists and not begins:
            raise ValueError(f"{self.path} is not empty and not a study; choose another --out")

    def write(self, plan: Plan, environment: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "study.json", plan.to_json() | {"environment": environment})
        (self.path / "runs").mkdir(exist_ok=True)

    def check_runs(self, plan: Plan) -> None:
        """Refuse a finished run that has the name of a planned one and computed something else."""
        stored = self.runs()
        for cell in plan.cells:
            run = stored.get(cell.folder)
            if run is None or not run.has("result.json"):
                continue
            here, planned = canonical(run.run()), canonical(plan.run_of(cell))
            if data := run.load_if_there("cell.json").get("data"):
                here, planned = here | data, planned | dict(plan.data)
            for name in sorted(here.keys() | planned.keys()):
                if here.get(name) != planned.get(name):
                    raise ValueError(
                        f"{run.path} was run with {name} = {here.get(name)}, the study has {planned.get(name)};"
                        " move that folder away"
                    )

    def runs(self) -> dict[str, RunFiles]:
        """What is stored of every run, in runs.jsonl or in a folder of its own, by the name of its folder."""
        folders = (path for path in (self.path / "runs").glob("*") if path.is_dir())
        found = [*slim_runs(self.path), *map(RunFiles, folders)]  # a folder of a run stands above its line
        return {run.name: run for run in sorted(found, key=lambda run: run.name)}

    def ended(self) -> dict[str, RunFiles]:
        """Runs that are not to be run again, by what they compute: finished ones, and damaged ones, which are kept."""
        return {key_of(run.run()): run for run in self.runs().values() if run.has("result.json")}

    def finished(self) -> dict[str, RunFiles]:
        """Runs with a whole result, by what they compute."""
        return {key: run for key, run in self.ended().items() if not damage(run)}

    def damaged(self) -> dict[str, str]:
        """What is wrong with the results that are not whole, by what their runs compute."""
        return {key: wrong for key, run in self.ended().items() if (wrong := damage(run))}

    def failures(self) -> dict[str, dict[str, Any]]:
        """What is known of the runs that failed, by the name of their folder."""
        return {name: run.load("failed.json") for name, run in self.runs().items() if run.has("failed.json")}

    @contextmanager
    def locked(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Whether this process alone holds the lock ``name``; the system frees it if the process dies."""
        (self.path / "locks").mkdir(parents=True, exist_ok=True)
        with (self.path / "locks" / f"{name}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True


def damage(run: RunFiles) -> str:
    """What is wrong with the result of a run and what to do about it; empty if it is whole."""
    path, mend = run.path / "result.json", "move it away to have it run again"
    known = f"runs/{run.name}/result.json"  # wherever the study is moved to
    try:
        values = run.load("result.json")
    except ValueError as error:
        return f"{error}; {mend}".replace(str(path), known)
    wrong = [
        name for name in (*NUMBERS, *values.keys() & {"num_asked"}) if not isinstance(values.get(name), int | float)
    ]
    wrong += [name for name in QUALITIES if not isinstance(values.get(name, ""), int | float | None)]
    return f"{known} has no number for {wrong[0]}; {mend}" if wrong else ""
