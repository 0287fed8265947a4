"""A command of the benchmarks that runs at a small size, and a model for it."""

import json

import numpy as np
import pytest
import torch

from benchmarks import study
from benchmarks.__main__ import main
from benchmarks.page import tables
from prunus.lab.data.batches import ImageShape
from prunus.lab.models import RESNETS, resnet


@pytest.fixture
def measure(tmp_path):
    """Runs a command, and returns its rows and what the page draws of its record."""

    def run(command, *args):
        results = tmp_path / "results"
        main([*command.split(), *map(str, args), "--results", str(results)])
        (path,) = results.iterdir()
        record = json.loads(path.read_text())
        return record["rows"], tables(results).get(record["what"], "")

    return run


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory):
    """A folder with a tiny Llama and two files of its tokens, calib.u16 and valid.u16."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "stories15M"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    draw = np.random.default_rng(0)
    for name in ("calib", "valid"):
        draw.integers(0, 40, 400).astype("<u2").tofile(folder / f"{name}.u16")
    return folder


@pytest.fixture
def llama(small_llama, tmp_path):
    """Options of a study of a small Llama, which learns from its own samples."""
    names = {"tokens": "calib", "train-tokens": "calib", "held-out-tokens": "valid", "eval-tokens": "valid"}
    files = [part for name, file in names.items() for part in (f"--{name}", str(small_llama / f"{file}.u16"))]
    sizes = ["--batch", "4", "--windows", "4", "--eval-windows", "8", "--length", "8", "--seeds", "0"]
    return ["--model", str(small_llama), *files, *sizes, "--device", "cpu", "--results", str(tmp_path / "results")]


@pytest.fixture
def records(tmp_path):
    """Reads the rows of the one record in the folder ``results``."""

    def read(folder=tmp_path):
        (path,) = (folder / "results").iterdir()
        return json.loads(path.read_text())["rows"]

    return read


@pytest.fixture
def small_shape():
    """That of a random Llama."""
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    return shape | {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def kill_recovery(monkeypatch):
    """Kills the recovery of a number."""

    def kill(which):
        recover, num = study.recover, 0

        def killed(*args, **options):
            nonlocal num
            num += 1
            if num == which:
                raise KeyboardInterrupt
            return recover(*args, **options)

        monkeypatch.setattr(study, "recover", killed)

    return kill


@pytest.fixture
def small_images(tmp_path):
    """Options that name a ResNet-20 with random weights and a few images in the files of CIFAR-10."""
    draw, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = draw.integers(0, 256, (8, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(folder / f"{name}.bin")
    torch.manual_seed(0)
    model = resnet(RESNETS["resnet20"], ImageShape(3, 32, 10))
    torch.save({"state_dict": model.state_dict()}, folder / "resnet.th")
    return ["--model", str(folder / "resnet.th"), "--images", str(folder)]


@pytest.fixture
def write_record(tmp_path):
    def write(what, settings, rows, *, name="a", date="2026-01-01"):
        made = {"machine": "a machine", "python": "3", "versions": {"torch": "2"}, "commit": "abc"}
        record = {"what": what, "date": date, "environment": made, "settings": settings, "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))

    return write


@pytest.fixture
def write_study(write_record):
    """Writes a record of a study: figures (way, level, steps, seed) -> value."""

    def write(what, values, *, model="GPT-51M", metric="perplexity", settings=(), row=lambda values: {}, **options):
        rows = []
        for (way, level, steps, seed), value in values.items():
            one = {"seed": seed, "way": way, "level": level, "steps": steps, "metric": metric, "value": value}
            if steps:
                point = {"kl": 0.1, "loss": 2.0, "accuracy": 0.5}
                one |= {"lr": 1e-3, "tokens": 100, "curve": [point] * 7, "teacher": point}
            rows.append(one | {"seconds": 2.0} | row(one))
        about = {"weights": model, "about": "", "device": "cpu", "samples": 4, "batch": 2, "held_out": 3}
        write_record(what, about | {"unit": "windows", **dict(settings)}, rows, **options)

    return write
