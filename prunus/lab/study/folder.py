"""The folder of a study: what was planned, what is finished, what failed, and who is at it."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.json_file import read_json, write_json
from ..run import read_run
from .keys import canonical, key_of
from .plan import FORMAT, Cell, Plan, extended

NUMBERS = ("accuracy", "sparsity", "num_prunable", "tokens", "examples", "seconds")  # which every result has
QUALITIES = ("loss", "perplexity")  # null if the training diverged


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def exists(self) -> bool:
        return (self.path / "study.json").is_file()

    def run(self, cell: Cell) -> Path:
        return self.path / "runs" / cell.folder

    def plan(self) -> Plan:
        """The plan that is written here."""
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
        self._check_is_free(alone=False)
        with self.locked("study", wait=True):  # what another process adds meanwhile is not to be lost
            self._check_is_free(alone=True)
            whole = extended(self.plan(), plan, self.path) if self.exists else plan
            self.check_runs(whole)
            self._write(whole, environment)
        return whole

    def _check_is_free(self, *, alone: bool) -> None:
        """Refuse a folder that holds something and is no study, nor about to become one if we are not ``alone``."""
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        begins = "locks" in names and (names == {"locks"} or not alone)
        if names and not self.exists and not begins:
            raise ValueError(f"{self.path} is not empty and not a study; choose another --out")

    def write(self, plan: Plan, environment: Mapping[str, Any]) -> None:
        with self.locked("study", wait=True):
            self._write(plan, environment)

    def _write(self, plan: Plan, environment: Mapping[str, Any]) -> None:
        write_json(self.path / "study.json", plan.to_json() | {"environment": environment})
        (self.path / "runs").mkdir(exist_ok=True)

    def check_runs(self, plan: Plan) -> None:
        """Refuse a finished run that has the name of a planned one and computed something else."""
        for cell in plan.cells:
            folder = self.run(cell)
            if not (folder / "result.json").is_file():
                continue
            here, asked = canonical(read_run(folder)), canonical(plan.run_of(cell))
            if data := self.about(folder).get("data"):
                here, asked = here | data, asked | dict(plan.data)
            for name in sorted(here.keys() | asked.keys()):
                if here.get(name) != asked.get(name):
                    raise ValueError(
                        f"{folder} was run with {name} = {here.get(name)}, the study has {asked.get(name)};"
                        " move that folder away"
                    )

    def finished(self) -> dict[str, Path]:
        """Folders of the runs with a whole result, by what they compute."""
        return {key: run for key, run in self.ended().items() if not damage(run)}

    def damaged(self) -> dict[str, str]:
        """What is wrong with the results that are not whole, by what their runs compute."""
        return {key: said for key, run in self.ended().items() if (said := damage(run))}

    def ended(self) -> dict[str, Path]:
        """Folders of the runs that are not to be run again: finished ones, and damaged ones, which are kept."""
        found = (path.parent for path in sorted(self.path.glob("runs/*/result.json")))
        return {key_of(read_run(run)): run for run in found}

    @staticmethod
    def about(run: Path) -> dict[str, Any]:
        """What ``cell.json`` says of a run; nothing for a run that no study made."""
        return read_json(run / "cell.json") if (run / "cell.json").is_file() else {}

    def failure(self, cell: Cell) -> dict[str, Any] | None:
        path = self.run(cell) / "failed.json"
        return read_json(path) if path.is_file() else None

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


def damage(run: Path) -> str:
    """What is wrong with the result of a run and what to do about it; empty if it is whole."""
    path, mend = run / "result.json", "move it away to have it run again"
    known = f"runs/{run.name}/result.json"  # wherever the study is moved to
    try:
        values = read_json(path)
    except ValueError as error:
        return f"{error}; {mend}".replace(str(path), known)
    wrong = [
        name for name in (*NUMBERS, *values.keys() & {"num_asked"}) if not isinstance(values.get(name), int | float)
    ]
    wrong += [name for name in QUALITIES if not isinstance(values.get(name, ""), int | float | None)]
    return f"{known} has no number for {wrong[0]}; {mend}" if wrong else ""
