"""What commands write from the records and from the docstrings is current: pictures, README, reference, scores."""

import re
from xml.etree import ElementTree

import pytest
from pages import ROOT

import prunus
from benchmarks import drawing, pictures, reference
from benchmarks.__main__ import main
from prunus.score import SCORES

RESULTS = ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"


def test_no_figure_of_the_readme_is_typed():
    """A number with a decimal point stands in code, in a version or between the marks."""
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"<!-- figures: .*<!-- end of figures", "", text, flags=re.S)
    prose = re.sub(r"```.*?```|`[^`]*`|Python 3\.\d+", "", prose, flags=re.S)
    assert re.findall(r"\d+\.\d+|\d+ (?:ms|s|times|GiB|MiB)\b", prose) == []


def test_the_reference_has_every_public_name():
    text = reference.reference_page()
    assert [name for name in prunus.__all__ if f"### {name}\n" not in text and name != "SCORES"] == []


def test_the_table_says_of_every_score_when_to_use_it():
    assert set(reference.WHEN) == set(SCORES)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").iterdir()), ids=lambda path: path.name)
def test_a_picture_is_small_and_has_a_title_two_themes_and_text_inside_its_frame(path):
    text = path.read_text()
    assert len(text) < 40_000 and "prefers-color-scheme:dark" in text
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text
    colours = set(re.findall(r"(?:fill|stroke): (#\w{6})", text))
    assert colours <= set(drawing.COLOURS), "a colour that has no dark theme"
    width, height = map(float, root.get("viewBox").split()[2:])
    for element in root.iter(f"{SVG}text"):
        assert 0 < float(element.get("x")) < width and 0 < float(element.get("y")) < height


def test_the_flow_prunes_exactly_half():
    counts = [[len(squares.get_offsets()) for squares in axes.collections] for axes in pictures.flow(8).axes]
    assert counts == [[64, 0], [], [32, 32], [32, 32]]


def test_labels_keep_their_distance_and_their_order():
    assert drawing.apart([10, 12, 11, 80], 5) == [10, 20, 15, 80]


def test_a_readme_without_marks_is_refused_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("# Prunus\n")
    with pytest.raises(SystemExit):
        main(["pictures", "--readme", str(path), "--out", str(tmp_path / "pictures"), "--results", str(RESULTS)])
    assert "needs the lines <!-- figures: written by" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"] and path.read_text() == "# Prunus\n"


def test_the_commands_write_what_is_in_the_repository(tmp_path):
    path = tmp_path / "README.md"
    path.write_text((ROOT / "README.md").read_text())
    out = tmp_path / "pictures"
    folders = ["--results", str(RESULTS), "--studies", str(ROOT / "studies")]
    main(["pictures", *folders, "--readme", str(path), "--out", str(out)])
    main(["reference", "--docs", str(tmp_path)])
    names = [*(ROOT / "docs" / "pictures").iterdir(), ROOT / "docs" / "reference.md"]
    for written in names:
        beside = (out if written.suffix == ".svg" else tmp_path) / written.name
        assert beside.read_text() == written.read_text()
    assert path.read_text() == (ROOT / "README.md").read_text()
