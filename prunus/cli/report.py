"""``prunus report``: the charts of runs and models as one page. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from .console import print


@dataclass(frozen=True)
class Command:
    """Write one HTML page about a run, a study or a model; it opens from disk and needs no network."""

    folder: tyro.conf.Positional[Path]  # folder of a run, several runs, a study, or a pruned or recovered model
    out: Path | None = None  # file to write; default: report.html in FOLDER


def run(command: Command) -> None:
    from ..lab.report.page import write_report

    page = write_report(command.folder, command.out)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB; open it in a browser")
