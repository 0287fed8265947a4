"""The command, run on a tiny GPT, and what the folder of a study holds afterwards."""

import contextlib
from pathlib import Path

from prunus.cli import main
from prunus.lab.files import read_json

BASE = """model = "gpt2-tiny"
data = "{data}"
context = 8
batch = 2
steps = 4
begin = 2
end = 4
every = 2
eval_every = 4
eval_size = 2
warmup = 2
log_every = 3
"""
ASKED = ("--scores", "bitter7,bitter1", "--sparsity", "0.5", "--seeds", "2")


def study(base: Path, out: Path, *options: object) -> int:
    """Exit code of the command."""
    try:
        main(["study", "--base", str(base), "--out", str(out), "--devices", "cpu", *map(str, options)])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def stamps(out: Path) -> dict[str, int]:
    """When the result of each run was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}


def rows(out: Path) -> dict[str, dict]:
    """Rows of the result by arm."""
    return {row["arm"]: row for row in read_json(out / "study_result.json")["rows"]}


def losses(out: Path) -> dict[str, float]:
    """What each run ended with."""
    return {path.parent.name: read_json(path)["loss"] for path in out.glob("runs/*/result.json")}


class Quiet:
    """Takes notes."""

    def __init__(self, lines: list) -> None:
        self.lines = lines

    def running(self, title, run):
        return contextlib.nullcontext(lambda step, values: None)

    def done(self, line, values):
        self.lines.append(line)
