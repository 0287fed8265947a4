"""``prunus report``: the charts of runs and models as one page. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from .console import print


@dataclass(frozen=True)
class Command:
    """One HTML page of a run, a study or a model; it opens from disk and loads nothing from elsewhere."""

    folder: tyro.conf.Positional[Path]  # of a run, of runs, of a study, or of a pruned or recovered model
    out: Path | None = None  # where to write the page; without it report.html in the folder


def run(command: Command) -> None:
    from ..lab.report.page import write_report

    page = write_report(command.folder, command.out)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB; open it in a browser")
