"""Kills, writers at once, flipped bits, damaged files and hostile ones, for as long as one likes; no CI runs it.

``python tests/torture/torture.py --minutes 60 --out docs/evidence/reliability.json`` writes what was counted, and
``python tests/torture/torture.py --page docs/evidence/reliability.json docs/evidence/reliability.md`` the page of it.
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "fuzz")]

import kills  # noqa: E402
import payloads  # noqa: E402
import torch  # noqa: E402
from every_encoding import grids, tensors  # noqa: E402
from fuzzing import fuzz  # noqa: E402

import prunus  # noqa: E402
from prunus.grids import OnGrid  # noqa: E402

GOALS = {
    "train": 170,
    "study": 30,
    "prune": 170,
    "export": 90,
    "export of codes": 40,
    "ranks": 20,
}  # kills in half an hour
NUM_FLIPS, NUM_MUTATIONS = 4000, 20_000
SHARES = {"train": 0.16, "study": 0.08, "prune": 0.12, "export": 0.04, "export of codes": 0.02, "ranks": 0.1}
SHARES |= {"writers": 0.02, "flips": 0.05}
FLIPPED = ("checkpoint", "sharded checkpoint", "sparse file", "sparse shards")


def writers(home: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Two processes save to one path, one of them is killed now and then: what lies there is one of the two, whole."""
    path, counts = home / "shared.safetensors", dict.fromkeys(("saves", "kills", "errors", "unreadable", "mixed"), 0)
    values = {factor: {name: value * factor for name, value in tensors().items()} for factor in (1, 2)}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        children = []
        for factor, value in values.items():
            child = os.fork()
            if not child:
                _save_often(value, grids(factor), path)
            children.append(child)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.1))
            os.kill(children[0], signal.SIGKILL)
            counts["kills"] += 1
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        counts["errors"] += codes.count(1)
        counts["saves"] += 20
        try:
            found = prunus.load_sparse(path)
            whole = [all(torch.equal(found[name], one) for name, one in value.items()) for value in values.values()]
            counts["mixed"] += not any(whole)
        except (ValueError, OSError):
            counts["unreadable"] += 1
        prunus.save_sparse(values[1], home / "later.safetensors")
    counts["left behind"] = sum(1 for name in home.iterdir() if "part" in name.name)
    return counts


def _save_often(value: dict[str, torch.Tensor], on_grids: dict[str, OnGrid], path: Path) -> None:
    code = 1
    try:
        for _ in range(10):
            prunus.save_sparse(value, path, grids=on_grids)
        code = 0
    finally:
        os._exit(code)


def run(minutes: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, seconds, began = random.Random(seed), minutes * 60, time.monotonic()
    factor = max(1, minutes / 30)
    found: dict[str, Any] = {
        "seed": seed,
        "minutes": minutes,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    found["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "prunus": prunus.__version__}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        found["kills"] = {}
        for name, victim in kills.victims(home).items():
            goal = math.ceil(GOALS[name] * factor)
            found["kills"][name] = kills.torture(name, victim, home, SHARES[name] * seconds, rng, goal)
            print(name, found["kills"][name], flush=True)
        (home / "writers").mkdir()
        found["writers"] = writers(home / "writers", SHARES["writers"] * seconds, rng)
        print("writers", found["writers"], flush=True)
        (home / "payloads").mkdir()
        found["payloads"] = payloads.torture(home / "payloads")
        print("payloads", found["payloads"], flush=True)
    found["flips"] = fuzz(int(NUM_FLIPS * factor), seed, SHARES["flips"] * seconds, FLIPPED, only="flip")
    print("flips", found["flips"]["readers"], flush=True)
    left = max(0.3 * seconds, began + seconds - time.monotonic())
    found["mutations"] = fuzz(int(NUM_MUTATIONS * factor), seed, left)
    print("mutations", found["mutations"]["readers"], flush=True)
    return found


SYSTEMS = {  # what each promises, and what it leaves open
    "[safetensors](https://github.com/huggingface/safetensors)": (
        "nothing in a file is executed; the header is bounded, and offsets neither overlap nor leave gaps",
        "there are no checksums: a flipped bit in a tensor is read as it is",
    ),
    "[torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)": (
        "metadata is written last, flushed, and moved into its place",
        "metadata is unpickled; shards have no checksums",
    ),
    "[SQLite](https://www.sqlite.org/atomiccommit.html)": (
        "a commit is atomic through crashes and loss of power",
        "pages have checksums with an [extension](https://www.sqlite.org/cksumvfs.html) only",
    ),
}


PROMISES = """\
- Files and folders are written beside their place under a unique name, flushed to the disk, and moved in one step.
  Of several writers the last whole one wins.
- What a killed writer leaves behind is removed by later writers after an hour, never while its writer lives; where
  locks do not reach (another host, a file system without them), after a day without a change.
- Checkpoints carry a CRC-32 for each tensor or block, and one over the rest. Every command that opens a checkpoint
  verifies it; of a distributed one each rank verifies what it reads.
- Two checkpoints are kept. `train --resume` falls back from a damaged one to the one before, says so in a line, and
  gives the damaged one a name that begins with `damaged-`.
- `prunus prune` that was killed goes on with the next layers when the same command is given again, and leaves nothing
  but its result. What it had saved carries checksums; a damaged part is done again, with a line that says so.
- SIGTERM ends a training with exit code 143, Ctrl-C with 130, both with a checkpoint.
- A model's `config.json` runs nothing and fetches nothing.
- Damaged or hostile files are refused in one line, in bounded time and memory. The tables below say where
  this failed."""


def page(found: dict[str, Any]) -> str:
    """The counts as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    kinds = ("trials", "kills", "inside file operations", "differences", "errors")
    killed = {
        name: [len(counts[key]) if key == "errors" else counts[key] for key in kinds]
        for name, counts in found["kills"].items()
    }
    total = dict(zip(kinds, map(sum, zip(*killed.values(), strict=True)), strict=True))
    flips = {
        name: [sum(counts.values()), *(counts.get(key, 0) for key in ("refused", "harmless", "wrong tensors"))]
        for name, counts in found["flips"]["readers"].items()
    }
    damaged = {}
    for name, counts in found["mutations"]["readers"].items():
        good = [counts.get(outcome, 0) for outcome in ("refused", "refused in several lines", "harmless")]
        damaged[name] = [sum(counts.values()), *good, sum(counts.values()) - sum(good)]
    saves, hostile, failures = found["writers"], found["payloads"], found["mutations"]["failures"]
    parts = [
        "# Reliability",
        "What Prunus promises:",
        PROMISES,
        "## How it was counted",
        f"By `make torture MINUTES={found['minutes']:g}`, that is "
        f"`python tests/torture/torture.py --minutes {found['minutes']:g} --seed {found['seed']}` ({found['machine']}; "
        f"{versions}).",
        "## Kills",
        "Each trial is killed up to ten times, begun again, and compared with one never killed.",
        _table(("command", *kinds), killed | {"**all**": list(total.values())}),
        f"The goal is 500 kills without a difference; this run made {total['kills']:,}.",
        *_errors(
            "Errors", [f"`{name}`, {' '.join(e.split())}" for name in killed for e in found["kills"][name]["errors"]]
        ),
        "## Writers at once",
        f"Two processes at a time were to save to one path, {saves['saves']:,} times in all; "
        f"{saves['kills']} were killed on the way. {saves['errors']} ended with an error, "
        f"{saves['unreadable']} files were unreadable, {saves['mixed']} mixed, "
        f"{saves['left behind']} parts of killed writers were left, too young to be removed.",
        "## Flipped bits",
        _table(("file", "flips", "found", "harmless", "wrong tensors"), flips),
        "After a harmless flip every tensor was read with the same bits.",
        "## Damaged files",
        f"{found['mutations']['mutations']:,} mutations of valid files; the goal is 20,000 without a failure. "
        "Readers take turns, slow ones in every fifth round.",
        _table(("reader", "mutations", "refused", "in several lines", "harmless", "failures"), damaged),
        *_errors("Failures", ["{reader}, seed {seed}, {mutation}: {kind}, {error}".format(**f) for f in failures]),
        "## Hostile files",
        f"{hostile['opened']:,} files that run code when unpickled or loaded with trust"
        f" were opened by every reader that could: {len(hostile['ran'])} ran.",
        "## What others promise",
        "\n".join(
            ["| system | promises | leaves open |", "|---|---|---|"]
            + [f"| {name} | {promise} | {rest} |" for name, (promise, rest) in SYSTEMS.items()]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[int]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    return "\n".join(lines + [f"| {name} | " + " | ".join(f"{n:,}" for n in row) + " |" for name, row in rows.items()])


def _errors(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name}:", "\n".join(f"- {line}" for line in lines)] if lines else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/reliability.json"))
    parser.add_argument("--page", type=Path, nargs=2, metavar=("JSON", "PAGE"), help="write the page of a finished run")
    given = parser.parse_args()
    if given.page:
        given.page[1].write_text(page(json.loads(given.page[0].read_text())))
        return
    try:
        found = run(given.minutes, given.seed)
    finally:
        kills.SAID.unlink(missing_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
