"""``docs/evidence/benchmarks.md``, and the tables of the pages whose words are written by hand, from all records."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import decode, distributed, export, matvec, prune, repair_figures, select, small_models, step, summary, wanda
from .benchmark import filled, newest_records

SECTIONS = {
    what: draw
    for module in (decode, export, matvec, prune, select, small_models, step, wanda)
    for what, draw in module.SECTIONS.items()
}
INTRODUCTION = """# Benchmarks

This page is made by `python -m benchmarks page` from the JSON files in `benchmarks/results/`; nothing in it is
typed. Where a record was not written by a command, its section says so. All
methods of a table ran in one process, one after the other or in turns. Run them in a checkout on your
own machine with `python -m benchmarks select`, `step`, `train`, `export`, `matvec`, `decode`, `prune` and `level`
(`--device cuda` on a GPU). What pruning with repair is worth and costs is in [repair.md](repair.md).
"""


def page(folder: Path) -> str:
    """The page for the newest records in ``folder``."""
    records = [record for record in newest_records(folder) if record["what"] in SECTIONS]
    if not records:
        raise ValueError(f"there are no results in {folder}; run python -m benchmarks select first")
    return "\n".join([INTRODUCTION, *(SECTIONS[record["what"]](record) for record in records)])


@dataclass(frozen=True)
class Page:
    """Write docs/evidence/benchmarks.md from all results, and the tables of the other pages that are in docs."""

    results: Path = Path("benchmarks/results")  # folder of the JSON files
    probe: Path = Path("benchmarks/evidence")  # folder of the files on the gradient probe
    studies: Path = Path("studies")  # folder of the finished studies
    docs: Path = Path("docs")  # folder of the pages

    def run(self) -> None:
        pages = {self.docs / "evidence" / "benchmarks.md": page(self.results)}
        tables: dict[str, Callable[[], dict[str, str]]] = {
            "distributed.md": lambda: distributed.parts(self.results),
            "experts.md": lambda: small_models.parts(self.results),
            "evidence/repair.md": lambda: repair_figures.parts(self.results),
            "evidence/README.md": lambda: summary.parts(self.results, self.studies, self.probe, self.docs / "evidence"),
        }
        for name, parts in tables.items():
            if (self.docs / name).is_file():
                pages[self.docs / name] = filled((self.docs / name).read_text(), parts())
        for path, text in pages.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"{path} written")
