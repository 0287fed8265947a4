"""From plain to small and back, file to file or folder to folder."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..files.atomic import new_folder
from ..files.json_file import read_json
from ..files.reader import PLAIN, SMALL, open_tensors
from ..files.sparse_file import from_files
from ..files.writer import MAX_SHARD_BYTES, Report, Saved, TensorSource, WritePlan, write
from ..ops.bits import words_of
from .card import CardFacts, facts_of_files, write_card

BESIDE = {".json", ".txt", ".model", ".jinja", ".md", ".vocab", ".tiktoken"}  # configuration, tokenizer, licence
NAMES_BESIDE = ("license", "licence", "notice", "copying", "tokenizer", "vocab.")


@dataclass(frozen=True)
class ExportJob:
    """What to write: ``out`` is a new folder, or a file that ends in .safetensors."""

    out: Path
    small: bool = True
    check: bool = False  # read back what was written and compare every bit
    max_shard_bytes: int = MAX_SHARD_BYTES
    check_folder: Callable[[Path], None] | None = None  # what else is checked of a folder before it appears
    report: Report | None = None  # is told of each tensor that is written or compared
    repo: str | None = None  # name on the Hub that a folder will have, for its card


@dataclass(frozen=True)
class Exported:
    """What was written, how many bytes the source's tensors or files and the new files have, and how long it took."""

    saved: Saved
    bytes_before: int
    bytes_after: int
    write_seconds: float
    check_seconds: float | None


def convert(path: Path, job: ExportJob) -> Exported:
    with open_tensors(path) as tensors:
        before = sum(file.path.stat().st_size for file in tensors.files)
        source = from_files(tensors)
        if job.out.suffix == ".safetensors":
            return _written(source, job, before, job.out)
        folder = path if path.is_dir() else None
        config = read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
        if not job.small and config.get("tie_word_embeddings"):  # the head is the embedding, and need not be stored
            source = replace(source, aliases={}, order=[name for name in source.order if name in source.specs])
        return to_folder(source, job, before, str(path), lambda part: copy_beside(folder, part) if folder else None)


def to_folder(
    source: TensorSource, job: ExportJob, before: int, origin: str, beside: Callable[[Path], None]
) -> Exported:
    """A new folder with the tensors, what ``beside`` puts there, and a card; it appears when it is complete."""
    with new_folder(job.out) as part:
        beside(part)
        done = _written(source, job, before, part / (SMALL if job.small else PLAIN))
        shapes = {name: spec.shape for name, spec in source.specs.items()}
        facts = facts_of_files(part, shapes, done.saved.rows)
        write_card(part, CardFacts(name=job.out.name, source=origin, repo=job.repo, **facts))
        if job.check_folder is not None:
            job.check_folder(part)
    files = [job.out / path.name for path in done.saved.files]
    return replace(done, saved=Saved(files, done.saved.rows))


def check_same(source: TensorSource, path: Path, report: Report | None = None) -> None:
    """ValueError unless ``path`` holds just the tensors of ``source``, bit for bit."""
    with open_tensors(path) as tensors:
        if set(tensors.records) != set(source.order):
            odd = min(set(tensors.records) ^ set(source.order))
            raise ValueError(f"{path} and its source do not both have {odd!r}")
        for number, name in enumerate(source.order, 1):
            wanted, copy = source.fetch(source.aliases.get(name, name)), tensors.read(name)
            alike = (wanted.dtype, wanted.shape) == (copy.dtype, copy.shape)
            if not alike or not torch.equal(words_of(wanted.cpu()), words_of(copy)):
                raise ValueError(f"{path} differs from its source in {name!r}; the disk or memory may be damaged")
            if report:
                report(number, len(source.order), name)


def _written(source: TensorSource, job: ExportJob, before: int, path: Path) -> Exported:
    if not job.small:
        source = replace(source, metadata={"format": "pt"} | source.metadata)
    started = time.perf_counter()
    saved = write(source, WritePlan(path, job.small, job.max_shard_bytes), _part_of(job, 0))
    written = time.perf_counter()
    after = sum(file.stat().st_size for file in saved.files)
    if job.check:
        place = path if len(saved.files) == 1 else path.with_name(path.name + ".index.json")
        check_same(source, place, _part_of(job, 1))
    checked = time.perf_counter() - written if job.check else None
    return Exported(saved, before, after, written - started, checked)


def _part_of(job: ExportJob, number: int) -> Report | None:
    """Reports the writing, or the check behind it, as a part of the whole."""
    if (report := job.report) is None:
        return None
    return lambda done, total, name: report(done + number * total, (1 + job.check) * total, name)


def copy_beside(source: Path, target: Path) -> None:
    """Copy what lies beside the weights of a model; what is there already stays."""
    for path in sorted(source.iterdir()):
        wanted = path.suffix in BESIDE or path.name.lower().startswith(NAMES_BESIDE)
        if wanted and path.is_file() and not path.name.endswith(".index.json") and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
