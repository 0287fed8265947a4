"""Doing the runs of a study one after the other: claimed, timed, and with failures recorded.

Runs of one recipe and seed are one computation until their first event: the first run of a process trains this dense
start, and the others begin from its state: the same bits, sooner.
"""

import gc
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from ...files.json_file import write_json
from ...files.torch_file import write_torch_file
from ...schedule import Ramp
from ..checkpoint import remove_checkpoints
from ..recipe import Data, data_of, recorded_rates
from ..run import Run, read_run
from ..run_files import read_metrics
from ..tracking import machine
from ..trainer import DenseStart, Progress, Training, train
from .results import update
from .study_folder import Folder, read_cell, save_masks
from .study_plan import Cell, dense_of, key_of, num_examples

MARGIN = 1.05  # on the longest run so far, when a run must end in time
SLACK = 2.0  # seconds
MOST_STARTS = 4  # that are kept at a time: each is as large as a checkpoint
COLLECT = ("movement", "wanda")  # scores that collect from the first step on


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
        postponed: dict[Cell, Cell] = {}  # to the run that they replay, which another worker may be training
        for place, cell in enumerate(todo):
            source = self.plan.replayed_by(cell)
            if source and key_of(self.plan.run_of(source)) not in self.folder.ended():
                postponed[cell] = source
            else:
                self._do_if_left(cell, todo[place + 1 :])
        for cell, source in postponed.items():
            with self.folder.locked(source.folder, wait=True):
                pass
            self._do_if_left(cell, ())

    def _do_if_left(self, cell: Cell, later: Sequence[Cell]) -> None:
        with self.folder.locked(cell.folder) as free:
            if free and self._is_left(cell):
                self._do(cell, later)

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
        try:
            with self.show.running(cell.folder, run) as progress:
                line = self._trained(cell, run, progress, later)
        except BrokenPipeError:  # nobody reads what is printed any more: no fault of the run
            raise
        except Exception as error:  # whatever it is, the other arms go on
            message = " ".join(f"{type(error).__name__}: {error}".split())
            line = f"failed, {message}"
            run.out.mkdir(parents=True, exist_ok=True)
            failed = {"message": message, "session": self.options.session, "when": now()}
            write_json(run.out / "failed.json", failed)
        self.num_done += 1
        self.show.done(f"{cell.folder}: {line}", update(self.folder))
        free_memory()

    def _prepared(self, cell: Cell) -> Run:
        """The run of a cell, its folder emptied unless a checkpoint in it can be taken up."""
        out, run = self.folder.run(cell), self.plan.run_of(cell)
        if (out / "checkpoint.pt").is_file() and not (out / "failed.json").exists():
            begun = read_run(out)
            if key_of(begun) == key_of(run):
                return replace(begun, out=out, resume=True)
        if out.exists():
            shutil.rmtree(out)
        return replace(run, out=out, device=self.options.device, save_every=self.options.save_every)

    def _trained(self, cell: Cell, run: Run, progress: Progress, later: Sequence[Cell]) -> str:
        cold = self._prepare_compiler(run)
        started = time.perf_counter()
        start = None if run.resume else self.starts.of(run)
        ended = self.folder.ended()
        others = [replace(self.plan.run_of(cell), out=self.folder.run(cell)) for cell in later]
        others = [other for other in others if key_of(other) not in ended]

        def finish(training: Training) -> None:
            if training.pruner is not None:
                save_masks(run.out, training.pruner.masks)
            if self.options.keep_checkpoints:
                write_torch_file(run.out / "checkpoint.pt", training.state())
            seconds = time.perf_counter() - started + (start.wall_seconds if start else 0.0)  # as if made alone
            seconds = max(seconds, training.seconds)  # a resumed run was trained in part before
            on_gpu = torch.cuda.is_available() and run.device != "cpu"
            notes = {
                **asdict(cell),
                "wall_seconds": seconds,
                "examples": num_examples(run),
                "cold": cold,
                "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None,
                "machine": machine(),
                "finished": now(),
                "shared_steps": start.state["step"] if start else 0,
                "data": dict(self.plan.data),
                "at_once": self.options.at_once,
            }
            write_json(run.out / "cell.json", notes)

        recorder = self.starts.recorder(run, () if run.resume else others)  # a resumed one may have begun elsewhere
        show = stopping_if_diverged(progress)
        result = train(run, show, data=self.data, start=start, after_step=recorder, finish=finish)
        if not self.options.keep_checkpoints:
            remove_checkpoints(run.out)
        quality = f"perplexity {result.perplexity:.3f}" if result.tokens else f"accuracy {result.accuracy:.2%}"
        return f"{quality} at {result.sparsity:.4%} zeros, {time.perf_counter() - started:.1f} s"

    def _prepare_compiler(self, run: Run) -> bool:
        """Forget compiled code for other shapes, which would make torch compile for any; whether the run is cold."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        needs = (run.model, run.width, run.layers, run.batch, run.precision) if run.compile else None
        if needs and self.compiled and needs != self.compiled:
            torch.compiler.reset()
        cold = self.num_done == 0 or needs not in (None, self.compiled)
        self.compiled = needs or self.compiled
        return cold


def stopping_if_diverged(progress: Progress) -> Progress:
    def report(step: int, values: dict[str, Any]) -> None:
        for loss in (values.get("loss", 0.0), values.get("eval", {}).get("loss", 0.0)):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {step}")
        progress(step, values)

    return report


def estimate(folder: Folder, run: Run, *, cold: bool, at_once: int = 1) -> float | None:
    """Seconds that ``run`` will take at most, by the runs done on this machine; None if there are none."""
    notes = [note for run in folder.runs().values() if (note := read_cell(run)).get("examples")]
    here = [note for note in notes if note.get("machine") == machine() and note.get("wall_seconds") is not None]
    beside = [note for note in here if note.get("at_once", 1) == at_once] or here
    alike = [note for note in beside if note.get("cold") == cold] or beside
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
            raise ValueError(f"this process can no longer use the GPU: {error}; start again") from error


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def num_shared(run: Run) -> int:
    """Steps that a run shares with the dense run of its recipe: those before its first event."""
    if run.parallel != "none" or run.optimizer == "adamwprune" or run.score in COLLECT:
        return 0
    before = run.total_steps - 1
    if run.replay:
        try:
            before = recorded_rates(run)[0][0]
        except ValueError:  # the run to replay is not finished yet
            return 0
    if run.score != "none":
        schedule = run.sparsity_schedule()
        first = min(schedule.begin or run.event_period, schedule.end) if isinstance(schedule, Ramp) else schedule.end
        before = min(before, int(first) - 1)
    return before


def _recipe(run: Run) -> str:
    """Equal for runs whose dense starts are interchangeable: one computation, with the same groups in the optimizer."""
    return f"{key_of(dense_of(run))} {'alone' if run.rate_power or run.replay else 'together'}"


@dataclass
class Starts:
    """States, in main memory, that later runs will begin from, by recipe with seed and by step."""

    states: dict[tuple[str, int], DenseStart] = field(default_factory=dict)

    def of(self, run: Run) -> DenseStart | None:
        """Where ``run`` may begin: the latest start there is for it."""
        recipe, most = _recipe(run), num_shared(run)
        steps = [step for key, step in self.states if key == recipe and step <= most]
        return self.states[recipe, max(steps)] if steps else None

    def recorder(self, run: Run, others: Iterable[Run]) -> Callable[[Training], None]:
        """To be called after each step: keeps states that ``others`` can begin from, and drops those none needs."""
        wanted = [(_recipe(other), num_shared(other)) for other in others]
        self.states = {
            (key, step): start
            for (key, step), start in self.states.items()
            if any(key == recipe and step <= most for recipe, most in wanted)
        }
        mine, most = _recipe(run), num_shared(run)
        steps = {min(step, most) for recipe, step in wanted if recipe == mine}
        first: tuple[int, float, float] | None = None  # step, seconds and time after the first, which may have compiled
        zeros: dict[int, dict[str, Any]] = {}  # at evaluations; a dense run does not log them

        def keep(training: Training) -> None:
            nonlocal first
            step, seconds, now = training.step, training.seconds, time.perf_counter()
            number, before, began = first = first or (step, seconds, now)
            if step <= max(steps, default=0) and step % training.run.eval_every == 0:
                zeros[step] = training.zeros(of_dense=True)
            if step not in steps or (mine, step) in self.states or len(self.states) >= MOST_STARTS:
                return
            wall = seconds
            if step > number:  # as it would be without what only the first run of a process pays
                taken = (seconds - before, now - began)
                seconds, wall = (each / (step - number) * step for each in taken)
            state = training.state() | {"pruner": None, "seconds": seconds}
            lines = [line for line in read_metrics(training.run.out) if 0 < line["step"] <= step]
            lines = [line | zeros[line["step"]] if "eval" in line else line for line in lines]
            self.states[mine, step] = DenseStart(_in_main_memory(state), lines, wall)

        return keep


def _in_main_memory(value: Any) -> Any:
    """A copy in which no tensor is shared with ``value``."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _in_main_memory(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_in_main_memory, value))
    return value
