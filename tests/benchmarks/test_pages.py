"""The pages in ``docs/`` are what the commands write from the records in this repository."""

from pathlib import Path

import pytest

from benchmarks import distributed, experts, page, probe, repair_page
from benchmarks.__main__ import COMMANDS, main

ROOT = Path(page.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "folder", "write"),
    [
        ("benchmarks", "results", lambda folder, text: page.page(folder)),
        ("distributed", "results", distributed.page),
        ("experts", "results", lambda folder, text: experts.page(folder)),
        ("repair", "results", lambda folder, text: repair_page.page(folder)),
        ("probe", "evidence", lambda folder, text: probe.page(folder)),
    ],
)
def test_a_page_is_current(name, folder, write):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text == write(ROOT / "benchmarks" / folder, text)


def test_a_guide_that_is_written_by_hand_is_kept(tmp_path):
    (tmp_path / "distributed.md").write_text("# By hand\n" + distributed.MARK + "old figures")
    main(["page", "--results", str(ROOT / "benchmarks" / "results"), "--page", str(tmp_path / "benchmarks.md")])
    text = (tmp_path / "distributed.md").read_text()
    assert text.startswith("# By hand\n" + distributed.MARK) and "old figures" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    folder = "--docs" if command == "reference" else "--results"  # docstrings have no records
    assert stop.value.code == 0 and folder in capsys.readouterr().out


def test_the_overview_names_every_command(capsys):
    main([])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
