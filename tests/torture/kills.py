"""Commands that are killed, at a random moment or inside a file operation, and begun again until they end.

Every command runs in a fork of a process that has loaded everything. What it leaves in the end is compared, bit for
bit, with what the same command leaves that was never killed.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from every_encoding import grids, tensors
from readers import flat
from small_gpt import fewer_weights

import prunus
from prunus.cli import main
from prunus.files.json_file import read_json
from prunus.lab.checkpoint import checkpoint_of, load_checkpoint

TRAIN = (
    "--model gpt2-tiny --context 16 --batch 4 --steps 20 --every 3 --begin 4 --end 16 --eval-every 10 --eval-size 4 "
    "--save-every 3 --log-every 1 --warmup 3"
).split()
STUDY = (
    'model = "gpt2-tiny"\ndata = "{data}"\ncontext = 8\nbatch = 2\nsteps = 4\nbegin = 2\nend = 4\nevery = 2\n'
    "eval_every = 4\neval_size = 2\nwarmup = 2\nlog_every = 3\n"
)
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")  # of what audit hooks are told
MEASURED = {"seconds", "wall_seconds", "cold", "at_once", "peak_mib", "cost"}  # time and memory, which a kill changes
SAID = Path(tempfile.gettempdir(), f"prunus-torture-{os.getpid()}.txt")  # what the last command printed about errors
MOST_KILLS = 10  # of one trial, before the command is let live


@dataclass(frozen=True)
class Victim:
    """``args(out)`` begins, or begins again, what leaves ``found(out)``; with ``ranks`` several processes do so."""

    args: Callable[[Path], list[str]]
    found: Callable[[Path], Any]
    ranks: int = 1


def victims(home: Path) -> dict[str, Victim]:
    text = home / "text.txt"
    text.write_bytes(bytes(torch.randint(32, 127, (8000,), generator=torch.Generator().manual_seed(0)).tolist()))
    base = home / "base.toml"
    base.write_text(STUDY.format(data=text))
    source = home / "source"
    _call(["train", *TRAIN, "--data", str(text), "--out", str(source)])

    coded = home / "coded.safetensors"
    prunus.save_sparse(tensors(), coded, grids=grids())

    def train(out: Path) -> list[str]:
        if (out / "run.json").is_file():
            return ["train", "--resume", "--out", str(out)]
        return ["train", *TRAIN, "--data", str(text), "--out", str(out)]

    study = ["--base", str(base), "--scores", "bitter7", "--sparsity", "0.5", "--seeds", "1", "--devices", "cpu"]
    pruned = ["prune", str(source), "--score", "magnitude", "--samples", "4"]
    return {
        "train": Victim(train, trained),
        "study": Victim(lambda out: ["study", *study, "--out", str(out)], studied),
        "prune": Victim(lambda out: [*pruned, "--out", str(out)], tensors_of),
        "export": Victim(lambda out: ["export", str(source), "--out", str(out), "--check"], tensors_of),
        "export of codes": Victim(lambda out: ["export", str(coded), "--out", str(out), "--check"], tensors_of),
        "ranks": Victim(
            lambda out: [*train(out), *([] if (out / "run.json").is_file() else ["--parallel", "ddp"])], trained, 2
        ),
    }


def trained(out: Path) -> Any:
    state = load_checkpoint(checkpoint_of(out))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("event", {}).pop("seconds", None)
        line.get("event", {}).pop("bytes_exchanged", None)
    result = read_json(out / "result.json") | {"seconds": 0, "peak_memory": 0}
    return _bytes_of(flat(state)), state["step"], lines, result


def studied(out: Path) -> Any:
    rows = read_json(out / "study_result.json")["rows"]
    losses = {path.parent.name: read_json(path)["loss"] for path in sorted(out.glob("runs/*/result.json"))}
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows], losses


def tensors_of(out: Path) -> Any:
    if checkpoint_of(out).is_file():
        return _bytes_of(flat(load_checkpoint(checkpoint_of(out))["model"]))
    return _bytes_of(prunus.load_sparse(out))


def _bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def _call(
    args: Sequence[str], environment: dict[str, str] | None = None, before: Callable[[], None] | None = None
) -> int:
    """The fork that runs a command."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child if before or environment else _wait(child)
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(SAID, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), 2)
        os.environ.update(environment or {})
        if before:
            before()
        with fewer_weights():
            main(list(args))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_at(number: int) -> Callable[[], None]:
    """Makes the process kill itself just before its ``number``-th change of a file or folder."""

    def install() -> None:
        left = [number]

        def count(*_: object) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(event: str, args: tuple) -> None:
            if event in CHANGES and (event != "open" or _writes(args)):
                count()

        fsync = os.fsync
        os.fsync = lambda fd: (count(), fsync(fd))[1]
        sys.addaudithook(audit)

    return install


def _writes(args: tuple) -> bool:
    return isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _run(victim: Victim, out: Path, kill: tuple[str, float] | None) -> list[int]:
    """Exit codes of the command's processes, of which one is killed: after so many seconds, or at such a change."""
    world = victim.ranks
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    chosen, children = (random.randrange(world) if kill else -1), []
    args = victim.args(out)
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        install = _kill_at(int(kill[1])) if kill and kill[0] == "change" and rank == chosen else lambda: None
        children.append(_call(args, place if world > 1 else {}, install))
    if kill and kill[0] == "moment":
        time.sleep(kill[1])
        os.kill(children[chosen], signal.SIGKILL)
    codes = []
    for child in [children[chosen], *(c for i, c in enumerate(children) if i != chosen % world)] if kill else children:
        if codes and codes[0]:
            os.kill(child, signal.SIGKILL)  # as torchrun does with the others
        codes.append(_wait(child))
    return codes


def torture(
    name: str, victim: Victim, home: Path, seconds: float, rng: random.Random, goal: int = 10**9
) -> dict[str, Any]:
    """Kills until there are enough or the time is up: how many, and what differed in the end."""
    whole, began = home / f"{name}-whole", time.monotonic()
    codes = _run(victim, whole, None)
    assert not any(codes), f"{name} fails by itself: {codes}"
    duration, wanted = time.monotonic() - began, victim.found(whole)
    counts: dict[str, Any] = {"kills": 0, "inside file operations": 0, "trials": 0, "differences": 0, "errors": []}
    number, most = 0, 40
    while time.monotonic() - began < seconds and counts["kills"] < goal:
        out = home / f"{name}-{number}"
        number += 1
        random.seed(rng.random())
        for _ in range(rng.randint(1, MOST_KILLS)):
            kill = ("change", rng.randrange(1, most)) if rng.random() < 0.7 else ("moment", rng.uniform(0, duration))
            killed = -signal.SIGKILL in _run(victim, out, kill)
            counts["kills"] += killed
            counts["inside file operations"] += killed and kill[0] == "change"
            if not killed:  # it ended before that many changes
                most = max(4, int(kill[1])) if kill[0] == "change" else most
                break
        # export refuses a folder that is there, and so does prune, unless something is left to tidy up
        is_done = name.startswith(("prune", "export")) and out.is_dir() and not _unfinished(out).is_dir()
        codes = [0] if is_done else _run(victim, out, None)
        counts["trials"] += 1
        try:
            if any(codes):
                counts["errors"].append(f"trial {number}: {codes}: {SAID.read_text(errors='replace').strip()[-300:]}")
            elif victim.found(out) != wanted:
                counts["differences"] += 1
            elif name.startswith("prune") and (left := [path.name for path in home.glob(f".{out.name}.*")]):
                counts["errors"].append(f"trial {number}: left behind: {left}")
        except (ValueError, OSError, KeyError) as error:
            counts["errors"].append(f"trial {number}: {type(error).__name__}: {error}"[:300])
        for path in home.glob(f"*{out.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return counts


def at_every_change(victim: Victim, home: Path, first: int = 1, step: int = 1, further: int = 13) -> dict[str, Any]:
    """Kills before the ``first`` change of a file that the command makes, before the next after ``step``, to its last.

    What is begun again is killed too, ``further`` changes later each time, until it ends by itself.
    """
    assert _run(victim, home / "whole", None) == [0], SAID.read_text()
    wanted, counts = victim.found(home / "whole"), {"kills": 0, "trials": 0, "differences": [], "errors": []}
    for number in range(first, 10**6, step):
        out, at, num_before = home / f"out-{number}", number, counts["kills"]
        while (code := _run(victim, out, ("change", at))[0]) == -signal.SIGKILL:
            counts["kills"] += 1
            if out.is_dir() and not _unfinished(out).is_dir():  # killed after its work, and nothing is left to tidy up
                code = 0
                break
            at += further
        if code:
            counts["errors"].append(f"change {number}: {SAID.read_text().strip()[-300:]}")
        elif victim.found(out) != wanted:
            counts["differences"].append(number)
        if left := [path.name for path in home.glob(f".{out.name}.*")]:
            counts["errors"].append(f"change {number}: left behind: {left}")
        shutil.rmtree(out, ignore_errors=True)
        counts["trials"] += 1
        if counts["kills"] == num_before:  # it ended before that many changes
            break
    return counts


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.unfinished")
