"""``prunus profile``"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..lab.run import Run
from .console import print, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..lab.profile.measure import Profile


UNREAD = ("track", "eval_every", "eval_size", "save_every", "log_every")  # options of a run that is kept


@dataclass(frozen=True)
class Command:
    """Say where the time and memory of a training step go, and what to change; writes profile.json into --out.

    All options of prunus train describe the training. It is measured in the middle of its ramp and not saved.
    With --compare compile, eager and torch.compile are measured in two fresh processes, equal in all else, and
    the result is compile.json.
    """

    steps_before: int = 10  # steps before the measurement, which also give the moments something to hold
    steps_to_measure: int = 20  # steps that are measured; some of them are taken again under the profiler
    compare: Literal["none", "compile"] = "none"  # what is compared with the run as it is
    run: Annotated[Run, tyro.conf.arg(name="")] = field(default_factory=lambda: Run(out=Path("runs/profile")))


def run(command: Command) -> None:
    from ..files.json_file import write_json
    from ..lab.profile.compile import compare_compile
    from ..lab.profile.measure import Window, measure

    if command.run.resume:
        raise ValueError("a profile measures a run of its own and resumes none; leave --resume off")
    for name in UNREAD:
        if getattr(command.run, name) != getattr(Run, name):
            raise ValueError(f"a profile logs, evaluates and saves nothing; leave --{name.replace('_', '-')} off")
    path = command.run.out / ("profile.json" if command.compare == "none" else "compile.json")
    if path.exists():
        raise ValueError(f"{path} is there already; choose another --out")
    window, console = Window(command.steps_before, command.steps_to_measure), wide_console()
    with console.status("start") as status:
        if command.compare == "compile":
            profile, values = None, compare_compile(command.run, window, status.update)
        else:
            profile = measure(command.run, window, status.update)
            values = profile.to_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, values)
    if profile is None:
        print(*values["says"])
    else:
        _print(profile, console)
    print(f"{path}: written")


def _print(profile: "Profile", console: "Console") -> None:
    from ..lab.profile.advice import advice, memory_rows, summary, time_rows

    sides = ["host", "device"] if profile.step.device else ["host"]
    _table(console, f"one step, on {profile.device}", ["part", *sides, "meaning"], time_rows(profile.step))
    if profile.event:
        _table(console, "one event", ["part", *sides, "meaning"], time_rows(profile.event))
    moments = ["between steps", f"at the peak, in {profile.memory.part}"] + ["in an event"] * bool(profile.memory.event)
    _table(console, "memory", ["what", *moments, "meaning"], memory_rows(profile))
    for line in summary(profile) + advice(profile):
        print(line)


def _table(console: "Console", title: str, headings: list[str], rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("part", "what", "meaning") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
