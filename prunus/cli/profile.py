"""``prunus profile``"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..lab.run import Run
from .console import print, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from ..lab.profile.measure import StepProfile
    from ..lab.profile.trace import Split

Rows = list[tuple[str, ...]]
UNREAD = ("track", "eval_every", "eval_size", "save_every", "log_every")  # options of a run that leaves a folder


@dataclass(frozen=True)
class Command:
    """Say where the time and memory of a training step go, and what to change; writes profile.json into --out.

    All options of prunus train describe the training. It is measured in the middle of its ramp and not saved.
    With --compare compile, eager and torch.compile are measured in two fresh processes, equal in all else, and
    the result is compile.json.
    """

    steps_before: int = 10  # steps before the measurement, which also give the moments something to hold
    steps_to_measure: int = 20  # steps that are measured; some of them are taken again under the profiler
    compare: Literal["none", "compile"] = "none"  # compile: measure eager and torch.compile
    run: Annotated[Run, tyro.conf.arg(name="")] = field(default_factory=lambda: Run(out=Path("runs/profile")))


def run(command: Command) -> None:
    from ..files.json_file import write_json
    from ..lab.profile.measure import Window, compare_compile, measure

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


def _print(profile: "StepProfile", console: "Console") -> None:
    sides = ["host", "device"] if profile.step.device else ["host"]
    _table(console, f"one step, on {profile.device}", ["part", *sides, "meaning"], time_rows(profile.step))
    if profile.event:
        _table(console, "one event", ["part", *sides, "meaning"], time_rows(profile.event))
    moments = ["between steps", f"at the peak, in {profile.memory.part}"] + ["in an event"] * bool(profile.memory.event)
    _table(console, "memory", ["what", *moments, "meaning"], memory_rows(profile))
    for line in summary(profile) + advice(profile):
        print(line)


def _table(console: "Console", title: str, headings: list[str], rows: Rows) -> None:
    from rich.table import Table

    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("part", "what", "meaning") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def time_rows(split: "Split") -> Rows:
    """Part, milliseconds and share on the host, then on the device where there is one, and what it is."""
    from ..lab.profile.step_parts import PARTS

    names = [name for name in PARTS if name in split.host or name in (split.device or {})]
    columns = [split.host] + ([split.device] if split.device else [])

    def cell(seconds: float | None) -> str:
        if seconds is None:
            return ""
        return f"{1e3 * seconds:.2f} ms ({seconds / split.seconds:.1%})" if split.seconds else "0"

    rows = [(name, *(cell(column.get(name)) for column in columns), PARTS[name]) for name in names]
    return [*rows, ("in all", *[f"{1e3 * split.seconds:.2f} ms"] * len(columns), "what was measured")]


def memory_rows(profile: "StepProfile") -> Rows:
    """Category, bytes between steps, at the peak and in an event, and what it is."""
    from ..lab.profile.memory_use import CATEGORIES

    memory = profile.memory
    columns = [memory.steady, memory.peak] + ([memory.event] if memory.event else [])
    names = [name for name in CATEGORIES if any(column.get(name) for column in columns)]
    rows = [(name, *(_size(column.get(name)) for column in columns), CATEGORIES[name]) for name in names]
    return [*rows, ("in all", *(_size(sum(column.values())) for column in columns), memory.how)]


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.2f} MiB"


def summary(profile: "StepProfile") -> list[str]:
    """The figures that need no table."""
    tokens = f", {profile.tokens_a_second:,.0f} tokens/s" if profile.tokens_a_second else ""
    step = "A step without an event" if profile.event_seconds else "A step"
    lines = [
        f"{step} takes {1e3 * profile.seconds:.2f} ms: {profile.examples_a_second:,.1f} examples/s{tokens}. Traced it "
        f"takes {1e3 * profile.step.seconds:.2f} ms, which is what the table splits.",
        "Start-up: {build:.1f} s to build, {first step:.1f} s for the first step.".format(**profile.startup),
    ]
    if profile.event_seconds:
        every = profile.run.event_period
        often = "at every step of the ramp" if every == 1 else f"once in {every} steps of the ramp"
        often = "once in the run" if profile.has_one_event else often
        event = f"An event takes {1e3 * profile.event_seconds:.2f} ms more"
        lines.append(f"{event}, {often}: {profile.event_share:.2%} of the time.")
    if profile.busy is not None:
        driver = "" if profile.utilisation is None else f"; the driver says {profile.utilisation:.0%}"
        lines.append(f"The GPU worked {profile.busy:.0%} of the traced time{driver}.")
    if profile.compiled:
        lines.append(f"torch.compile: {profile.compiled}.")
    return lines + [f"Note: {note}." for note in profile.notes]


def advice(profile: "StepProfile") -> list[str]:
    """What would make the training faster or smaller; one sentence at least."""
    run, step, lines = profile.run, profile.step, []
    on_gpu = profile.device.startswith("cuda")
    if on_gpu and step.share("idle") > 0.2:
        ways = "a larger --batch" if run.compile else "--compile, or a larger --batch,"
        lines.append(f"The GPU waits for the host {step.share('idle'):.0%} of the time: {ways} helps.")
    if step.host.get("data", 0.0) > 0.1 * step.seconds:
        lines.append("More than a tenth of the step goes into making batches: give the host less else to do.")
    if step.share("gradient masking") > 0.05 and run.optimizer == "adamw":
        lines.append("Masking gradients shows: --optimizer adamwprune masks inside its step.")
    if profile.event_share > 0.02 and not profile.has_one_event:
        share, twice = profile.event_share, 2 * run.event_period
        lines.append(f"Events take {share:.1%} of the time: with --every {twice} {profile.share_of_events(twice):.1%}.")
    if on_gpu and run.precision == "float32":
        lines.append("The passes run in float32: --precision bfloat16 makes them several times faster.")
    if not on_gpu:
        import torch

        threads = torch.get_num_threads()
        lines.append(f"The steps ran on {threads} CPU thread{'s' * (threads > 1)}: --device cuda where there is one.")
    if profile.compiled and profile.compiled.recompiles:
        lines.append(f"{profile.compiled.recompiles} recompiles: TORCH_LOGS=recompiles says what changed.")
    memory, batch = profile.memory, run.batch
    peak, size = sum(memory.peak.values()), memory.limits.get("device")
    if size and peak < 0.4 * size:
        lines.append(f"{(size - peak) / 2**30:.0f} GiB of the GPU stay free: --batch {2 * batch} fits.")
    if size and peak > 0.9 * size and batch > 1:
        lines.append(f"Memory is nearly full: --batch {batch // 2} --accumulate {2 * run.accumulate} needs less.")
    if memory.event and sum(memory.event.values()) > peak:
        lines.append("The peak is in the event, not in the step.")
    return lines or ["Nothing stands out: time and memory go where they should."]
