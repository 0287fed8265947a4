"""``docs/benchmarks.md``, ``experts.md``, ``repair.md`` and the figures of ``distributed.md`` from all records."""

from dataclasses import dataclass
from pathlib import Path

from . import decode, distributed, experts, export, lora, matvec, prune, repair_page, select, step, wanda
from .benchmark import newest_records

SECTIONS = {
    what: draw
    for module in (decode, export, lora, matvec, prune, select, step, wanda)
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
    """Write docs/benchmarks.md from all results, beside it experts.md, repair.md and the figures of distributed.md."""

    results: Path = Path("benchmarks/results")  # folder of the JSON files
    page: Path = Path("docs/benchmarks.md")  # file to write

    def run(self) -> None:
        beside = self.page.with_name("distributed.md")
        pages = {self.page: page(self.results)}
        if text := distributed.page(self.results, beside.read_text() if beside.is_file() else ""):
            pages[beside] = text
        for name, write in {"experts.md": experts.page, "repair.md": repair_page.page}.items():
            if text := write(self.results):
                pages[self.page.with_name(name)] = text
        self.page.parent.mkdir(parents=True, exist_ok=True)
        for path, text in pages.items():
            path.write_text(text)
            print(f"{path} written")
