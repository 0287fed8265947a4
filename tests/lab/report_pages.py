"""Pages as the tests read them: tables by caption, texts by tag, figures as data; and a folder full of markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from report_folders import make_study

from prunus.lab.report.cells import read_source
from prunus.lab.report.page import render

VERDICTS = "Held-out perplexity at the end, from the best to the worst of each sparsity"
ARMS = ["dense", "random", "magnitude", "bitter7", "bitter3"]
HOSTILE = "<img src=x onerror=alert(1)>&{{7*7}}%{x}</script><script>alert(2)</script>"


class Page(HTMLParser):
    """Tables by caption as rows of cells, texts by tag, and scripts as they stand."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "line", "img"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "data":
            self._rows[-1][-1] = dict(attrs)["value"] or ""

    def handle_data(self, data: str) -> None:
        data = data.replace("\u00a0", " ")
        if self._open:
            self.texts[self._open[-1]][-1] += data
        if self._open and self._open[-1] in ("td", "th"):
            self._rows[-1][-1] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()
        if tag == "table":
            self.tables[self.texts["caption"][-1]] = [row for row in self._rows if row]
            self._rows = []


def page_of(folder: Path) -> Page:
    return Page(render(read_source(folder)))


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}))


def changed(folder: Path, **changes: dict) -> Path:
    """A study with other values in the rows of some arms; ``every`` are those of all of them."""
    make_study(folder, ARMS)
    result = json.loads((folder / "study_result.json").read_text())
    for row in result["rows"]:
        row |= changes.get("every", {}) | changes.get(row["arm"], {})
    (folder / "study_result.json").write_text(json.dumps(result))
    return folder


def rows_of(folder: Path) -> list[dict]:
    """What a study's result says of its arms."""
    return json.loads((folder / "study_result.json").read_text())["rows"]


def figures_of(folder: Path) -> list[dict]:
    return figures_in(render(read_source(folder)))


def figures_in(text: str) -> list[dict]:
    data = re.search(r'id="figures">(.*?)</script>', text, re.S)[1]
    assert "<" not in data  # nothing in it could end its element
    return json.loads(data)


def hostile_study(folder: Path) -> Path:
    """A study in which every text that can be chosen is markup."""
    make_study(folder, ARMS, (0.8,), seeds=2)
    cell = folder / "runs" / "bitter3-0.8-s0" / "cell.json"
    cell.write_text(json.dumps({"arm": HOSTILE, "sparsity": 0.8, "seed": 0, "cold": False}))
    path = folder / "runs" / "dense-0-s0" / "run.json"
    run = json.loads(path.read_text())
    run["environment"] |= {"machine": HOSTILE, HOSTILE: HOSTILE}
    run["run"] |= {"data": HOSTILE}
    path.write_text(json.dumps(run))
    metrics = folder / "runs" / "magnitude-0.8-s0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("blocks.0.mlp.up", HOSTILE))
    result = json.loads((folder / "study_result.json").read_text())
    result["rows"][-1] |= {"arm": HOSTILE, "verdict": HOSTILE, "same_as": HOSTILE}
    result["failed"] = [{"arm": HOSTILE, "sparsity": 0.8, "seed": 0, "message": HOSTILE}]
    (folder / "study_result.json").write_text(json.dumps(result))
    study = json.loads((folder / "study.json").read_text()) | {"hash": HOSTILE}
    (folder / "study.json").write_text(json.dumps(study))
    return folder
