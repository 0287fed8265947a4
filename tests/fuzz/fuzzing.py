"""Damaged files for every reader: refused with a ValueError or an OSError, soon and in little memory, or harmless.

``python fuzzing.py COUNT [--seed N] [--seconds N] [--reader NAME] [--out FILE]`` prints how many mutations of each
reader's files were refused or harmless, and every failure with the seed that brings it back. Readers run in forked
children whose memory and time are limited, so that a crash is a failure among others.
"""

import argparse
import gc
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from mutations import NO_FILES, mutate  # noqa: E402
from readers import ANY, READERS, SLOW, Reader  # noqa: E402

from prunus.ops.bits import words_of  # noqa: E402

MEMORY = 512 << 20  # bytes that a read may take beyond what the process has
CPU_SECONDS = 10.0
WALL_SECONDS = 120.0
FAILURES = ("traceback", "wrong tensors", "too slow", "too much memory", "crash")


class TooSlow(BaseException):
    """Raised inside a read whose time is up."""


def fuzz(
    count: int,
    seed: int = 0,
    seconds: float = 1e9,
    names: Sequence[str] | None = None,
    only: str | None = None,
) -> dict[str, Any]:
    """Outcomes of ``count`` mutations by reader, and the failures; of ``only`` one kind of mutation, if it is named.

    Readers take turns, slow ones in every fifth round.
    """
    chosen = [name for name in names or READERS if not READERS[name].needs or find_spec(READERS[name].needs)]
    counts: dict[str, Counter] = {name: Counter() for name in chosen}
    failures = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        for name in chosen:
            folder = Path(home, name.replace(" ", "_"), "sample")
            folder.mkdir(parents=True)
            READERS[name].make(folder)
        turns = ((name, seed + i) for i in itertools.count() for name in chosen if i % 5 == 0 or name not in SLOW)
        cases = list(itertools.islice(turns, count))
        while cases and time.monotonic() - began < seconds:
            done = list(_by_child(Path(home), cases[:2000], began + seconds, only))
            for (name, number), outcome, mutation, said in done:
                counts[name][outcome] += 1
                if outcome in FAILURES:
                    failure = {"reader": name, "seed": number, "mutation": mutation, "kind": outcome, "error": said}
                    failures.append(failure)
            cases = cases[len(done) :] if done else []
    num_mutations = sum(map(Counter.total, counts.values()))
    return {"seed": seed, "mutations": num_mutations, "readers": counts, "failures": failures}


def _by_child(
    home: Path, cases: Sequence[tuple[str, int]], end: float, only: str | None
) -> Iterator[tuple[tuple, str, str, str]]:
    """Outcomes of the first cases, until the child has ended or has to be killed."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _run_all(home, cases, writing, end, only)
        finally:
            os._exit(0)
    os.close(writing)
    current, mutation = cases[0], ""
    with os.fdopen(reading) as lines:
        while True:
            line = lines.readline() if select.select([lines], [], [], WALL_SECONDS)[0] else "late"
            if line == "late":
                os.kill(child, signal.SIGKILL)
            if line in ("", "late"):
                break
            event = json.loads(line)
            assert event[0] != "unread", f"{event[1]}: its sample is refused: {event[2]}"
            if event[0] == "begin":
                current, mutation = tuple(event[1]), event[2]
            else:
                yield current, *event[1:]
                current = None
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code and current:
        yield current, "too slow" if line == "late" else "crash", mutation, f"the process ended with {code}"


def _run_all(home: Path, cases: Sequence[tuple[str, int]], out: int, end: float, only: str | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)

    def tell(*event: object) -> None:
        os.write(out, (json.dumps(event) + "\n").encode())

    originals: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in cases):  # read whole before memory is short, imports and all
        sample = home / name.replace(" ", "_") / "sample"
        with copied(sample) as folder:
            try:
                value = READERS[name].read(folder)
            except BaseException as error:
                tell("unread", name, f"{type(error).__name__}: {error} ({_where(error)})")
                return
        originals[name] = value if READERS[name].exact else None
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))

    def late(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, late)
    for name, seed in cases:
        if time.monotonic() > end:
            return
        rng = random.Random(f"{name} {seed}")
        with copied(home / name.replace(" ", "_") / "sample") as folder:
            reader = READERS[name]
            paths = {path for pattern in reader.damaged.split() for path in folder.glob(pattern)}
            files = sorted(path for path in paths if path.is_file() and path.stat().st_size)
            mutation = mutate(rng.choice(files), rng, only)
            tell("begin", (name, seed), mutation)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            outcome, said = _outcome(reader, folder, mutation, originals[name])
            signal.setitimer(signal.ITIMER_PROF, 0)
        tell("end", outcome, mutation, said)


@contextmanager
def copied(sample: Path) -> Iterator[Path]:
    """The sample, in a folder of the same name each time, so that paths inside it stay right."""
    folder = sample.with_name("damaged")
    shutil.copytree(sample, folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(reader: Reader, folder: Path, mutation: str, original: Any) -> tuple[str, str]:
    try:
        found = reader.read(folder)
    except (ValueError, OSError) as error:
        said = str(error)
        return ("refused", "") if "\n" not in said.strip() else ("refused in several lines", said[:200])
    except TooSlow:
        return "too slow", f"more than {CPU_SECONDS} s of CPU"
    except MemoryError:
        return "too much memory", f"more than {MEMORY >> 20} MiB"
    except BaseException as error:
        if "memory" in str(error).lower():
            return "too much memory", f"{type(error).__name__}: {str(error)[:200]}"
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} ({_where(error)})"
    kinds = set(mutation.split("+"))
    may_differ = {"forged", *(kind.__name__ for kind in NO_FILES)}  # work whose file is gone is done again
    must_be_same = not may_differ & kinds if reader.exact is ANY else reader.exact and kinds <= reader.exact
    if must_be_same and not _same(found, original):
        return "wrong tensors", ""
    return "harmless", ""


def _where(error: BaseException) -> str:
    """The last line of the project that an error passed."""
    found, at = "", error.__traceback__
    while at:
        if "/prunus/" in at.tb_frame.f_code.co_filename:
            found = f"{at.tb_frame.f_code.co_filename.rpartition('/prunus/')[2]}:{at.tb_lineno}"
        at = at.tb_next
    return found


def _same(found: Any, original: Any) -> bool:
    if found.keys() != original.keys():
        return False
    pairs = [(found[name], tensor) for name, tensor in original.items()]
    return all((a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(words_of(a), words_of(b)) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--reader", action="append")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = json.dumps(fuzz(given.count, given.seed, given.seconds, given.reader), indent=1)
    print(found)
    if given.out:
        given.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
