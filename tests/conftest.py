"""One thread a worker, the same seed before every test, and a skip where a test needs a GPU."""

import os

import pytest
import torch
from hypothesis import settings

from prunus.ops import bits, lazy

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in the interpreter; read when triton is first imported

settings.register_profile("prunus", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("prunus")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start must round as this one does


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on 64 elements at a time, so that a small tensor is many pieces."""
    monkeypatch.setattr(bits, "PIECE", 64)
    monkeypatch.setattr(lazy, "PIECE", 64)
