"""What a call has finished, on disk, to resume from: groups of weights of a repair, trials of a search."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from ..eligible import Weight
from ..files.atomic import is_part
from ..files.json_file import read_json, write_json
from ..files.torch_file import FORMAT, read_torch_file, write_torch_file
from ..ops.bits import sum_of_bits
from ..ranks import Ranks
from .identity import identity
from .options import Trial
from .probe.prober import Probed, Ratios
from .samples import digest
from .shared_work import of_first

Folder = str | os.PathLike[str]
Weights = Iterable[Weight] | Mapping[str, list[int]]  # or their fingerprint


class Journal:
    """The folder of one call: a file for each group, block or trial that is done, by the first rank alone."""

    def __init__(
        self,
        folder: Folder,
        settings: Mapping[str, Any],
        weights: Weights,
        kind: str = "repair",
        ranks: Ranks | None = None,
    ) -> None:
        self.folder, self.ranks = Path(folder), ranks
        self._last: tuple[str, dict[str, Any]] | None = None  # what was read last

        def begin() -> str:
            known = {name: identity(value) for name, value in settings.items()}
            sums = dict(weights) if isinstance(weights, Mapping) else fingerprint(weights)
            _check_or_write(self.folder, kind, {"format": f"prunus-{kind}-1", "settings": known, "weights": sums})
            return digest([*known.items(), *sums.items()])

        self.run = of_first(ranks, begin)

    def save(self, file: str, names: Sequence[str], content: Mapping[str, Any]) -> None:
        """Save what was done to the parameters of these names."""
        self._last, path = None, self.folder / f"{file}.pt"
        of_first(self.ranks, lambda: write_torch_file(path, {"of": [self.run, *names], "content": dict(content)}))

    def load(self, file: str, names: Sequence[str]) -> dict[str, Any] | None:
        """What was saved; None where there is nothing, where it is damaged, or where it is of other parameters."""
        return of_first(self.ranks, lambda: self._content(file, names))

    def _content(self, file: str, names: Sequence[str]) -> dict[str, Any] | None:
        path = self.folder / f"{file}.pt"
        entry = _read(path, [self.run, *names]) if path.is_file() else None
        return entry and entry["content"]

    def stored(self, file: str, names: Sequence[str]) -> dict[str, Any]:
        """What was saved, which must be there, on the first rank alone; what was read last is not read again."""
        if self.ranks is not None and self.ranks.rank:
            raise ValueError("only the first rank can read stored results; quantise without a repair in one process")
        if self._last is None or self._last[0] != file:
            self._last = None
            if (content := self._content(file, names)) is None:
                problem = f"{self.folder / file}.pt, which holds changed weights, is missing or damaged"
                raise ValueError(f"{problem}; repeat the call: it redoes only what this file held")
            self._last = file, content
        return self._last[1]


def _check_or_write(folder: Path, kind: str, about: dict[str, Any]) -> None:
    """Mark the folder as that of a call with these settings and weights, or check that it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    if not path.is_file():
        if any(not is_part(path) for path in folder.iterdir()):
            raise ValueError(f"{folder} holds files of something else; repeat what left them, or give another folder")
        write_json(path, about)
        return
    before = read_json(path)
    if before.get("format") != about["format"] or not isinstance(before.get("settings"), dict):
        raise ValueError(f"{folder} is not the state of a {kind}: it lacks the format mark {about['format']!r}")
    for name, value in about["settings"].items():
        if (was := before["settings"].get(name)) != value:
            differs = f"has {name} = {was}, not {value}"
            raise ValueError(f"the {kind} in {folder} {differs}; give another folder, or delete it")
    if before.get("weights") != about["weights"]:
        raise ValueError(f"the {kind} in {folder} started with other weights; load the same model, still dense")


class SearchJournal:
    def __init__(self, folder: Folder, settings: Mapping[str, Any], weights: Mapping[str, Weight]) -> None:
        self.journal = Journal(folder, settings, weights.values(), "search")
        self.folder, self.weights = self.journal.folder, weights

    def trials(self) -> list[Trial]:
        """Finished trials, in order; a damaged one and what was done after it are removed."""
        files = takewhile(lambda file: (self.folder / f"{file}.pt").is_file(), map(_file_of, count()))
        return [Trial(**content["trial"]) for content in self._undamaged([*files])]

    def levels(self, number: int) -> list[dict[str, Tensor]]:
        """Packed masks of the last two levels (or the only one) that were kept after trial ``number``."""
        devices = {name: weight.parameter.device for name, weight in self.weights.items()}
        levels = self.journal.stored(_file_of(number), [_file_of(number)])["levels"]
        return [{name: mask.to(devices[name]) for name, mask in masks.items()} for masks in levels]

    def finish(self, number: int, trial: Trial, levels: Sequence[Mapping[str, Tensor]]) -> None:
        """Save a trial with the levels kept after it, and delete the files of its groups."""
        last = [{name: mask.cpu() for name, mask in masks.items()} for masks in levels[-2:]]
        self.journal.save(_file_of(number), [_file_of(number)], {"trial": asdict(trial), "levels": last})
        for path in self.folder.glob("group_*.pt"):
            path.unlink()

    def save_group(self, number: int, names: Sequence[str], found: Probed) -> None:
        """Save what the probe of trial ``number`` has decided for these weights."""
        content = {}
        for name in names:
            ratios = vars(found.ratios[name]) | {"q": found.ratios[name].q.cpu()}
            content[name] = {"pruned": found.pruned[name].cpu(), "tau": found.taus[name], **ratios}
        file = f"group_{number:04}_{len([*self.folder.glob('group_*.pt')]):05}"
        self.journal.save(file, [file], content)

    def groups(self, number: int) -> Probed:
        """What was decided in trial ``number`` before the search was interrupted."""
        probed = Probed()
        for content in self._undamaged(sorted(path.stem for path in self.folder.glob(f"group_{number:04}_*.pt"))):
            for name, saved in content.items():
                device = self.weights[name].parameter.device
                probed.pruned[name] = saved["pruned"].to(device)
                probed.ratios[name] = Ratios(saved["q"].to(device), saved["num_zero"], saved["num_not_finite"])
                probed.taus[name] = saved["tau"]
        return probed

    def _undamaged(self, files: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What files hold, up to the first that is damaged; it is removed with those after it, which build on it."""
        for number, file in enumerate(files):
            if (content := self.journal.load(file, [file])) is None:
                for later in files[number:]:
                    (self.folder / f"{later}.pt").unlink()
                return
            yield content


def _file_of(trial: int) -> str:
    return f"trial_{trial:04}"


def fingerprint(weights: Iterable[Weight]) -> dict[str, list[int]]:
    """Shape and an exact sum of the bits of every weight."""
    return {weight.name: [*weight.parameter.shape, sum_of_bits(weight.parameter)] for weight in weights}


def _read(path: Path, of: list[str]) -> dict[str, Any] | None:
    """What a file holds; None, with a warning, where it is damaged or does not belong to ``of``."""
    try:
        content = read_torch_file(path)
        if isinstance(content, dict) and content.get("format") == FORMAT:  # and so its checksums were compared
            if content.get("of") == of:
                return content
            problem = "is not the file that was saved here"
        else:
            problem = "is damaged (it has no checksums)"
    except ValueError as error:
        problem = f"is damaged ({error})"
    warnings.warn(f"{path} {problem}; its content is computed again", stacklevel=2)
    return None
