"""``prunus demo``"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..lab.report.numbers import duration
from ..lab.run import Run
from .console import Terminal, print, steps_bar

if TYPE_CHECKING:
    from ..lab.study.study_folder import Folder
    from ..lab.study.study_plan import StudyPlan
    from ..lab.trainer import Progress

SHOWN = "bitter7"  # the arm whose text stands beside that of the dense model
PROMPT = b"    def __init__(self, "
LENGTH = 220  # bytes of a sample
TEMPERATURE = 0.8
EVERY = 5.0  # seconds between lines outside a terminal


@dataclass(frozen=True)
class Command:
    """Train a small GPT on Python's own source, dense and pruned to a half by three scores: about 3 minutes.

    The runs of a seed differ in the score alone: same initial weights, same batches in the same order, same schedule
    of the learning rate, same held-out files. Interrupt it at any time: the same command continues.
    """

    steps: int = 600  # optimizer steps of each run
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    seeds: int = 3  # how often each score is trained, from different initial weights
    seed: int = 0  # the first seed
    out: Path = Path("runs/demo")  # folder of the runs and of report.html


def run(command: Command) -> None:
    if command.steps < 20 or command.seeds < 1:
        raise ValueError(f"the demo takes at least 20 steps and 1 seed, got {command.steps} and {command.seeds}")
    from ..lab.report.cells import read_source
    from ..lab.report.page import headline, write_report
    from ..lab.study.arms import score_arm
    from ..lab.study.results import update
    from ..lab.study.runner import Options, Worker
    from ..lab.study.study_folder import Folder
    from ..lab.study.study_plan import make_plan
    from ..lab.tracking import environment
    from .study import print_table

    began, folder = time.time(), Folder(command.out)
    base = Run(
        model="gpt2-tiny",
        width=64,
        layers=2,
        batch=4,
        lr=4e-3,
        steps=command.steps,
        every=max(1, command.steps // 50),
        eval_every=max(1, command.steps // 10),
        eval_size=128,
    )
    seeds = range(command.seed, command.seed + command.seeds)
    plan = folder.join(make_plan(base, [score_arm(SHOWN)], [command.sparsity], seeds), environment())
    whole = Whole(plan, folder)
    with whole.bar if whole.steps_of else nullcontext():
        Worker(folder, Options(session=str(began), keep_checkpoints=True), whole).work(plan.cells)
    values = update(folder)
    print_table(values)
    if values["failed"]:
        raise SystemExit(1)
    print(*_against_dense(values["rows"]), f"{headline(read_source(folder.path))}.")
    print("Perplexity is per byte, on files that were not trained on.", "")
    first = {cell.arm: folder.run(cell) for cell in plan.cells if cell.seed == command.seed}
    _print_samples({arm: first[arm] for arm in ("dense", SHOWN)})
    page = write_report(folder.path)
    print(
        _size(first[SHOWN]),
        f"All charts: open {page} in a browser. The demo took {duration(time.time() - began)}. What to do next:",
        *_how_to_call(),
        f"  prunus export {first[SHOWN]} --out {folder.path / 'small'}",
        "      writes the pruned model as a smaller file",
        "  prunus train --data YOUR.txt --out runs/mine",
        "      trains on your own text, and prunes on the way",
        "  prunus prune MODEL_FOLDER --text YOUR.txt --out pruned",
        "      prunes a Hugging Face model that is trained already",
    )


def _how_to_call() -> Iterator[str]:
    """How to put this command on the path, where it is not."""
    activate = Path(sys.executable).parent / "activate"
    if shutil.which("prunus") is None and activate.is_file():
        yield f"  . {activate}"
        yield "      puts prunus on your path"


def _size(run: Path) -> str:
    """What a pruned run is worth on disk."""
    from ..export.convert import ExportJob
    from ..lab.checkpoint import checkpoint_of
    from ..lab.trained_run import export_checkpoint

    with TemporaryDirectory() as place:
        done = export_checkpoint(checkpoint_of(run), ExportJob(Path(place) / "small"))
    smaller = 1 - done.bytes_after / done.bytes_before
    return f"In a file {SHOWN} takes {done.bytes_after:,} bytes, dense {done.bytes_before:,}: {smaller:.0%} less."


class Whole:
    """Progress over all runs of a study: one bar, or outside a terminal a line every few seconds."""

    def __init__(self, plan: "StudyPlan", folder: "Folder") -> None:
        from ..lab.study.runner import num_shared
        from ..lab.study.study_plan import key_of

        self.steps_of: dict[str, int] = {}  # that are to be taken, by run; runs of a seed share their dense start
        ended, begun = folder.ended(), set[int]()
        for cell in dict.fromkeys(plan.owners.values()):
            run = plan.run_of(cell)
            if key_of(run) not in ended:
                self.steps_of[cell.folder] = run.total_steps - num_shared(run) * (cell.seed in begun)
                begun.add(cell.seed)
        self.num_done, self.num_steps = 0, sum(self.steps_of.values())
        self.began = self.due = 0.0
        self.terminal = Terminal(stderr=True)
        self.bar = steps_bar(self.terminal)
        self.task = self.bar.add_task("", total=self.num_steps, known="")

    @contextmanager
    def running(self, title: str, run: Run) -> "Iterator[Progress]":
        name, first, loss = f"{'dense' if run.score == 'none' else run.score}, seed {run.seed}", 0, ""

        def report(step: int, values: dict[str, Any]) -> None:
            nonlocal first, loss
            now = time.monotonic()
            if not first:  # earlier steps were taken over from another run, or from a checkpoint
                first, self.began = step, self.began or now
                self.num_steps += run.total_steps - step + 1 - self.steps_of[title]
            self.num_done += 1
            loss = f"loss {values['loss']:.2f}" if "loss" in values else loss
            self.bar.update(self.task, completed=self.num_done, total=self.num_steps, description=name, known=loss)
            if not self.terminal.is_terminal and now >= self.due:
                self.due, seconds = now + EVERY, (now - self.began) / max(1, self.num_done - 1)
                left = f", about {seconds * (self.num_steps - self.num_done):.0f} s left" * (self.num_done > 1)
                share = self.num_done / self.num_steps
                print(f"{share:4.0%}  {name}: step {step} of {run.total_steps}{left}", file=sys.stderr, flush=True)

        yield report

    def done(self, line: str, values: Mapping[str, Any]) -> None:
        if self.terminal.is_terminal:
            said = f"{line} ({values['num_finished']} of {values['num_runs']} runs)"
            self.bar.console.print(said, highlight=False, soft_wrap=True)


def _against_dense(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the seeds allow to say of each pruned arm beside dense, a line each."""
    from ..lab.study.intervals import PERPLEXITY, Paired, verdict

    for row in rows:
        if row["cost"]:
            cost = Paired(**row["cost"])
            said = verdict(cost, replace(PERPLEXITY, decimals=row["decimals"]))
            share = cost.mean / (row["mean"] - cost.mean)  # of the perplexity of dense
            yield f"{row['arm']} at {row['sparsity']:.1%}, {share:+.1%} against dense: {said}"


def _print_samples(folders: Mapping[str, Path]) -> None:
    """What the model of each folder writes after the same prompt, drawn with the same random numbers."""
    import torch
    from rich.table import Table
    from rich.text import Text

    from ..lab.checkpoint import load_checkpoint
    from ..lab.data import TokenShape
    from ..lab.models import build

    table = Table(title=f"What they write after {PROMPT.decode().strip()!r}, drawn with the same random numbers")
    texts = []
    for arm, folder in folders.items():
        table.add_column(arm, ratio=1, overflow="fold")
        state = load_checkpoint(folder / "checkpoint.pt")
        run = Run.from_json(state["run"])
        model = build(run.model, TokenShape(256, run.context), run.width, run.layers).eval()
        model.load_state_dict(state["model"])
        drawn, tokens = torch.Generator().manual_seed(0), list(PROMPT)
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(torch.tensor([tokens[-run.context :]]))[0, -1]
            tokens.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=drawn)))
        texts.append(Text(bytes(tokens).decode("ascii", errors="replace").rstrip()))
    table.add_row(*texts)
    Terminal().print(table)
