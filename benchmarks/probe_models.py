"""The models of the study of the probe and their data, one folder each:

stories15M/     a Hugging Face folder, with calib.u16 and valid.u16 beside its files
SmolLM2-135M/   a .gguf file, calib.u16 and valid.u16
ResNet-20/      a .th file of weights, and cifar10.npz
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from prunus.lab.data.batches import ImageShape, Normalise
from prunus.lab.data.datasets import read_cifar10
from prunus.lab.models import RESNETS, resnet
from prunus.lab.trained_model import ModelSource, TrainedModel, load_trained
from prunus.oneshot.probe.prober import Schedule

IMAGES = "cifar10.npz"
NUM_CALIBRATION = 2048  # images to draw calibration samples from
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what ResNet-20 was trained with


@dataclass(frozen=True)
class Case:
    """A model of the study: how it is calibrated, probed and evaluated."""

    name: str
    about: str
    schedule: Schedule
    samples: int  # calibration windows or images
    held_out: int  # windows or images
    length: int = 256  # tokens of a window

    @property
    def settings(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("schedule", "samples", "held_out", "length")}


CASES = {
    case.name: case
    for case in (
        Case("stories15M", "Llama, 15 M weights, float32; TinyStories", "sequential", 16, 128),
        Case(
            "SmolLM2-135M",
            "SmolLM2-135M-Instruct, Llama with grouped queries, 135 M weights, read from a file that was quantised to "
            "Q4_1 and computed in float32; the validation text of wikitext-2, in two halves",
            "joint",
            16,
            64,
        ),
        Case("ResNet-20", "ResNet-20, 0.27 M weights, float32; CIFAR-10", "sequential", 128, 10_000),
    )
}


def smaller(case: Case) -> Case:
    """The same in seconds, to try whether it runs: its figures mean nothing."""
    return replace(case, samples=4, held_out=4, length=16)


def subject_for(case: Case, data: Path, seed: int, device: torch.device) -> TrainedModel:
    """The case's model, samples and measure; ``seed`` chooses the calibration samples."""
    folder = data / case.name
    if not folder.is_dir():
        raise ValueError(f"{data} has no folder {case.name}; python -m benchmarks evidence --help says what it holds")
    if (folder / IMAGES).is_file():
        return _image_subject(case, folder, seed, device)
    packed = sorted(folder.glob("*.gguf"))
    return load_trained(
        ModelSource(
            model=str(folder),
            tokens=folder / "calib.u16",
            eval_tokens=folder / "valid.u16",
            samples=case.samples,
            length=case.length,
            eval_windows=case.held_out,
            seed=seed,
            gguf_file=packed[0].name if packed else None,
            dtype="float32",
            device=str(device),
        )
    )


def _image_subject(case: Case, folder: Path, seed: int, device: torch.device) -> TrainedModel:
    with np.load(folder / IMAGES) as file:
        images = {name: file[name] for name in file.files}
    normalise = Normalise(torch.tensor(MEAN)[:, None, None] * 255, torch.tensor(STD)[:, None, None] * 255)
    chosen = np.random.default_rng(seed).permutation(len(images["calib_labels"]))[: case.samples]
    batch = normalise(images["calib_pixels"][chosen]), torch.from_numpy(images["calib_labels"][chosen])
    pixels = normalise(images["test_pixels"][: case.held_out]).to(device)
    labels = torch.from_numpy(images["test_labels"][: case.held_out]).to(device)

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        parts = zip(pixels.split(1000), labels.split(1000), strict=True)
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(labels)

    def save(out: Path) -> None:
        raise ValueError("models of the study are not written")

    model = _resnet20(folder).to(device).eval()
    images = [(batch[0].to(device), batch[1].to(device))]
    return TrainedModel(model, images, accuracy, save, F.cross_entropy, "accuracy")


def _resnet20(folder: Path) -> nn.Module:
    paths = sorted(folder.glob("*.th"))
    if not paths:
        raise ValueError(f"{folder} holds no weights; put resnet20_cifar10.th there")
    state = torch.load(paths[0], map_location="cpu", weights_only=True)
    model = resnet(RESNETS["resnet20"], ImageShape(3, 32, 10))
    model.load_state_dict({name.removeprefix("module."): value for name, value in state["state_dict"].items()})
    return model


def write_tokens(folder: Path, text: Path) -> list[Path]:
    """Tokens of both halves of a text, cut between two lines: ``calib.u16`` and ``valid.u16``."""
    from transformers import AutoTokenizer

    packed = sorted(folder.glob("*.gguf"))
    if not packed:
        raise ValueError(f"{folder} holds no .gguf file, whose tokenizer makes tokens of the text")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=packed[0].name, local_files_only=True)
    whole = text.read_text(encoding="utf-8")
    middle = whole.index("\n", len(whole) // 2) + 1
    found = []
    for name, half in (("calib", whole[:middle]), ("valid", whole[middle:])):
        tokens = np.array(tokenizer.encode(half, add_special_tokens=False))
        if tokens.max() > 0xFFFF:
            raise ValueError(f"the vocabulary of {folder} does not fit into uint16: token {tokens.max()}")
        found.append(folder / f"{name}.u16")
        tokens.astype("<u2").tofile(found[-1])
    return found


def write_images(folder: Path, cifar10: Path) -> Path:
    """The test images of CIFAR-10 and the first training images, with their labels."""
    train, test = read_cifar10(cifar10)
    np.savez_compressed(
        folder / IMAGES,
        test_pixels=test.pixels,
        test_labels=test.labels,
        calib_pixels=train.pixels[:NUM_CALIBRATION],
        calib_labels=train.labels[:NUM_CALIBRATION],
    )
    return folder / IMAGES
