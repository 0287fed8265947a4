"""One real study of a tiny GPT, made once a worker: to read, or to change a copy of it."""

import shutil
from pathlib import Path

import pytest
import torch
from small_gpt import fewer_weights
from study_command import ASKED, BASE, study
from unbroken_run import OPTIONS

from prunus.cli import main


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A file of settings, with text beside it to train on."""
    folder = tmp_path_factory.mktemp("base")
    letters = torch.randint(32, 127, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_bytes(bytes(letters))
    (folder / "run.toml").write_text(BASE.format(data=folder / "text.txt"))
    return folder / "run.toml"


@pytest.fixture(scope="session")
def done(base, tmp_path_factory) -> Path:
    """The folder of a finished study, which no test may change."""
    out = tmp_path_factory.mktemp("done") / "study"
    with fewer_weights():
        assert study(base, out, *ASKED) == 0
    return out


@pytest.fixture
def copy(done, few_weights, tmp_path) -> Path:
    """The same, for one test to change."""
    return Path(shutil.copytree(done, tmp_path / "study"))


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """A file of random text."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(bytes(torch.randint(32, 127, (8000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@pytest.fixture(scope="session")
def unbroken(letters, tmp_path_factory) -> Path:
    """The folder of a run that was never interrupted, which no test may change."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    with fewer_weights():
        main(["train", *OPTIONS, "--data", str(letters), "--out", str(out)])
    return out


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """A file of text that a small run reads."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return str(path)
