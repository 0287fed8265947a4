"""The tables of the pages in ``docs``, from all records; their words are written by hand."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from . import (
    bits_figures,
    distributed,
    programs_figures,
    recover_figures,
    repair_figures,
    shrink_figures,
    small_models,
    summary,
)
from .benchmark import filled, newest_records

MODULES = "decode export large matvec prune recover_step select small_models step wanda"
TABLES = {
    what: draw for name in MODULES.split() for what, draw in import_module(f".{name}", __package__).TABLES.items()
}


def tables(folder: Path) -> dict[str, str]:
    drawn: dict[str, list[str]] = {}
    for record in newest_records(folder):
        if record["what"] in TABLES:
            drawn.setdefault(record["what"], []).append(TABLES[record["what"]](record))
    return {what: "\n".join(texts) for what, texts in drawn.items()}


@dataclass(frozen=True)
class Page:
    """Write the tables of docs/evidence, bits.md, experts.md and distributed.md from all results."""

    results: Path = Path("benchmarks/results")  # folder of the JSON files
    probe: Path = Path("benchmarks/evidence")  # folder of the files on the gradient probe
    studies: Path = Path("studies")  # folder of the finished studies
    docs: Path = Path("docs")  # folder of the pages

    def run(self) -> None:
        evidence = self.docs / "evidence"
        bits = bits_figures.parts(self.results, self.studies)
        parts = {
            self.docs / "bits.md": {"answer": bits["answer"]},
            self.docs / "distributed.md": distributed.parts(self.results),
            self.docs / "experts.md": small_models.parts(self.results),
            evidence / "benchmarks.md": tables(self.results),
            evidence / "repair.md": repair_figures.parts(self.results),
            evidence / "recover.md": recover_figures.parts(self.results),
            evidence / "shrink.md": shrink_figures.parts(self.results, self.studies),
            evidence / "bits.md": bits,
            evidence / "programs.md": programs_figures.parts(self.results),
            evidence / "README.md": summary.parts(self.results, self.studies, self.probe, evidence),
        }
        pages = {path: filled(path.read_text(), parts) for path, parts in parts.items()}
        for path, text in pages.items():
            path.write_text(text)
            print(f"{path} written")
