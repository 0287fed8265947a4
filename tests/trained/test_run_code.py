"""A program that misbehaves is ended and has failed; nothing of it is left, and nothing outside its folder changes."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prunus.trained import run_code
from prunus.trained.problems import read_problems
from prunus.trained.run_code import Limits, Program, check_confinement, run_programs

DATA = Path(os.environ.get("PRUNUS_DATA", "nowhere")) / "text" / "HumanEval.jsonl.gz"
LIMITS = Limits(cpu_seconds=1, wall_seconds=6)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="programs die with their caller on Linux")
RIGHT = "def f():\n    return 1"
TEST = "def check(candidate):\n    assert candidate() == 1"
REFUSED = "PermissionError: [Errno 1] Operation not permitted"
LEFT = "it left with exit code {} before its tests had passed"
AGAIN = "while True:\n    pass"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # read again
    yield
    monkeypatch.setattr("tempfile.tempdir", None)
    assert not processes_in(tmp_path)
    assert not list(tmp_path.glob("prunus-program-*"))


@pytest.fixture
def confined():
    """Skips what would harm a system that does not confine it."""
    if said := check_confinement():
        pytest.skip(said)


def processes_in(folder):
    """Processes that work in a folder, which programs and their harnesses do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [path.parent.name] if str(path.readlink()).startswith(str(folder)) else []
        except OSError:
            continue
    return found


def why(program, limits=LIMITS):
    return next(run_programs([[program, TEST, "check(f)"]], limits))


def test_a_right_program_passes_and_a_wrong_one_says_why():
    assert why(RIGHT) == ""
    assert why(RIGHT.replace("1", "2")) == "AssertionError"
    assert why("def f(:").startswith("SyntaxError: invalid syntax")
    assert why("raise ValueError('a' * 10_000_000)") == "ValueError: " + "a" * 288


ENDED = {
    "forks": ("import os\nos.fork()", REFUSED),
    "starts a command": ("import subprocess\nsubprocess.run(['true'])", REFUSED),
    "forks without end": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "it used more than 1 s of processor time",
    ),
    "signals others": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", REFUSED),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", REFUSED),
    "fills the disk": (
        "for i in range(999):\n    open(str(i), 'wb').write(bytes(1 << 20))",
        "OSError: [Errno 28] No space left on device",
    ),
    "writes a long file": ("open('a', 'wb').write(bytes(1 << 26))", "OSError: [Errno 27] File too large"),
    "opens many files": ("files = [open('a', 'w') for i in range(99)]", "OSError: [Errno 24] Too many open files: 'a'"),
    "sleeps": ("import time\ntime.sleep(1000)", "it ran for more than 6 s"),
    "waits for input": ("input()", "EOFError: EOF when reading a line"),
    "eats memory": ("x = []\nwhile True:\n    x.append(bytes(1 << 24))", "MemoryError"),
    "prints without end": ("while True:\n    print('x' * 1000)", "it used more than 1 s of processor time"),
    "ignores SIGTERM": (
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{AGAIN}",
        "it used more than 1 s of processor time",
    ),
    "closes its streams and sleeps": (
        "import os, time\nfor i in range(3):\n    os.close(i)\ntime.sleep(1000)",
        "it ran for more than 6 s",
    ),
    "closes all files": ("import os\nos.closerange(0, 99)", LEFT.format(1)),
    "closes all files and goes on": (f"import os\nos.closerange(0, 99)\n{AGAIN}", "it was ended by SIGKILL"),
    "leaves early": ("import os\nos._exit(0)", LEFT.format(0)),
    "exits": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "exits in a test": ("def f():\n    raise SystemExit", "SystemExit"),
    "exits late": ("import os\ndef f():\n    os._exit(0)", LEFT.format(0)),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "recurses": ("def f():\n    return f()", "RecursionError: maximum recursion depth exceeded"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "it was ended by SIGSEGV"),
    "replaces what the harness calls": (
        "import builtins, os\nbuiltins.exec = builtins.compile = os._exit = os.write = lambda *args: None\n"
        "def f():\n    return 2",
        "AssertionError",
    ),
    "replaces exceptions": ("import builtins\nbuiltins.BaseException = 1\n1 / 0", LEFT.format(1)),
    "raises what cannot be shown": (
        "class E(Exception):\n    def __str__(self):\n        raise E\nraise E",
        "E",
    ),
    "says much to the harness": (
        "import os\nfor i in range(99):\n    try:\n        os.write(i, bytes(9**9))\n    except OSError:\n        0",
        "\0" * 300,
    ),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_misbehaves_is_ended_and_has_failed(name, confined):
    program, reason = ENDED[name]
    assert why(program if "def f" in program else f"{program}\n{RIGHT}") == reason


def test_no_file_outside_its_folder_can_be_written_and_its_folder_is_empty(tmp_path, confined):
    (tmp_path / "mine").write_text("kept")
    outside = tmp_path / "mine"
    tries = [f"open({str(outside)!r}, 'w')", f"__import__('os').remove({str(outside)!r})"]
    tries += [f"__import__('shutil').rmtree({str(tmp_path)!r})", "open('/tmp/prunus-new', 'w')"]
    for line in tries:
        assert "Read-only file system" in why(f"{line}\n{RIGHT}")
    assert outside.read_text() == "kept"
    inside = "import os, pathlib, tempfile\nassert os.listdir() == []\npathlib.Path.home().joinpath('a').touch()"
    assert why(f"{inside}\ntempfile.mkstemp()\nassert len(os.listdir()) == 2\n{RIGHT}") == ""


def test_the_environment_is_minimal_and_sets_have_one_order(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    order = "import os\nassert 'MY_TOKEN' not in os.environ and len(os.environ) < 12\n"
    order += "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len(set(run_programs([[order]] * 4, LIMITS))) == 1


def test_threads_work_and_end_with_the_program():
    threads = "import threading, time\nthread = threading.Thread(target=time.sleep, args=(0.01,))\nthread.start()\n"
    threads += "thread.join()\nthreading.Thread(target=time.sleep, args=(1000,)).start()"
    began = time.monotonic()
    assert why(f"{threads}\n{RIGHT}") == "" and time.monotonic() - began < 3


def test_verdicts_are_in_order_and_a_caller_that_stops_leaves_nothing(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    programs = [[f"import time\ntime.sleep({0.3 * (i % 2)})\nassert {i} % 3"] for i in range(7)]
    assert [not reason for reason in run_programs(programs, LIMITS)] == [i % 3 != 0 for i in range(7)]
    verdicts = run_programs([["pass"], ["import time\ntime.sleep(1000)"], [AGAIN]], LIMITS)
    assert next(verdicts) == ""
    began = time.monotonic()
    verdicts.close()
    assert time.monotonic() - began < 1


CALLER = """
from prunus.trained.run_code import run_programs
list(run_programs([["import time\\ntime.sleep(1000)"]] * 2))
"""


@LINUX
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_a_caller_that_is_ended_takes_its_programs_with_it(end, tmp_path):
    caller = subprocess.Popen([sys.executable, "-c", CALLER], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(processes_in(tmp_path)) >= 4)  # two harnesses, two programs
    caller.send_signal(end)
    caller.wait()
    wait_until(lambda: not processes_in(tmp_path))
    for folder in tmp_path.glob("prunus-program-*"):  # a caller that is killed leaves them, empty
        folder.rmdir()


def wait_until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("libc.unshare(NEW_NAMESPACES) != 0", "programs can change files: run"),
        ("platform.machine() not in CALLS", "programs can start processes: run"),
    ],
)
def test_without_namespaces_or_filter_programs_are_ended_too_and_it_is_said(
    lost, said, tmp_path, monkeypatch, confined
):
    source = Path(run_code.__file__).read_text()
    assert lost in source
    (tmp_path / "harness.py").write_text(source.replace(lost, "True"))
    monkeypatch.setattr(run_code, "__file__", str(tmp_path / "harness.py"))
    assert said in check_confinement()
    assert why(RIGHT) == ""
    twice = "import os, time\nfor _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(1000)"
    for program, _ in (ENDED["sleeps"], ENDED["connects"], ENDED["leaves early"], (twice, "")):
        reason = why(f"{program}\n{RIGHT}")
        assert reason or program == twice
    assert not processes_in(tmp_path)


def test_where_no_program_can_run_it_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(ValueError, match="/bin/true cannot run programs here: its harness was ended"):
        check_confinement()
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ValueError, match="only run on Linux and macOS"):
        check_confinement()


def test_a_harness_that_is_ended_counts_as_a_failure():
    program = Program(["import time\ntime.sleep(1000)"], LIMITS)
    os.kill(program.process.pid, signal.SIGKILL)
    assert program.verdict()[0] == "its harness was ended"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_file(), reason="PRUNUS_DATA names no folder with text/HumanEval.jsonl.gz")
def test_the_solutions_of_humaneval_pass_and_empty_bodies_fail():
    problems, lines = read_problems(DATA), gzip.decompress(DATA.read_bytes()).splitlines()
    solutions = [json.loads(line)["canonical_solution"] for line in lines]
    right = [problem.program(solution) for problem, solution in zip(problems, solutions, strict=True)]
    assert len(right) == 164 and not any(run_programs(right))
    assert all(run_programs([problem.program("    pass\n") for problem in problems]))
