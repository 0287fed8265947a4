"""One thread a worker, a fixed seed and a clean process for every test, a skip where a test needs a GPU."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from machines import MACHINES
from small_gpt import fewer_weights
from torch.nn.modules import module
from torch.optim import optimizer

from prunus.ops import bits, lazy
from prunus.owners import check_owner

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run in the interpreter; read when triton is first imported
    torch.manual_seed = torch.default_generator.manual_seed  # torch's own writes down the stack for devices to come
    if find_spec("triton"):
        from interpreter import hasten

        hasten()

QUICK_CASES = 5  # of a test

settings.register_profile("prunus", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("torture", deadline=None, max_examples=5000)
settings.load_profile("prunus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of a file, in an order drawn by SEED")
    parser.addoption("--machine", choices=MACHINES, help="run the tests with the arithmetic of another kind of machine")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start must round as this one does


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_most_cases_slow(items)
    if (seed := config.getoption("--shuffle")) is not None:
        draw = random.Random(seed)
        order = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (order[item.path], draw.random()))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _mark_most_cases_slow(items: list[pytest.Item]) -> None:
    """Of a test with many quick cases a few that are spread evenly stay quick; make check-slow runs the others."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        quick = {round(i * (len(found) - 1) / (QUICK_CASES - 1)) for i in range(QUICK_CASES)}
        for number, item in enumerate(found):
            if len(found) > QUICK_CASES and number not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain at the exit about what they cannot free


@pytest.fixture(autouse=True, scope="session")
def _machine(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.config.getoption("--machine")
    with MACHINES[name]() if name else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    gc.collect()
    gc.freeze()  # collections, of which some tests make many, need not walk what the imports have made


def _shared() -> dict[str, object]:
    """What a test can change of its process that later tests would notice."""
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "is_grad_enabled": torch.is_grad_enabled(),
        "has_process_group": torch.distributed.is_initialized(),
        "optimizer_hooks": [  # but the one that the first pruner makes
            *(number for number, hook in optimizer._global_optimizer_pre_hooks.items() if hook is not check_owner),
            *optimizer._global_optimizer_post_hooks,
        ],
        "module_hooks": [*module._global_forward_hooks, *module._global_forward_pre_hooks],
        "folder": Path.cwd(),
    }


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Every test begins with the same seed, and leaves its process as it found it."""
    torch.manual_seed(0)
    before, environment, has_onednn = _shared(), dict(os.environ), torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(has_onednn)  # torch switches it off where it cannot multiply bfloat16
    if _shared() != before:
        gc.collect()  # a pruner that waits for its event has global hooks until it is freed
    assert _shared() == before, "the test changed what others share"
    after = dict(os.environ)
    for name in (environment.keys() | after.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in environment:
            del os.environ[name]  # which a library has set
        elif after.get(name) != environment[name]:
            os.environ[name] = environment[name]


@pytest.fixture
def few_weights() -> Iterator[None]:
    """The smallest GPT has a thirtieth of its weights."""
    with fewer_weights():
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on 64 elements at a time, so that a small tensor is many pieces."""
    monkeypatch.setattr(bits, "CHUNK", 64)
    monkeypatch.setattr(lazy, "CHUNK", 64)
