"""SIGTERM and Ctrl-C end a training between two steps, with a checkpoint, on all ranks together."""

import os
import shlex
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .parallel import Team
from .run import Run

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """A training was stopped by a signal after it wrote a checkpoint; the exit code is 128 + the signal's number."""

    def __init__(self, signum: int, run: Run, step: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name} after step {step}, with a checkpoint; continue it by {_continuing(run)}")
        self.exit_code = 128 + signum


class SignalWatch:
    """While it lasts, signals are noted and not acted on; a second Ctrl-C ends a process that is alone at once.

    torchrun passes Ctrl-C on to ranks that had it from the terminal already, so ranks ignore the second one.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.signum = team, 0
        self.before: dict[int, Any] = {}
        self.pending: tuple[torch.Tensor, Any] | None = None  # the ranks' signals, on their way

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
            # ignored ones stay so, as in a shell's background; None is a handler of C, which could not be set again
            self.before = {s: before for s, before in handlers.items() if before not in (None, signal.SIG_IGN)}
            for signum in self.before:
                signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for signum, handler in self.before.items():  # torchrun signals the other ranks when the first one has ended
            ends_with_others = isinstance(error, Interrupted) and self.team.kind != "none"
            signal.signal(signum, signal.SIG_IGN if ends_with_others else handler)
        if self.pending is not None and kind is None:
            self.pending[1].wait()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == signum == signal.SIGINT and self.team.kind == "none":
            raise KeyboardInterrupt
        self.signum = self.signum or signum

    def agreed(self) -> int:
        """The signal after which all ranks stop now, or 0; every rank calls it after every step.

        Ranks learn of each other's signals one step late, so that no step waits for the answer.
        """
        if self.team.kind == "none":
            return self.signum
        agreed = 0
        if self.pending is not None:
            numbers, work = self.pending
            work.wait()
            agreed = int(numbers)
        numbers = torch.tensor(self.signum)
        self.pending = numbers, dist.all_reduce(numbers, dist.ReduceOp.MAX, async_op=True)
        return agreed


def _continuing(run: Run) -> str:
    command = f"prunus train --resume --out {shlex.quote(str(run.out))}"
    if run.parallel == "none":
        return command
    local, ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    options = f"--nproc-per-node {local}" if local == ranks else "..."
    return f"torchrun {options} -m {command} --parallel {run.parallel}"
