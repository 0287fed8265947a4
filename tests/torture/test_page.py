"""The page on reliability shows what was counted."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="imports what limits memory as Linux does")
def test_the_page_is_made_of_its_figures(monkeypatch):
    for folder in ("tests", "tests/fuzz", "tests/torture"):
        monkeypatch.syspath_prepend(ROOT / folder)
    from torture import page

    figures = json.loads((ROOT / "docs/evidence/reliability.json").read_text())
    assert (ROOT / "docs/evidence/reliability.md").read_text() == page(figures)
