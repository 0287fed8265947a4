"""The workers of ``prunus study``: one in this process, or one process a device."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from typing import Any

import torch

from ..lab.models import build
from ..lab.recipe import data_of
from ..lab.run import Run
from ..lab.study.runner import Options, Worker
from ..lab.study.study_folder import Folder
from ..lab.study.study_plan import Cell, StudyPlan
from ..lab.tracking import environment
from ..lab.trainer import Progress
from .console import escaped, print, progress_bar

PrintTable = Callable[[Mapping[str, Any]], None]  # prints what is known


def work(folder: Folder, plan: StudyPlan, options: Options, devices: list[str], print_table: PrintTable) -> bool:
    """Do the runs of the plan that are not done, on all devices; False if a worker died."""
    if not folder.exists:
        with torch.device("meta"):  # data that cannot be read or does not suit the model: refused before writing
            build(plan.base.model, data_of(plan.base).shape, plan.base.width, plan.base.layers)
    folder.join(plan, environment())
    if len(devices) == 1 and devices[0] in ("cpu", "auto"):
        Worker(folder, options, Lines("", print_table)).work(plan.cells)
        return True
    return _in_processes(folder, plan.cells, options, devices)


def devices_of(text: str) -> list[str]:
    """A name for each worker, as CUDA_VISIBLE_DEVICES has it, or cpu; auto is what this process sees."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if not text:
        count = torch.cuda.device_count()
        return ["auto"] if count < 2 else (visible or list(map(str, range(count))))
    names = [part.strip().removeprefix("cuda:") for part in text.split(",") if part.strip()]
    if wrong := [name for name in names if name != "cpu" and not name.isdigit()]:
        raise ValueError(f"--devices takes numbers of GPUs or cpu, separated by commas, got {wrong[0]!r}")
    limit = torch.cuda.device_count()
    if wrong := [name for name in names if name != "cpu" and int(name) >= limit]:
        raise ValueError(f"--devices names GPU {wrong[0]}, but the number of visible GPUs is {limit}")
    if not names:
        raise ValueError("--devices names no device; give numbers of GPUs or cpu, separated by commas")
    return [name if name == "cpu" or not visible else visible[int(name)] for name in names]


def _in_processes(folder: Folder, cells: tuple[Cell, ...], options: Options, devices: list[str]) -> bool:
    """One worker process a device; they claim runs one by one. If one dies, the others go on; False is returned."""
    processes = []
    try:
        for device in devices:
            own = replace(options, at_once=devices.count(device), device="cpu" if device == "cpu" else "cuda")
            process = get_context("spawn").Process(target=worker, args=(folder, cells, own, device))
            before = os.environ.copy()
            os.environ |= environment_of(device, len(devices))
            try:
                process.start()  # with the environment as it is now
            finally:
                os.environ.clear()
                os.environ |= before
            processes.append(process)
        for process in processes:
            process.join()
        codes = {device: process.exitcode for device, process in zip(devices, processes, strict=True)}
        for device, code in codes.items():
            if code:
                said = f"the worker on {device} ended with code {code}; run the same command again to continue"
                print(said, file=sys.stderr)
        return not any(codes.values())
    finally:
        for process in processes:
            process.terminate()
            process.join()


def environment_of(device: str, num_workers: int) -> dict[str, str]:
    """The environment of a worker that sees one GPU, or none; workers share the threads that torch would use."""
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_workers))}
    return threads | os.environ | ({} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": device})


def worker(folder: Folder, cells: tuple[Cell, ...], options: Options, device: str) -> None:
    """What a worker process does; it ends with its parent, which cannot end it when it is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        Worker(folder, options, Lines(f"[{device}] ")).work(cells)
    except (ValueError, OSError) as error:
        raise SystemExit(escaped(f"prunus study: {' '.join(str(error).split())}")) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
    os._exit(1)


@dataclass(frozen=True)
class Lines:
    """A bar for the run that goes on, a line for each that is done, and the table after each seed of all arms."""

    prefix: str  # names the worker; the only one has none, and a bar
    print_table: PrintTable = lambda values: None

    @contextmanager
    def running(self, title: str, run: Run) -> Iterator[Progress]:
        with progress_bar(f"{self.prefix}{title}", run.total_steps, is_alone=not self.prefix) as report:
            yield report

    def done(self, line: str, values: Mapping[str, Any]) -> None:
        print(f"{self.prefix}{line} ({values['num_finished']} of {values['num_runs']})", file=sys.stderr)
        if values["round_ends"] and values["num_finished"] < values["num_runs"] and not self.prefix:
            self.print_table(values)
