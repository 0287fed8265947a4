"""Doing the runs of a study one after the other: claimed, timed, and with failures recorded."""

import gc
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ...files.json_file import write_json
from ..checkpoint import remove_checkpoints, save_checkpoint
from ..recipe import Data, data_of
from ..run import Run, read_run
from ..tracking import machine
from ..trainer import Progress, Training, train
from .overlap import keep_masks
from .results import update
from .starts import Starts
from .study_folder import Folder
from .study_plan import Cell, key_of, num_examples

MARGIN = 1.05  # on the longest run so far, when a run must end in time
SLACK = 2.0  # seconds


@dataclass(frozen=True)
class Options:
    """How runs are done, which decides nothing of what they compute."""

    device: str = "auto"
    deadline: float | None = None  # time.time() after which nothing should run
    session: str = ""  # a run that failed is tried again in the next session
    save_every: int = 0
    keep_checkpoints: bool = False
    at_once: int = 1  # workers that share the device, which makes each slower


class Show(Protocol):
    """Where a worker reports what it does."""

    def running(self, title: str, run: Run) -> AbstractContextManager[Progress]: ...

    def done(self, line: str, values: Mapping[str, Any]) -> None: ...


class Worker:
    """Does the runs of a study that are left, in one process: data and compiled code are shared by them."""

    def __init__(self, folder: Folder, options: Options, show: Show) -> None:
        self.folder, self.options, self.show = folder, options, show
        self.plan = folder.plan()
        self.data: Data | None = None
        self.compiled: tuple[Any, ...] | None = None  # what the code in torch's cache was compiled for
        self.num_done = 0
        self.starts = Starts()

    def work(self, cells: Iterable[Cell]) -> None:
        """Every run for ``cells`` that is neither done nor at another worker, nor too long for the time left."""
        wanted = {self.plan.owners[cell] for cell in cells}
        todo = [cell for cell in self.plan.ordered() if cell in wanted]
        for place, cell in enumerate(todo):
            with self.folder.locked(cell.folder) as free:
                if free and self._is_left(cell):
                    self._do(cell, todo[place + 1 :])

    def _is_left(self, cell: Cell) -> bool:
        if key_of(self.plan.run_of(cell)) in self.folder.ended():
            return False
        failure = self.folder.failures().get(cell.folder, {})
        if failure.get("session") == self.options.session:
            return False
        left = math.inf if self.options.deadline is None else self.options.deadline - time.time()
        expected = estimate(self.folder, self.plan.run_of(cell), cold=self.num_done == 0, at_once=self.options.at_once)
        return (expected or 0.0) < left

    def _do(self, cell: Cell, later: Sequence[Cell]) -> None:
        self.data = self.data or data_of(self.plan.base)
        run = self._prepared(cell)
        title = cell.folder
        try:
            with self.show.running(title, run) as progress:
                line = self._trained(cell, run, progress, later)
        except Exception as error:  # whatever it is, the other arms go on
            line = self._failed(run.out, error)
        self.num_done += 1
        self.show.done(f"{title}: {line}", update(self.folder))
        free_memory()

    def _prepared(self, cell: Cell) -> Run:
        """The run of a cell, its folder emptied unless a checkpoint in it can be taken up."""
        out, run = self.folder.run(cell), self.plan.run_of(cell)
        if (out / "checkpoint.pt").is_file() and not (out / "failed.json").exists():
            saved = read_run(out)
            if key_of(saved) == key_of(run):
                return replace(saved, out=out, resume=True)
        if out.exists():
            shutil.rmtree(out)
        return replace(run, out=out, device=self.options.device, save_every=self.options.save_every)

    def _trained(self, cell: Cell, run: Run, progress: Progress, later: Sequence[Cell]) -> str:
        cold = self._prepare_compiler(run)
        started = time.perf_counter()
        start = None if run.resume else self.starts.of(run)
        ended = self.folder.ended()
        others = [other for other in map(self.plan.run_of, later) if key_of(other) not in ended]
        shared = {"shared_steps": start.state["step"] if start else 0}

        def finish(training: Training) -> None:
            keep_masks(training)
            if self.options.keep_checkpoints:
                save_checkpoint(run.out / "checkpoint.pt", training.state())
            seconds = time.perf_counter() - started + (start.state["seconds"] if start else 0.0)  # as if made alone
            seconds = max(seconds, training.seconds)  # a resumed run was trained in part before
            noted = {"data": dict(self.plan.data), "at_once": self.options.at_once}
            write_json(run.out / "cell.json", cell_notes(cell, run, seconds, cold) | shared | noted)

        recorder = self.starts.recorder(run, () if run.resume else others)  # a resumed one may have begun elsewhere
        result = train(
            run, stopping_if_diverged(progress), data=self.data, start=start, after_step=recorder, finish=finish
        )
        if not self.options.keep_checkpoints:
            remove_checkpoints(run.out)
        quality = f"perplexity {result.perplexity:.3f}" if result.tokens else f"accuracy {result.accuracy:.2%}"
        return f"{quality} at {result.sparsity:.4%} zeros, {time.perf_counter() - started:.1f} s"

    def _prepare_compiler(self, run: Run) -> bool:
        """Forget compiled code for other shapes, which would make torch compile for any; whether the run is cold."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        needs = (run.batch, run.precision) if run.compile else None
        if needs and self.compiled and needs != self.compiled:
            torch.compiler.reset()
        cold = self.num_done == 0 or needs not in (None, self.compiled)
        self.compiled = needs or self.compiled
        return cold

    def _failed(self, out: Path, error: Exception) -> str:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        out.mkdir(parents=True, exist_ok=True)
        values = {"message": message, "session": self.options.session, "when": now()}
        write_json(out / "failed.json", values)
        return f"failed, {message}"


def stopping_if_diverged(progress: Progress) -> Progress:
    """``progress``, which ends a run whose loss is not finite any more."""

    def report(step: int, values: dict[str, Any]) -> None:
        for loss in (values.get("loss", 0.0), values.get("eval", {}).get("loss", 0.0)):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {step}")
        progress(step, values)

    return report


def cell_notes(cell: Cell, run: Run, seconds: float, cold: bool) -> dict[str, Any]:
    """What ``cell.json`` says of a finished run."""
    on_gpu = torch.cuda.is_available() and run.device != "cpu"
    return {
        "arm": cell.arm,
        "sparsity": cell.sparsity,
        "seed": cell.seed,
        "wall_seconds": seconds,
        "examples": num_examples(run),
        "cold": cold,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
        "machine": machine(),
        "finished": now(),
    }


def estimate(folder: Folder, run: Run, *, cold: bool, at_once: int = 1) -> float | None:
    """Seconds that ``run`` will take at most, by the runs done on this machine; None if there are none."""
    notes = [run.load("cell.json") for run in folder.runs().values() if run.has("cell.json")]
    here = [note for note in notes if note.get("machine") == machine()]
    beside = [note for note in here if note.get("at_once", 1) == at_once] or here
    alike = [note for note in beside if note["cold"] == cold] or beside
    if not alike:
        return None
    return MARGIN * max(note["wall_seconds"] / note["examples"] for note in alike) * num_examples(run) + SLACK


def free_memory() -> None:
    """Free what the last run held; ValueError if a fault has made the GPU unusable to this process."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise ValueError(f"the GPU cannot be used by this process any more: {error}; start again") from error


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
