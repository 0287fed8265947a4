"""``prunus profile``"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..lab.run import Run
from .console import print, table_of, wide_console
from .shared_options import given

if TYPE_CHECKING:
    from ..lab.profile.measure import StepProfile

Profiles = dict[str, "StepProfile"]


@dataclass(frozen=True)
class Command:
    """Measure where time and memory go in a training step, with and without pruning; writes profile.json to --out.

    The options of prunus train describe the run, which is measured in the middle of its sparsity ramp and not saved.
    With --compare compile, eager and torch.compile are measured in two fresh processes with otherwise equal settings,
    and the result is compile.json.
    """

    steps_before: int = 10  # steps before the measurement, which also fill the optimizer's moments
    steps_to_measure: int = 20  # steps to measure
    compare: Literal["none", "compile"] = "none"  # compile: compare eager with torch.compile
    run: Annotated[Run, tyro.conf.arg(name="")] = field(default_factory=lambda: Run(out=Path("runs/profile")))


def run(command: Command) -> None:
    from ..files.json_file import write_json
    from ..lab.profile.compile_arms import compare_compile
    from ..lab.profile.measure import Window, measure
    from ..lab.study.study_plan import dense_of

    if command.run.resume:
        raise ValueError("a profile starts a run of its own and resumes none; leave off --resume")
    for flag in given(command.run, "track", "eval_every", "eval_size", "save_every", "log_every"):
        raise ValueError(f"a profile logs, evaluates and saves nothing; leave off {flag}")
    path = command.run.out / ("profile.json" if command.compare == "none" else "compile.json")
    if path.exists():
        raise ValueError(f"{path} is there already; choose another --out")
    window, profiles = Window(command.steps_before, command.steps_to_measure), {}
    with wide_console().status("start") as status:
        if command.compare == "compile":
            values = compare_compile(command.run, window, status.update)
        else:
            runs = {"without pruning": dense_of(command.run), "with pruning": command.run}
            chosen = runs if command.run.score != "none" else {"without pruning": command.run}
            profiles = {name: measure(one, window, status.update) for name, one in chosen.items()}
            values = {name.replace(" ", "_"): profile.to_json() for name, profile in profiles.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, values)
    if profiles:
        _print(profiles)
    else:
        print(*values["says"])
    print(f"{path}: written")


def _print(profiles: "Profiles") -> None:
    last = list(profiles.values())[-1]
    figures = [heading for name in profiles for heading in (f"{name}: time", "memory")]
    headings = ("part", *figures, "meaning")
    title = f"a training step, on {last.device}"
    wide_console().print(table_of(title, headings, rows_of(profiles), texts=("meaning",)))
    print(*summary(last))


def rows_of(profiles: "Profiles") -> list[list[str]]:
    from ..lab.profile.parts import PARTS

    rows = []
    for part, meaning in PARTS.items():
        cells = []
        for profile in profiles.values():
            seconds = profile.event_seconds if part == "event" else profile.parts.get(part)
            share = f" ({seconds / sum(profile.parts.values()):.1%})" if seconds and part != "event" else ""
            cells += [
                "" if seconds is None else f"{1e3 * seconds:.2f} ms{share}",
                _size(profile.memory.parts.get(part)),
            ]
        rows += [[part, *cells, meaning]] if any(cells) else []
    cells = []
    for profile in profiles.values():
        cells += [f"{1e3 * sum(profile.parts.values()):.2f} ms", _size(sum(profile.memory.peak.values()))]
    return [*rows, ["a step", *cells, "without an event"]]


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.2f} MiB"


def summary(profile: "StepProfile") -> list[str]:
    from ..lab.profile.compile_arms import compile_words

    tokens = f", {profile.tokens_a_second:,.0f} tokens/s" if profile.tokens_a_second else ""
    step = "A step without an event" if profile.event_seconds else "A step"
    lines = [
        f"{step} takes {1e3 * profile.seconds:.2f} ms: {profile.examples_a_second:,.1f} examples/s{tokens}.",
        "Start-up: {build:.1f} s to build, {first step:.1f} s for the first step.".format(**profile.startup),
    ]
    kept = ", ".join(f"{name} {_size(size)}" for name, size in profile.memory.steady.items())
    whose = "the GPU's memory" if profile.device.startswith("cuda") else "the process"
    lines.append(f"Between steps {whose} holds {kept}.")
    if profile.event_seconds:
        every = profile.run.event_period
        often = "at every step of the ramp" if every == 1 else f"once in {every} steps of the ramp"
        often = "once in the run" if profile.has_one_event else often
        event = f"A pruning event takes {1e3 * profile.event_seconds:.2f} ms more"
        lines.append(f"{event}, {often}: {profile.event_share:.2%} of the time.")
    if profile.busy is not None:
        lines.append(f"The GPU was busy {profile.busy:.0%} of the time.")
    if profile.compiled:
        lines.append(f"torch.compile: {compile_words(profile.compiled)}.")
    return lines + [f"Note: {note}." for note in profile.notes]
