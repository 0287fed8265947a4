"""Runs programs that a model wrote, each in a process of its own that cannot do much harm.

``Program`` starts this file as a script, the harness: a fresh interpreter in a session of its own, with an empty folder
and a minimal environment. Where the kernel allows it, the harness moves into namespaces: without network, with files
that are read-only outside of the folder, a small one in memory, and with process numbers of its own, so that all that
was started dies with the program. Then it forks. The fork takes its limits, gives up the right to start processes and
to open sockets, and runs the program; the harness waits, and ends it.

A program passes when the fork says a random token, which it does after the last line of the tests. One that leaves
early fails, whatever its exit code. This guards against accidents, not against attacks: the program and the token share
an interpreter, and a program that is made to pass without solving anything will.
"""

import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

CONFINEMENT = (
    "each in a process of its own in an empty folder, with limits on time, memory and files; on Linux it cannot start "
    "processes, use the network or write other files"
)
MOST_SAID = 300  # characters of the reason why a program failed
GRACE = 10.0  # seconds that a harness may take beyond those of its program
# what the system calls of Linux take: flags of unshare, of mount and mount_setattr, and options of prctl
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000  # user, pid, net, ipc, mount
MOUNT_SETATTR, RECURSIVE, READ_ONLY, NO_SETUID_NO_DEVICES = 442, 0x8000, 1, 2 | 4
DIE_WITH_PARENT, SET_FILTER, NO_NEW_RIGHTS = 1, 22, 38
# by machine: its number, clone, clone3, and what is refused: socket, kill, fork and vfork
CALLS = {"x86_64": (0xC000003E, 56, 435, (41, 62, 57, 58)), "aarch64": (0xC00000B7, 220, 435, (198, 129))}


@dataclass(frozen=True)
class Limits:
    """What a program may use. Processor time is what ends one that computes: a busy machine changes no verdict."""

    cpu_seconds: int = 10
    wall_seconds: float = 30.0
    memory_bytes: int = 1 << 30
    folder_bytes: int = 64 << 20
    file_bytes: int = 16 << 20
    open_files: int = 64


class Program:
    def __init__(self, parts: Sequence[str], limits: Limits = Limits()) -> None:
        self.most_seconds = limits.wall_seconds + GRACE
        self.folder = tempfile.TemporaryDirectory(prefix="prunus-program-", ignore_cleanup_errors=True)
        place = self.folder.name
        environment = {"PATH": os.defpath, "HOME": place, "TMPDIR": place, "OMP_NUM_THREADS": "1"}
        # python -I would ignore these: the order of a set, and so a verdict, is the same in every call
        environment |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with tempfile.TemporaryFile() as task:
            task.write(json.dumps([list(parts), place, asdict(limits)]).encode())
            task.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-sP", str(Path(__file__).absolute())],
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=place,
                env=environment,
                start_new_session=True,
            )

    def verdict(self) -> tuple[str, list[str]]:
        """Why the program failed, empty if it passed, and what it could do that it should not; waits for its end."""
        try:
            said, _ = self.process.communicate(timeout=self.most_seconds)
            why, can = json.loads(said)
            return why, can
        except (subprocess.TimeoutExpired, ValueError):
            return "its harness was ended", []
        finally:
            self.stop()

    def stop(self) -> None:
        """End it unless it has ended, and remove its folder."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.folder.cleanup()


def run_programs(programs: Iterable[Sequence[str]], limits: Limits = Limits()) -> Iterator[str]:
    """Why each program failed, empty for one that passed, in order; as many run at a time as there are cores."""
    waiting, running = deque(programs), deque[Program]()
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(Program(waiting.popleft(), limits))
            yield running[0].verdict()[0]
            running.popleft()
    finally:
        for program in running:
            program.stop()


def check_confinement() -> str:
    """What to say before programs run, empty where they are confined; ValueError where none can run."""
    if not hasattr(os, "fork"):
        raise ValueError("programs are only run on Linux and macOS, whose processes can be limited; use a container")
    why, can = Program(["import typing"]).verdict()
    if why:
        raise ValueError(f"{sys.executable} cannot run programs here: {why}")
    return f"On this system programs can {', '.join(can)}: run the command in a container of its own." if can else ""


def _harness(parts: Sequence[str], folder: str, limits: Limits) -> tuple[str, list[str]]:
    is_alone, cannot_write = _move_to_namespaces(folder, limits) if sys.platform == "linux" else (False, False)
    _die_with_parent()
    token, leave, deadline = os.urandom(16).hex().encode(), os._exit, time.monotonic() + limits.wall_seconds
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            os.chdir(folder)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.closerange(3, writing)
            os.closerange(writing + 1, 256)
            _run(parts, limits, writing, token)
        finally:
            leave(1)
    os.close(writing)
    taken, _, said = _read(reading, deadline).partition(b"\n")
    is_late = time.monotonic() >= deadline
    status, seconds = _ended(child, is_late)
    is_filtered, is_limited = b"filter" in taken, b"memory" in taken
    can = {"change files": not cannot_write, "use the network": not (is_alone or is_filtered)}
    can |= {"start processes": not is_filtered, "use all memory": not is_limited}
    if said == token and status == 0:
        why = ""
    elif said and said != token:
        why = said.decode(errors="replace")[:MOST_SAID]
    elif is_late:
        why = f"it ran for more than {limits.wall_seconds:g} s"
    elif seconds > 0.9 * limits.cpu_seconds:  # the kernel counts in ticks
        why = f"it used more than {limits.cpu_seconds} s of processor time"
    elif os.WIFSIGNALED(status):
        why = f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        why = f"it left with exit code {os.waitstatus_to_exitcode(status)} before its tests had passed"
    return why, [name for name, is_so in can.items() if is_so]


def _read(pipe: int, deadline: float) -> bytes:
    said = b""
    while len(said) < 1 << 14 and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (more := os.read(pipe, 1 << 14)):
            break
        said += more
    return said


def _ended(child: int, is_late: bool) -> tuple[int, float]:
    ended = status = 0
    for _ in range(0 if is_late else 50):  # one that ends by itself closes its pipe a moment before
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        _, status, used = os.wait4(child, 0)
    return status, used.ru_utime + used.ru_stime


def _run(parts: Sequence[str], limits: Limits, pipe: int, token: bytes) -> None:
    """Execute the parts and say the token, or what was raised; does not return."""
    write, leave, execute = os.write, os._exit, exec  # before the program can replace them
    write(pipe, f"{_take_limits(limits)}\n".encode())
    sys.modules["program"] = module = ModuleType("program")  # not __main__: its own tests need not run
    try:
        for code in [compile(part, "program.py", "exec") for part in parts]:
            execute(code, module.__dict__)
    except BaseException as error:
        said = type(error).__name__
        with contextlib.suppress(BaseException):
            said = f"{said}: {error}".rstrip(": ")[:MOST_SAID]
        write(pipe, said.encode(errors="replace"))
    else:
        write(pipe, token)
    leave(0)


def _take_limits(limits: Limits) -> str:
    """Limits of this process and all that it starts; says which of the two that a system may lack it has."""
    import resource

    sizes = {"CORE": 0, "CPU": limits.cpu_seconds, "FSIZE": limits.file_bytes, "NOFILE": limits.open_files}
    for name, most in sizes.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    taken = ""
    with contextlib.suppress(OSError, ValueError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        taken += "memory "
    if sys.platform == "linux":
        _die_with_parent()
        libc = ctypes.CDLL(None)
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # without the rights that a namespace gives
        libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
        taken += "filter" * _refuse_calls(libc)
    return taken


def _refuse_calls(libc: ctypes.CDLL) -> bool:
    """Have the kernel refuse sockets, signals and processes, but not threads; False where it cannot."""
    if platform.machine() not in CALLS:
        return False
    machine, clone, clone3, refused = CALLS[platform.machine()]
    load, equal, has_bit, answer = 0x20, 0x15, 0x45, 0x06  # instructions: what, and how many to skip if true or false
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM; ENOSYS, after which threads use clone
    code = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, allow), (load, 0, 0, 0)]
    for number, said in {clone3: unknown, **dict.fromkeys(refused, refuse)}.items():
        code += [(equal, 0, 1, number), (answer, 0, 0, said)]
    code += [(equal, 1, 0, clone), (answer, 0, 0, allow), (load, 0, 0, 16), (has_bit, 0, 1, 0x10000)]  # CLONE_THREAD
    code += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    rows = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in code))
    table = struct.pack("HP", len(code), ctypes.addressof(rows))
    return libc.prctl(SET_FILTER, 2, table, 0, 0) == 0


def _move_to_namespaces(folder: str, limits: Limits) -> tuple[bool, bool]:
    """Whether this process is in namespaces now, and whether its files are read-only but for the folder."""
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(NEW_NAMESPACES) != 0:
        return False, False
    for name, line in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        Path("/proc/self", name).write_text(line)
    size = f"size={limits.folder_bytes},nr_inodes=1000,mode=700".encode()
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", NO_SETUID_NO_DEVICES, size) != 0:
        return True, False
    for place, depth, change in (b"/", RECURSIVE, (READ_ONLY, 0)), (folder.encode(), 0, (0, READ_ONLY)):
        attributes = struct.pack("QQQQ", *change, 0, 0)
        if libc.syscall(MOUNT_SETATTR, -100, place, depth, attributes, len(attributes)) != 0:
            return True, False
    return True, True


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    parts, folder, limits = json.load(sys.stdin)
    print(json.dumps(_harness(parts, folder, Limits(**limits))))
