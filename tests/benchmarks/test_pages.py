"""The pages in ``docs/`` are what the commands write from the records in this repository."""

from pathlib import Path

import pytest

from benchmarks import distributed, page, probe
from benchmarks.__main__ import COMMANDS, main

ROOT = Path(page.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "write", "folder"),
    [
        ("benchmarks", page.page, "results"),
        ("distributed", distributed.page, "results"),
        ("probe", probe.page, "evidence"),
    ],
)
def test_a_page_is_current(name, write, folder):
    assert (ROOT / "docs" / f"{name}.md").read_text() == write(ROOT / "benchmarks" / folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "--results" in capsys.readouterr().out


def test_the_overview_names_every_command(capsys):
    main([])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
