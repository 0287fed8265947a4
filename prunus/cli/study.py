"""``prunus study``"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from ..files.atomic import write_atomically
from ..lab.run import Run
from ..lab.study.arms import PRESETS, Arm, PresetName, parse_arm, parse_fields, read_base, score_arm
from ..lab.study.merge import merge
from ..lab.study.results import summary, update
from ..lab.study.study_folder import Folder
from ..lab.study.study_plan import StudyPlan, data_digests, key_of, make_plan, num_examples, only
from ..lab.study.tables import HEADINGS, cells_of, notes_of, page, title_of, verdict_lines
from .console import print, wide_console

READ = {"merge": ("out", "slim"), "show": ("out",), "page": ("out", "page")}  # options that each word reads
# columns that a narrow terminal does without, in this order
LEFT_OUT = ("time per run", "budget", "zeros", "overlap", "seeds")
MIN_ARM, WIDE_ARM = 9, 24  # letters of a name that stay in one line in a narrow and in a wide terminal
Texts = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True)
class Command:
    """Compare scores or other settings: train every arm, a change to one base run, at every sparsity with every seed.

    Repeat the command to continue what is not finished; more arms, sparsities or seeds extend the study.
    prunus study merge A B --out C joins studies from several machines, prunus study show A prints the table,
    prunus study page A writes it as Markdown to A/results.md (for several studies, to --page).
    """

    words: tyro.conf.Positional[tuple[str, ...]] = ()  # merge, show or page, then study folders
    base: Path | None = None  # TOML file: fields of the base run, and [[arm]] tables with a name and changed fields
    preset: PresetName | None = None  # named base run and arms; all but rates need --data
    scores: str = ""  # scores to compare, separated by commas; dense, random and magnitude are always included
    arm: Texts = ()  # another arm, as "name: field=value field=value"; may be repeated
    only: str = ""  # run only these arms, separated by commas, and the controls: dense, random, magnitude
    sparsity: str = ""  # fractions to remove, separated by commas; default: from the preset or the study, or 0.5
    seeds: str = ""  # number of seeds, or a list ("0,1"; "2," is seed 2 alone); default: 3 in a new study
    field: Annotated[Texts, tyro.conf.arg(name="set")] = ()  # a field of the base run, as field=value; may be repeated
    data: str | None = None  # data of the base run, as for prunus train
    validation: Path | None = None  # held-out file of the base run
    out: Path = Path("study")  # folder of the study
    devices: str = ""  # GPU numbers or cpu, separated by commas, one worker each; default: every GPU
    time_limit: float = 0.0  # limit in seconds; runs that would exceed it are not started; 0: no limit
    save_every: int = 0  # steps between checkpoints, from which interrupted runs resume; 0: none
    keep_checkpoints: bool = False  # keep the last checkpoint of every run
    slim: bool = False  # with merge: all runs in one file, runs.jsonl, without masks, with thinned curves
    page: Path | None = None  # with page: Markdown file to write; default for one study: its results.md
    dry_run: bool = False  # print the plan and the estimated time, train nothing


def run(command: Command) -> None:
    started = time.time()
    what, folders = (*command.words[:1], "")[0], [Path(word) for word in command.words[1:]]
    if what and what not in READ:
        raise ValueError(f"expected {', '.join(READ)} or options after prunus study, got {what!r}")
    _check_options(command, what)
    if what == "merge":
        print_table(merge(folders, command.out, slim=command.slim))
        print(f"{command.out} written")
    elif what == "show":
        for folder in map(Folder, folders or [command.out]):
            print_table(summary(folder, folder.plan()))
    elif what == "page":
        folders = folders or [command.out]
        if command.page is None and len(folders) > 1:
            raise ValueError(f"a page of {len(folders)} studies needs a name: --page FILE.md")
        path, text = command.page or folders[0] / "results.md", page(folders)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(text.encode()))
        print(f"{path} written")
    else:
        _run(command, started)


def _check_options(command: Command, what: str) -> None:
    """Refuse an option that this call would not read, and numbers that make no sense."""
    for option in fields(command):
        read = option.name in READ[what] if what else option.name not in ("slim", "page")
        if not read and option.name != "words" and getattr(command, option.name) != option.default:
            name = {"field": "set"}.get(option.name, option.name).replace("_", "-")
            raise ValueError(f"{f'study {what}' if what else 'a study'} does not read --{name}; leave it off")
    for name, value in (("time-limit", command.time_limit), ("save-every", command.save_every)):
        if not value >= 0:
            raise ValueError(f"--{name} must be at least 0, got {value}; 0 is none")


def _run(command: Command, started: float) -> None:
    folder, plan = Folder(command.out), planned(command)
    if command.dry_run:
        print_plan(folder, plan)
        return
    from ..lab.study.runner import Options
    from .study_work import devices_of, work

    devices = devices_of(command.devices)
    options = Options(
        device="cpu" if devices[0] == "cpu" else "auto",
        deadline=started + command.time_limit if command.time_limit else None,
        session=f"{started:.3f}-{os.getpid()}",
        save_every=command.save_every,
        keep_checkpoints=command.keep_checkpoints,
    )
    try:
        all_ended_well = work(folder, plan, options, devices, print_table)
    except KeyboardInterrupt:
        print_table(update(folder))
        raise
    values = update(folder)
    print_table(values)
    if command.time_limit:
        ended, failed = folder.ended(), folder.failures()
        left = [c for c in set(plan.owners.values()) if key_of(plan.run_of(c)) not in ended and c.folder not in failed]
        if left:
            print(f"runs left: {len(left)}, which would have exceeded --time-limit; the same command continues")
    if values["failed"] or not all_ended_well:
        raise SystemExit(1)


def planned(command: Command) -> StudyPlan:
    """What the options ask for, on the preset, the file, or what the folder holds already."""
    if command.base and command.preset:
        raise ValueError("--base and --preset both name a base run; give one of them")
    folder, known = Folder(command.out), None
    arms: Sequence[Arm]
    sparsities, seeds = (0.5,), (0, 1, 2)
    if command.preset:
        preset = PRESETS[command.preset]
        if command.data is None and preset.reads:
            raise ValueError(f"the preset {command.preset} needs --data: {preset.reads}")
        base, arms, sparsities = preset.base, preset.arms, preset.sparsities
    elif command.base:
        base, arms, own = read_base(command.base)
        sparsities = own or sparsities
    elif folder.exists:
        known = folder.plan()
        base, arms = known.base, known.arms
        sparsities, seeds = (tuple(known.to_json()[name]) for name in ("sparsities", "seeds"))
    elif command.scores or command.arm:
        base, arms = Run(), []  # as prunus train does by default
    else:
        raise ValueError("say what to run: --scores, --base run.toml or --preset NAME, or continue the study in --out")
    changes = parse_fields(command.field, "--set")
    changes |= {name: value for name in ("data", "validation") if (value := getattr(command, name)) is not None}
    base = replace(base, **changes)
    more = [score_arm(score) for score in _split(command.scores)] + [parse_arm(text) for text in command.arm]
    if known and not (more or command.sparsity or command.seeds or command.only):
        return StudyPlan(base, known.arms, known.cells, data_digests(base))
    sparsities = [_number(text, float) for text in _split(command.sparsity)] or sparsities
    plan = make_plan(base, [*arms, *more], sparsities, _seeds(command.seeds) or seeds)
    return only(plan, _split(command.only)) if command.only else plan


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, kind: type[float] | type[int]) -> float | int:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected a {'whole ' if kind is int else ''}number, got {text!r}") from None


def _seeds(text: str) -> tuple[int, ...]:
    """``3`` is seeds 0, 1 and 2; ``1,2`` are those."""
    numbers = tuple(int(_number(part, int)) for part in _split(text))
    if any(number < 0 for number in numbers) or (numbers == (0,) and "," not in text):
        raise ValueError(f"--seeds is a number of seeds, at least 1, or seeds separated by commas, got {text!r}")
    return tuple(range(numbers[0])) if numbers and "," not in text else numbers


def print_table(values: Mapping[str, Any]) -> None:
    """One line an arm and sparsity, as many columns as fit; then verdicts, and what failed or does not count."""
    console, rows = wide_console(), [cells_of(row) for row in values["rows"]]
    wide = {name: max(len(cells[name]) for cells in [{name: name}, *rows]) for name in HEADINGS}
    columns, arm = list(HEADINGS), min(wide["arm"], WIDE_ARM)
    for column in LEFT_OUT:
        if arm + sum(wide[name] + 3 for name in columns[1:]) + 4 > console.width:
            columns.remove(column)
    arm = max(MIN_ARM, min(arm, console.width - 4 - sum(wide[name] + 3 for name in columns[1:])))
    table = Table(title=title_of(values))
    table.add_column("arm", min_width=arm, overflow="fold")  # a long name takes several lines
    for heading in columns[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for cells in rows:
        if before not in (None, cells["sparsity"]):
            table.add_section()
        before = cells["sparsity"]
        table.add_row(*(cells[heading] for heading in columns))
    console.print(table)
    for line in [*verdict_lines(values), *notes_of(values, columns)]:
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def print_plan(folder: Folder, plan: StudyPlan) -> None:
    """Every computation of the plan, with its tokens, whether it is done, and what is left in all."""
    from ..lab.study.runner import estimate

    done, damaged = folder.finished() if folder.exists else ({}, {})
    table = Table(title=f"{folder.path}: hash {plan.hash}")
    for heading in ("run", "arms", "steps", "examples", "state"):
        table.add_column(heading, justify="right" if heading in ("steps", "examples") else "left", overflow="fold")
    left, seconds, unknown = 0, 0.0, False
    for owner in dict.fromkeys(plan.owners.values()):
        run = plan.run_of(owner)
        sharing = [cell.arm for cell, first in plan.owners.items() if first == owner]
        state = "done" if key_of(run) in done else "damaged" if key_of(run) in damaged else "to do"
        table.add_row(owner.folder, ", ".join(sharing), f"{run.total_steps:,}", f"{num_examples(run):,}", state)
        if state == "to do":
            left += num_examples(run)
            expected = estimate(folder, run, cold=False) if folder.exists else None
            seconds, unknown = seconds + (expected or 0.0), unknown or expected is None
    wide_console().print(table)
    tokens = f" = {left * plan.base.context:,} tokens" if plan.base.model.startswith("gpt2") else ""
    known = f"at most {seconds:,.0f} s"
    seconds_left = "the time is unknown until a run has finished on this machine" if unknown else known
    print(f"left to do: {left:,} examples{tokens}; {seconds_left}")
