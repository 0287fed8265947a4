"""Families of every kind go through the sweep as the record says, and the page shows the record."""

import json
from pathlib import Path

import pytest
from covering import quickly

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
from page import CHECKS, COLUMNS, cell, page  # noqa: E402
from sweep import sweep  # noqa: E402
from table import TABLE  # noqa: E402

RECORDS = Path(__file__).parents[2] / "docs" / "evidence"
RECORD = json.loads((RECORDS / "support.json").read_text())
# first one of each kind that users have most: a decoder, Conv1D, experts, an encoder with a decoder, images as patches
NAMES = ("llama", "gpt2", "mixtral", "t5", "vit")
NAMES += ("mamba", "roberta", "resnet", "gemma2", "esm")


@pytest.mark.parametrize("name", quickly(NAMES, "llama"))
def test_a_family_does_what_the_record_says(name):
    [newest, *_], found = RECORD.values(), sweep(name)
    known = newest["families"][name]
    cells = {check: (cell(found, check), cell(known, check), found[check]) for check in CHECKS}
    assert {check: shown for check, shown in cells.items() if shown[0] != shown[1]} == {}


def test_the_page_shows_the_record_of_every_family():
    assert (RECORDS / "support.md").read_text() == page(RECORD)
    newest, *_ = RECORD.values()
    assert len(TABLE) >= 100 and list(newest["families"]) == list(TABLE)


def test_a_cell_says_yes_only_where_the_check_held():
    held = dict.fromkeys(CHECKS, "yes")
    families = {
        "good": {"class": "A", "parameters": 8, "prunable": 4, "dense": {"embedding or head": 2}, **held},
        "bad": {"class": "B", "parameters": 8, "prunable": 4, "dense": {}, **held, "wanda": "ValueError: no inputs"},
        "half": {"class": "C", "parameters": 8, "prunable": 4, "dense": {}, **held, "repair": "yes; 1 of 2 is not"},
    }
    shown = page({"5.1.0": {"torch": "2", "families": families}, "4.9.0": {"torch": "2", "families": {
        "good": {"class": "A", "missing": True}, "bad": families["bad"], "half": {"class": "C", "not built": "sizes"},
    }}})  # fmt: skip
    rows = [line for line in shown.splitlines() if line.startswith("| ")][1:]
    rest = " | yes" * (len(COLUMNS) - 3)
    assert rows == [
        f"| good | `A` | yes | yes | yes{rest} | not there | 50% | embedding or head 2 |",
        f"| bad | `B` | yes | no | yes{rest} | same | 50% | nothing |",
        f"| half | `C` | yes | yes | part{rest} | not built | 50% | nothing |",
    ]
    assert "- bad, wanda: ValueError: no inputs" in shown and "- half, repair: yes; 1 of 2 is not" in shown
