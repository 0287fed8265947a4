"""Watching ends when the run ends; its charts fit the terminal, and outside one there are plain lines."""

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from report_folders import make_run, make_study, stopped

from prunus.cli import main, watch
from prunus.cli.watch import BLOCKS, chart, drawn, layer_line, plain_letters, running
from prunus.cli.watch import stopped as said_of
from prunus.files.lock import is_free, lock_folder
from prunus.lab.report.cells import read_source
from prunus.lab.report.records import read_record
from prunus.lab.run_files import RunFiles

NAN = "ValueError: the loss is nan at step 140"
WATCH = [sys.executable, "-m", "prunus", "watch", "--every", "0.1"]


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """Cells (column, row) with a dot."""
    return {(x, y) for y, row in enumerate(rows) for x, c in enumerate(row) if c != "\u2800"}


@pytest.mark.parametrize("size", [(1, 1), (7, 2), (40, 6)], ids=str)
@pytest.mark.parametrize(
    "series",
    [
        [],
        [(3.0, 1.0)],
        [(0.0, 2.0), (9.0, 2.0)],
        [(0.0, -1e30), (1.0, 1e30)],
        [(float(i), float(i)) for i in range(999)],
    ],
    ids=["empty", "one", "level", "huge", "many"],
)
def test_a_line_fills_its_frame_and_no_more(series, size):
    rows = drawn(series, *size)
    assert len(rows) == size[1] and all(len(row) == size[0] for row in rows)
    assert bool(dots(rows)) == bool(series)
    if len({y for _, y in series}) > 1:
        assert {(0, size[1] - 1), (size[0] - 1, 0)} <= dots(rows)  # rises from corner to corner
    if len(series) > 1:
        assert {x for x, _ in dots(rows)} == set(range(size[0]))  # without gaps


def test_a_chart_names_its_ends_and_its_last_value():
    lines = chart("loss", [(0, 4.0), (1, 1.5), (2, 2.0)], (40, 5))
    assert lines[0] == "loss: 2.000" and lines[1].split()[0] == "4.000" and lines[-1].split()[0] == "1.500"
    assert "nothing yet" in chart("loss", [], (40, 5))[-1]


def test_layers_are_blocks_in_their_order(tmp_path):
    line = layer_line(read_record(RunFiles(make_run(tmp_path / "run", sparsity=0.8))), 80)
    blocks = line.split()[-1]
    assert len(blocks) == 12 and list(blocks) == sorted(blocks, key=BLOCKS.index) and blocks[0] != blocks[-1]
    assert plain_letters("⠀⣀▁█") == " *18"


@pytest.mark.parametrize("kind", ["run", "study"])
def test_what_has_ended_is_shown_at_once(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    folder = make_run(tmp_path / "x") if kind == "run" else make_study(tmp_path / "x", ["dense", "magnitude"])
    main(["watch", str(folder), "--once"])
    shown = capsys.readouterr().out
    assert ("held-out perplexity" if kind == "run" else "magnitude") in shown
    assert max(map(len, shown.splitlines())) <= 60


def failing_study(folder: Path) -> Path:
    """One run goes on at 8 %, another failed at 70 %."""
    make_study(folder, ["dense", "magnitude"], (0.5,))
    (folder / "study_result.json").unlink()
    stopped(folder / "runs" / "dense-0-s1", 0.1)
    stopped(folder / "runs" / "magnitude-0.5-s1", 0.7, NAN)
    return folder


def test_a_run_that_failed_is_named_and_never_followed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    folder = failing_study(tmp_path / "study")
    assert running(read_source(folder)).name == "dense-0-s1"
    main(["watch", str(folder), "--once"])
    shown = capsys.readouterr().out
    [row] = [line.split() for line in shown.splitlines() if line.startswith("magnitude ")]
    assert row[3] == "failed" and "% done" in shown
    assert f"magnitude-0.5-s1 failed: {NAN}" in shown
    (folder / "runs" / "dense-0-s1" / "failed.json").write_text("{}")
    assert running(read_source(folder)) is None


@pytest.mark.parametrize("sparsity", [0.5, 0.1234567])
def test_a_run_without_an_end_is_in_the_row_of_its_arm(sparsity, tmp_path):
    folder = make_study(tmp_path / "study", ["dense", "magnitude", "bitter7 late"], (0.5,))
    make_run(folder / "runs" / f"bitter7-late-{sparsity}-s3", "bitter7 late", sparsity, 3)
    stopped(folder / "runs" / f"bitter7-late-{sparsity}-s3", 0.5)
    assert {cell.arm for cell in read_source(folder).cells} == {"dense", "magnitude", "bitter7 late"}


@pytest.mark.parametrize("once", [True, False])
def test_watching_a_run_that_failed_says_why_and_ends(once, tmp_path, capsys):
    folder = stopped(make_run(tmp_path / "run"), 0.5, NAN)
    main(["watch", str(folder), *["--once"] * once])
    assert f"run failed: {NAN}" in capsys.readouterr().out


def unfinished(folder: Path) -> tuple[Path, list[str], str]:
    """A run with half of its lines; the other half, and its result."""
    make_run(folder)
    lines, result = (folder / "metrics.jsonl").read_text().splitlines(True), (folder / "result.json").read_text()
    (folder / "metrics.jsonl").write_text("".join(lines[:20]))
    (folder / "result.json").unlink()
    return folder, lines[20:], result


def finish(folder: Path, lines: list[str], result: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[:3]) + lines[3][:5])  # as a reader may find it: a line half written
        file.flush()
        time.sleep(0.15)
        file.write(lines[3][5:] + "".join(lines[4:]))
    (folder / "result.json").write_text(result)


@pytest.mark.slow
def test_outside_a_terminal_it_follows_with_plain_lines_and_ends(tmp_path):
    folder, lines, result = unfinished(tmp_path / "run")
    watching = subprocess.Popen([*WATCH, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        first = watching.stdout.readline()
        assert watching.poll() is None
        finish(folder, lines, result)
        rest = watching.communicate(timeout=30)[0]
    finally:
        watching.kill()
    assert watching.returncode == 0
    assert first.startswith("run: step 100 of 200")
    assert "step 200 of 200" in rest.splitlines()[-1] and "\x1b" not in first + rest


@pytest.mark.slow
def test_outside_a_terminal_it_says_that_nothing_comes(tmp_path, capsys, monkeypatch):
    folder, lines, result = unfinished(tmp_path / "run")
    monkeypatch.setattr(watch, "QUIET", 0.2)
    ends = threading.Timer(0.8, finish, (folder, lines, result))
    ends.start()
    main(["watch", str(folder), "--every", "0.05"])
    ends.join()
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("nothing new for ") for line in said) in range(2, 6)
    assert "step 200 of 200" in said[-1]


@pytest.fixture(params=["terminal", "log"])
def watching(request, monkeypatch):
    """Watches a run, in a terminal or outside one, with little patience; returns the exit code."""
    monkeypatch.setattr(watch, "GRACE", 0.4)
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")

    def code(folder: Path) -> int:
        try:
            main(["watch", str(folder), "--every", "0.05"])
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return code


@pytest.mark.slow
def test_a_run_that_is_killed_is_said_to_be_stopped(watching, tmp_path, capsys):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    small = "--context 8 --batch 2 --steps 100000 --eval-size 2 --log-every 1".split()
    run, train = tmp_path / "run", [sys.executable, "-m", "prunus", "train", *small]
    training = subprocess.Popen([*train, "--data", tmp_path / "data.txt", "--out", run], stderr=subprocess.DEVNULL)
    try:
        while not (run / "metrics.jsonl").is_file() and training.poll() is None:
            time.sleep(0.05)
        threading.Timer(2.0, training.kill).start()
        late = threading.Timer(60.0, (run / "failed.json").write_text, ("{}",))  # which would end it, too
        late.start()
        began = time.monotonic()
        assert watching(run) == 1
        late.cancel()
    finally:
        training.kill()
        training.wait()
    assert time.monotonic() - began > 1.5 + watch.GRACE  # from the last look before it was killed
    said = f"run was stopped before its end, at step {read_record(RunFiles(run)).last_step:,} of 100,000; "
    assert capsys.readouterr().out.endswith(f"{said}prunus train --resume --out {run} continues it\n")


@pytest.mark.slow
def test_a_run_that_a_process_holds_is_waited_for(watching, tmp_path, capsys):
    folder, lines, result = unfinished(tmp_path / "run")
    ends = threading.Timer(2 * watch.GRACE, finish, (folder, lines, result))
    with lock_folder(folder):
        ends.start()
        assert watching(folder) == 0
    ends.join()
    assert "stopped" not in capsys.readouterr().out


@pytest.mark.slow
def test_nobody_is_missed_where_folders_are_not_locked(watching, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    folder, lines, result = unfinished(tmp_path / "run")
    ends = threading.Timer(2 * watch.GRACE, finish, (folder, lines, result))
    ends.start()
    assert watching(folder) == 0
    ends.join()
    assert "stopped" not in capsys.readouterr().out


def test_a_stopped_run_of_a_study_is_continued_by_the_study(tmp_path):
    folder = stopped(make_study(tmp_path / "study", ["dense", "magnitude"]) / "runs" / "dense-0-s1", 0.5)
    assert said_of(read_record(RunFiles(folder)), folder).endswith(
        f"; prunus study --out {tmp_path / 'study'} continues it"
    )


def test_a_look_at_the_folder_keeps_no_training_from_it(tmp_path):
    with lock_folder(tmp_path):
        assert not is_free(tmp_path)
    look = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_EX)
    threading.Timer(0.07, os.close, (look,)).start()
    with lock_folder(tmp_path):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def _read(terminal: int, wanted: bytes | None) -> bytes:
    """What a terminal shows until it shows ``wanted``, or until its other end is closed."""
    shown, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline and not (wanted and wanted in shown):
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:
                break
    return shown


@pytest.mark.slow
def test_in_a_narrow_terminal_it_draws_without_colour_and_ends(tmp_path):
    folder, lines, result = unfinished(tmp_path / "run")
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": "40", "LINES": "40", "NO_COLOR": "1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    watching = subprocess.Popen([*WATCH, str(folder)], stdout=follower, stderr=follower, stdin=follower, env=env)
    os.close(follower)
    try:
        shown = _read(leader, b"step 100 of 200")
        finish(folder, lines, result)
        shown += _read(leader, None)
        assert watching.wait(timeout=30) == 0
    finally:
        watching.kill()
        os.close(leader)
    text = shown.decode()
    assert "step 200 of 200" in text and re.search("[\u2801-\u28ff]", text)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7][0-9;]*m", text)
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")) <= 40


@pytest.mark.slow
def test_a_training_shows_its_charts_itself_and_ends_with_the_same_result(tmp_path):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    small = "--context 8 --batch 2 --steps 12 --every 2 --eval-every 4 --eval-size 2 --warmup 1".split()
    train = [sys.executable, "-m", "prunus", "train", "--live", *small, "--data", str(tmp_path / "data.txt"), "--out"]
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    training = subprocess.Popen([*train, str(tmp_path / "a")], stdout=follower, stderr=follower, env=env)
    os.close(follower)
    try:
        shown = _read(leader, b"prunable weights are zero").decode()
        assert training.wait(timeout=30) == 0
    finally:
        training.kill()
        os.close(leader)
    assert "training loss" in shown and "step 12 of 12" in shown and re.search("[\u2801-\u28ff]", shown)

    plain = subprocess.run([*train, str(tmp_path / "b")], capture_output=True, text=True, timeout=60)
    assert plain.returncode == 0 and "step 12/12" in plain.stderr and "\x1b" not in plain.stderr
    digests = {json.loads((tmp_path / name / "result.json").read_text())["digest"] for name in "ab"}
    assert len(digests) == 1
    assert "live" not in json.loads((tmp_path / "a" / "run.json").read_text())["run"]


@pytest.mark.slow
def test_a_letter_that_the_terminal_lacks_is_a_question_mark(tmp_path):
    folder = make_study(tmp_path / "study", ["dense", "magnitude", "spät"], (0.5,))
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*WATCH, str(folder), "--once"], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0 and "sp?t" in done.stdout


def test_a_folder_that_is_none_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["watch", str(tmp_path / "nowhere")])
    assert stop.value.code == 2 and "not a folder" in capsys.readouterr().err
