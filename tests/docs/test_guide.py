"""Every page of the guide runs as it is written, and every link leads somewhere."""

import pytest
from pages import ROOT, anchors_of, blocks_of, links_of, run

GUIDE = ["training", "after-training", "search", "run-and-ship", "doctor", "many-gpus", "command-line", "compare"]
GUIDE += ["migrating", "how-it-works", "extending"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
SCREEN = 110  # lines that a page of the guide may have


def page(name):
    return ROOT / "docs" / f"{name}.md"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch, few_weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", GUIDE)
def test_the_python_of_a_page_runs(name):
    run(page(name), commands=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GUIDE if any(b.language == "sh" for b in blocks_of(page(name)))])
def test_a_page_runs_with_its_commands(name):
    run(page(name), commands=True)


@pytest.mark.parametrize("name", GUIDE)
def test_a_page_is_about_one_screen(name):
    assert len(page(name).read_text().splitlines()) <= SCREEN


def test_a_block_that_is_not_run_says_why():
    notes = [block.note for name in GUIDE for block in blocks_of(page(name)) if block.note]
    assert [note for note in notes if not note.startswith(("not run: ", "file: "))] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path):
    for link in links_of(path):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), f"{path.name} links to {link}"
        if anchor:
            assert anchor in anchors_of(found), f"{path.name} links to {link}"


def test_every_page_is_in_the_contents_and_in_the_navigation_of_the_site():
    names = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert names <= {link.partition("#")[0] for link in links_of(ROOT / "docs" / "README.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in names if f" {name}\n" not in navigation] == []
