"""What a long call says of the time that is left."""

import sys

import pytest

from prunus.oneshot import progress


class Terminal:
    def __init__(self, is_terminal):
        self.text, self.isatty = "", lambda: is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("reports", "left"),
    {
        "from the start": ([(0, 0), (100, 50)], "1:40"),
        "goes on in the middle": ([(10, 50), (30, 60)], "1:20"),
        "goes on at the end": ([(10, 99)], None),
        "is done": ([(10, 50), (60, 100)], None),
    }.values(),
)
def test_the_time_left_counts_what_was_done_in_this_call(monkeypatch, is_terminal, reports, left):
    clock, out = [0.0], Terminal(is_terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", out)
    with progress.progress_line(None, "recover") as show:
        for clock[0], num in reports:
            show(num, 100, "step")
    last = out.text.replace("\r", "\n").rstrip().splitlines()[-1]
    assert f"{reports[-1][1]}%" in last and ("left" in last) == (left is not None)
    assert left is None or f"about {left} left" in last
