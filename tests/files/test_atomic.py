"""A file or folder is whole or not there, whoever else writes it, and nothing is left beside it for long."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from prunus.files import atomic
from prunus.files.atomic import DAY, HOUR, new_folder, part_name, write_atomically
from prunus.files.lock import try_lock


class Full:
    """A file on a disk without room."""

    def write(self, data):
        raise OSError(28, "No space left on device")

    def flush(self):
        pass


@pytest.mark.parametrize("by_torch", [False, True])
def test_what_cannot_be_written_leaves_the_old_file_alone(by_torch, tmp_path):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        write_atomically(
            tmp_path / "a.json", lambda file: torch.save(torch.ones(9), Full()) if by_torch else Full().write(b"new")
        )
    assert contents(tmp_path) == {"a.json": "old"}


def test_a_folder_that_is_not_there_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory: '.*/no/a\.json'"):
        write_atomically(tmp_path / "no" / "a.json", lambda file: file.write(b"new"))


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def fill(path: Path, text: str, replace: bool = False) -> None:
    with new_folder(path, replace) as part:
        (part / text).mkdir()
        (part / text / "a").write_text(text)


def test_a_folder_is_swapped_whole_where_the_caller_allows_it(tmp_path):
    fill(tmp_path / "x", "one")
    with pytest.raises(ValueError, match="is there and not empty"):
        fill(tmp_path / "x", "two")
    assert contents(tmp_path) == {"x/one/a": "one"}
    fill(tmp_path / "x", "two", replace=True)
    assert contents(tmp_path) == {"x/two/a": "two"}
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is there"):
        fill(tmp_path / "file", "three", replace=True)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_last_whole_folder_wins_over_one_that_came_meanwhile(can_exchange, tmp_path, monkeypatch):
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    with new_folder(tmp_path / "x") as part:
        (part / "a").write_text("late")
        fill(tmp_path / "x", "early")
    assert contents(tmp_path) == {"x/a": "late"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_error_leaves_the_old_folder_and_no_part(tmp_path):
    fill(tmp_path / "x", "one")
    with pytest.raises(KeyError), new_folder(tmp_path / "x", replace=True) as part:
        (part / "a").write_text("half")
        raise KeyError
    assert contents(tmp_path) == {"x/one/a": "one"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def aged(path: Path, seconds: float) -> None:
    for inner in (path, *path.rglob("*")):
        os.utime(inner, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("is_folder", [False, True])
def test_parts_of_killed_writers_go_by_age_and_never_while_their_writer_lives(is_folder, tmp_path):
    write = "new_folder(path).__enter__()" if is_folder else "part_file(path).__enter__()"
    code = f"""
import sys, time; from pathlib import Path; from prunus.files.atomic import new_folder, part_file
path = Path(sys.argv[1]); context = {write.removesuffix(".__enter__()")}; part = context.__enter__()
if {is_folder}: (part / "inner").write_text("x")
print("ready", flush=True); time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    (part,) = tmp_path.iterdir()
    aged(part, 2 * DAY)
    write_atomically(tmp_path / "y", lambda file: file.write(b""))
    assert part.exists(), "its writer lives"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    aged(part, HOUR / 2)
    write_atomically(tmp_path / "y", lambda file: file.write(b""))
    assert part.exists(), "it is young"
    aged(part, 2 * HOUR)
    write_atomically(tmp_path / "y", lambda file: file.write(b""))
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_where_locks_do_not_reach_parts_go_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "HOST", "elsewhere")
    part, other = part_name(tmp_path / "x"), tmp_path / ".x.part"  # the other has no writer's name
    monkeypatch.undo()
    for path, age, is_left in ((part, 2 * HOUR, True), (part, 2 * DAY, False), (other, 2 * DAY, True)):
        path.write_text("half")
        aged(path, age)
        write_atomically(tmp_path / "y", lambda file: file.write(b""))
        assert path.exists() == is_left


def test_a_part_is_locked_while_it_is_written(tmp_path):
    with new_folder(tmp_path / "x") as part, try_lock(part) as is_locked:
        assert is_locked is False


@pytest.mark.slow
def test_processes_that_save_to_one_path_leave_whole_files(tmp_path):
    program = Path(__file__).with_name("sparse_writers.py")
    run = [sys.executable, str(program), str(tmp_path), "8", "2"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, found in json.loads(done.stdout).items():
        assert sum(found.values()) > 1 and len(found) > 2, name


@pytest.mark.parametrize("target", ["empty", "full", "missing"])
def test_a_folder_that_is_a_link_is_filled_where_it_points(tmp_path, target):
    real, link = tmp_path / "other" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    if target != "missing":
        real.mkdir()
    if target == "full":
        (real / "old").touch()
    with atomic.new_folder(link, replace=target == "full") as part:
        (part / "new").touch()
    assert link.is_symlink()
    assert [path.name for path in real.iterdir()] == ["new"]
    assert list(real.parent.iterdir()) == [real]


def test_without_an_exchange_of_names_a_folder_may_be_replaced_by_others_meanwhile(tmp_path, monkeypatch):
    path, moved, others = tmp_path / "folder", Path.replace, []
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)

    def replace(self, target):
        result = moved(self, target)
        if target.suffix == ".replaced" and len(others) < 2:  # another writer comes in between
            others.append(path)
            path.mkdir()
            (path / "other").touch()
        return result

    monkeypatch.setattr(Path, "replace", replace)
    path.mkdir()
    (path / "old").touch()
    with atomic.new_folder(path, replace=True) as part:
        (part / "new").touch()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]
