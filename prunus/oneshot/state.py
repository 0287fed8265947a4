"""What a search or a repair has finished, on disk: files of groups of weights and of trials, to resume from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..eligible import Weight
from ..files.atomic import write_atomically
from ..ops.bits import words_of
from .limit import Trial
from .probe.decide import Ratios
from .probe.prober import Probed

FORMAT = "prunus-search-1"


class RepairState:
    """The folder of one repair: a file for each group of weights that is done."""

    def __init__(self, folder: Path, settings: Mapping[str, str], weights: Mapping[str, Weight]) -> None:
        self.folder = folder
        about = {"format": "prunus-repair-1", "settings": dict(settings), "weights": fingerprint(weights)}
        claim(folder, "repair", about)

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.folder / f"{name}.pt", lambda file: torch.save(dict(content), file))

    def load(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.pt"
        return _read(path) if path.is_file() else None


def claim(folder: Path, kind: str, about: dict[str, Any]) -> None:
    """Mark the folder as that of a search or a repair with these settings, or check that it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    if not path.is_file():
        if any(".part" not in path.name for path in folder.iterdir()):
            raise ValueError(f"{folder} holds other things; give a folder that is new or a {kind}'s own")
        write_atomically(path, lambda file: file.write(json.dumps(about, indent=2).encode()))
        return
    before = json.loads(path.read_text())
    if before.get("format") != about["format"]:
        raise ValueError(f"{folder} is not the state of a {kind}: it lacks the mark {about['format']!r}")
    for name, value in about["settings"].items():
        if before["settings"].get(name) != value:
            was = before["settings"].get(name)
            differs = f"has {name} = {was}, not {value}"
            raise ValueError(f"the {kind} in {folder} {differs}; give another folder, or delete it")
    if before["weights"] != about["weights"]:
        raise ValueError(f"the {kind} in {folder} began with other weights; load the same model, still dense")


class State:
    """The folder of one search: of a model with these weights, with these settings."""

    def __init__(self, folder: Path, settings: Mapping[str, str], weights: Mapping[str, Weight]) -> None:
        self.folder = folder
        self.weights = weights
        claim(folder, "search", {"format": FORMAT, "settings": dict(settings), "weights": fingerprint(weights)})

    def trials(self) -> list[Trial]:
        """Finished trials, in order."""
        found = []
        while (path := self._path(len(found))).is_file():
            saved = dict(_read(path)["trial"])
            found.append(Trial(target=saved.pop("asked"), **saved))
        return found

    def levels(self, number: int) -> list[dict[str, Tensor]]:
        """Packed masks of the last two levels (or the only one) that were kept after trial ``number``."""
        devices = {name: weight.parameter.device for name, weight in self.weights.items()}
        levels = _read(self._path(number))["levels"]
        return [{name: mask.to(devices[name]) for name, mask in masks.items()} for masks in levels]

    def finish(self, number: int, trial: Trial, levels: Sequence[Mapping[str, Tensor]]) -> None:
        """Save a trial with the levels kept after it, and delete the files of its groups."""
        last = [{name: mask.cpu() for name, mask in masks.items()} for masks in levels[-2:]]
        figures = asdict(trial)
        content = {"trial": {"asked": figures.pop("target"), **figures}, "levels": last}
        write_atomically(self._path(number), lambda file: torch.save(content, file))
        for path in self.folder.glob("group_*.pt"):
            path.unlink()

    def save_group(self, number: int, names: Sequence[str], found: Probed) -> None:
        """Save what the probe of trial ``number`` has decided for these weights."""
        content = {}
        for name in names:
            ratios = found.ratios[name]
            content[name] = {
                "pruned": found.pruned[name].cpu(),
                "q": ratios.q.cpu(),
                "num_zero": ratios.num_zero,
                "num_not_finite": ratios.num_not_finite,
                "tau": found.taus[name],
            }
        path = self.folder / f"group_{number:04}_{len(list(self.folder.glob('group_*.pt'))):05}.pt"
        write_atomically(path, lambda file: torch.save(content, file))

    def groups(self, number: int) -> Probed:
        """What was decided in trial ``number`` before the search was interrupted."""
        found = Probed()
        for path in sorted(self.folder.glob(f"group_{number:04}_*.pt")):
            for name, saved in _read(path).items():
                device = self.weights[name].parameter.device
                found.pruned[name] = saved["pruned"].to(device)
                found.ratios[name] = Ratios(saved["q"].to(device), saved["num_zero"], saved["num_not_finite"])
                found.taus[name] = saved["tau"]
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"trial_{number:04}.pt"


def fingerprint(weights: Mapping[str, Weight]) -> dict[str, list[int]]:
    """Shape and an exact sum of the bits of every weight."""
    found = {}
    for name, weight in weights.items():
        found[name] = [*weight.parameter.shape, int(words_of(weight.parameter).sum(dtype=torch.int64))]
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read back ({type(error).__name__}); delete it to do its part anew"
        ) from error
