"""Every page of the guide runs as it is written, and every link leads somewhere."""

import re
import shlex
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from pages import ROOT, anchors_of, blocks_of, links_of, run, run_python

from prunus import AdamWPrune
from prunus.cli import COMMANDS, _parse
from prunus.sparse import compiled

GUIDE = ["training", "after-training", "search", "run-and-ship", "distributed", "command-line", "compare"]
GUIDE += ["shrink", "recover", "bits", "large", "migrating", "how-it-works", "extending"]
GUIDE += ["hub-to-server", "prune-folder", "fine-tuning", "evaluate", "check"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
SCREEN = 110  # lines that a page of the guide may have


def page(name):
    return ROOT / "docs" / f"{name}.md"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch, few_weights):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDE)
def test_the_python_of_a_page_runs(name):
    run(page(name), commands=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GUIDE if any(b.language == "sh" for b in blocks_of(page(name)))])
def test_a_page_runs_with_its_commands(name):
    run(page(name), commands=True)


@pytest.mark.parametrize("name", GUIDE)
def test_a_page_is_about_one_screen(name):
    by_hand = re.sub(r"<!-- [^\n]*: written by .*?<!-- end of figures -->", "", page(name).read_text(), flags=re.S)
    assert len(by_hand.splitlines()) <= SCREEN


def test_the_lines_of_the_readme_run(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
    monkeypatch.setattr(compiled, "_compiled_forward", lambda: compiled._forward)  # compiling takes many seconds
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=None, pad_token_id=0, **sizes)
    names = {"model": model, "batches": [torch.randn(32, 16)], "optimizer": AdamWPrune(model.parameters())}
    names["loader"] = [torch.randn(4, 16) for _ in range(20)]
    blocks = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    for block in blocks:
        if "Decoder" in block.text:
            names |= {"model": transformers.LlamaForCausalLM(config), "input_ids": torch.tensor([[3, 4]])}
        run_python(replace(block, text=block.text.replace("steps=1000", "steps=20")), ROOT / "README.md", names)
    assert len(blocks) == 3 and names["result"].sparsity == 0.8 and names["tokens"].shape == (1, 66)


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def commands_of(path):
    """Every call of prunus in a page, run or not."""
    for block in blocks_of(path):
        for line in block.text.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|-m )prunus (.*)", line) if block.language in ("", "sh") else None
            if found and not block.note.startswith("not run: waits for"):
                yield shlex.split(found[1], comments=True)
    if path == ROOT / "README.md":
        yield from map(shlex.split, re.findall(r"`prunus (\w+ [^`]*)`", path.read_text()))  # in its table


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_exists(path):
    assert set(re.findall(r"`prunus (\w+)`", path.read_text())) <= set(COMMANDS)
    for name, *args in commands_of(path):
        assert name in COMMANDS
        _parse(import_module(f"prunus.cli.{name}").Command, name, args)


def test_a_block_that_is_not_run_says_why():
    notes = [block.note for name in GUIDE for block in blocks_of(page(name)) if block.note]
    assert [note for note in notes if not note.startswith(("not run: ", "file: "))] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
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
    docs = ROOT / "docs"
    names = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"README.md"}
    assert names <= {link.partition("#")[0] for link in links_of(ROOT / "docs" / "README.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in names if f" {name}\n" not in navigation] == []
