"""Workers of a study go to the GPUs that are visible, and to no other."""

import pytest
import torch

from prunus.cli.study_work import devices_of, environment_of

# CUDA_VISIBLE_DEVICES, GPUs that torch sees, --devices, the workers
CASES = [
    (None, 0, "", ["auto"]),
    (None, 1, "", ["auto"]),
    (None, 2, "", ["0", "1"]),
    ("4,5", 2, "", ["4", "5"]),
    ("4,5", 2, "1", ["5"]),
    ("4,5", 2, "cuda:0,0", ["4", "4"]),
    ("GPU-a,GPU-b", 2, "1", ["GPU-b"]),
    (None, 0, "cpu,cpu", ["cpu", "cpu"]),
    (None, 2, "1,cpu", ["1", "cpu"]),
]


@pytest.fixture
def machine(monkeypatch):
    def make(visible, count):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.mark.parametrize(
    ("visible", "count", "text", "expected"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_a_worker_for_each_device(visible, count, text, expected, machine):
    machine(visible, count)
    assert devices_of(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [("2", "names GPU 2, but the number of visible GPUs is 2"), ("gpu", "takes numbers"), (",", "names no device")],
)
def test_a_device_that_is_not_there_is_refused(text, said, machine):
    machine("4,5", 2)
    with pytest.raises(ValueError, match=said):
        devices_of(text)


def test_a_worker_sees_its_own_gpu_alone(machine):
    machine("4,5", 2)
    assert environment_of("5", 2)["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment_of("cpu", 2)["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_workers_share_the_cores_unless_the_user_says_how_many(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [environment_of("cpu", num_workers)["OMP_NUM_THREADS"] for num_workers in (1, 2, 5, 12, 40)]
    assert threads == ["12", "6", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment_of("cpu", 2)["OMP_NUM_THREADS"] == "7"
