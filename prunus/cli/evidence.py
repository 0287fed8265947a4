"""``prunus evidence``"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

What = Literal["prepare", "run", "page"]
Model = Literal["stories15M", "SmolLM2-135M", "ResNet-20"]


@dataclass(frozen=True)
class Command:
    """Does the gradient probe help? Prunes three models by each strategy with and without it, at equal sparsity.

    The folder --data holds stories15M/ (a Hugging Face folder, with calib.u16 and valid.u16), SmolLM2-135M/ (its .gguf
    file, with calib.u16 and valid.u16 as prepare makes them from --text) and ResNet-20/ (its weights as .th, with
    cifar10.npz as prepare makes it from --cifar10).

    prepare: those files. run: the study, a JSON file for each model and seed; what is there already is not done again.
    page: docs/probe.md from all files.
    """

    what: tyro.conf.Positional[What]  # what to do
    data: Path = Path("runs/evidence")  # prepare, run: folder of models and data
    text: Path | None = None  # prepare: text to make tokens of
    cifar10: Path | None = None  # prepare: folder of CIFAR-10
    models: tuple[Model, ...] = ("stories15M", "SmolLM2-135M", "ResNet-20")  # run: which
    seeds: tuple[int, ...] = (0, 1, 2)  # run: which calibration samples
    small: bool = False  # run: few samples, one level and one tau, to try it; its figures mean nothing
    device: str = "cpu"  # run: cpu or cuda
    results: Path = Path("benchmarks/evidence")  # run, page: folder of the JSON files
    page: Path = Path("docs/probe.md")  # page: file to write


def run(command: Command) -> None:
    {"prepare": _prepare, "run": _run, "page": _page}[command.what](command)


def _prepare(command: Command) -> None:
    if command.text is None and command.cifar10 is None:
        raise ValueError("prepare makes something of --text or --cifar10, but neither was given")
    from ..lab.evidence.prepare import write_images, write_tokens

    written = []
    if command.text is not None:
        written += write_tokens(command.data / "SmolLM2-135M", command.text)
    if command.cifar10 is not None:
        written.append(write_images(command.data / "ResNet-20", command.cifar10))
    for path in written:
        print(f"{path} written")


def _run(command: Command) -> None:
    import torch

    from ..lab.evidence.cases import CASES, smaller, subject_for
    from ..lab.evidence.study import Design, Study
    from ..ops.machine import device_of

    device = device_of(command.device)
    torch.backends.cudnn.allow_tf32 = False  # float32 is to mean it in convolutions too
    design = Design((0.5,), (1.0,)) if command.small else Design()
    for name in command.models:
        case = smaller(CASES[name]) if command.small else CASES[name]
        for seed in command.seeds:
            study = Study(case, design, seed, command.results)
            study.run(lambda case=case, seed=seed: subject_for(case, command.data, seed, device), print)
            print(f"{study.path}: complete")


def _page(command: Command) -> None:
    from ..lab.evidence.page import page

    text = page(command.results)
    command.page.parent.mkdir(parents=True, exist_ok=True)
    command.page.write_text(text)
    print(f"{command.page} written")
