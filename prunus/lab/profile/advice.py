"""What a profile says: rows for tables, and advice in sentences."""

import torch

from ..gpu import GIB
from .measure import Profile
from .memory_use import CATEGORIES
from .steps import PARTS
from .trace import Split

MIB = 2**20

Rows = list[tuple[str, ...]]


def time_rows(split: Split) -> Rows:
    """Part, milliseconds and share on the host, then on the device where there is one, and what it is."""
    names = [name for name in PARTS if name in split.host or name in (split.device or {})]
    columns = [split.host] + ([split.device] if split.device else [])

    def cell(seconds: float | None) -> str:
        if seconds is None:
            return ""
        return f"{1e3 * seconds:.2f} ms ({seconds / split.seconds:.1%})" if split.seconds else "0"

    rows = [(name, *(cell(column.get(name)) for column in columns), PARTS[name]) for name in names]
    return [*rows, ("in all", *[f"{1e3 * split.seconds:.2f} ms"] * len(columns), "what was measured")]


def memory_rows(profile: Profile) -> Rows:
    """Category, bytes between steps, at the peak and in an event, and what it is."""
    memory = profile.memory
    columns = [memory.steady, memory.peak] + ([memory.event] if memory.event else [])
    names = [name for name in CATEGORIES if any(column.get(name) for column in columns)]
    rows = [(name, *(_size(column.get(name)) for column in columns), CATEGORIES[name]) for name in names]
    return [*rows, ("in all", *(_size(sum(column.values())) for column in columns), memory.how)]


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:,.2f} MiB"


def summary(profile: Profile) -> list[str]:
    """The figures that need no table."""
    tokens = f", {profile.tokens_a_second:,.0f} tokens/s" if profile.tokens_a_second else ""
    step = "A step without an event" if profile.event_seconds else "A step"
    lines = [
        f"{step} takes {1e3 * profile.seconds:.2f} ms: {profile.examples_a_second:,.1f} examples/s{tokens}. Traced it "
        f"takes {1e3 * profile.step.seconds:.2f} ms, which is what the table splits.",
        "Start-up: {build:.1f} s to build, {first step:.1f} s for the first step.".format(**profile.startup),
    ]
    if profile.event_seconds:
        every = profile.run.every
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


def advice(profile: Profile) -> list[str]:
    """What would make the training faster or smaller; one sentence at least."""
    found = [*_of_time(profile), *_of_memory(profile)]
    return found or ["Nothing stands out: time and memory go where they should."]


def _of_time(profile: Profile) -> list[str]:
    run, step, found = profile.run, profile.step, []
    on_gpu = profile.device.startswith("cuda")
    if on_gpu and step.share("idle") > 0.2:
        ways = "a larger --batch" if run.compile else "--compile, or a larger --batch,"
        found.append(f"The GPU waits for the host {step.share('idle'):.0%} of the time: {ways} helps.")
    if step.host.get("data", 0.0) > 0.1 * step.seconds:
        found.append("More than a tenth of the step goes into making batches: give the host less else to do.")
    if step.share("gradient masking") > 0.05 and run.optimizer == "adamw":
        found.append("Masking gradients shows: --optimizer adamwprune masks inside its step.")
    if profile.event_share > 0.02 and not profile.has_one_event:
        share, twice = profile.event_share, 2 * run.every
        found.append(f"Events take {share:.1%} of the time: with --every {twice} {profile.share_of_events(twice):.1%}.")
    if on_gpu and run.precision == "float32":
        found.append("The passes run in float32: --precision bfloat16 makes them several times faster.")
    if not on_gpu:
        threads = torch.get_num_threads()
        found.append(f"The steps ran on {threads} CPU thread{'s' * (threads > 1)}: --device cuda where there is one.")
    if profile.compiled and profile.compiled.recompiles:
        found.append(f"{profile.compiled.recompiles} recompiles: TORCH_LOGS=recompiles says what changed.")
    return found


def _of_memory(profile: Profile) -> list[str]:
    memory, batch = profile.memory, profile.run.batch
    peak, size = sum(memory.peak.values()), memory.limits.get("device")
    found = []
    if size and peak < 0.4 * size:
        found.append(f"{(size - peak) / GIB:.0f} GiB of the GPU stay free: --batch {2 * batch} fits.")
    if size and peak > 0.9 * size and batch > 1:
        accumulate = 2 * profile.run.accumulate
        found.append(f"Memory is nearly full: --batch {batch // 2} --accumulate {accumulate} needs less.")
    if memory.event and sum(memory.event.values()) > peak:
        found.append("The peak is in the event, not in the step.")
    return found
