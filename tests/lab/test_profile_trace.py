"""Traces are split without gaps: time by the part entered last, device time by who launched it, memory by moment."""

from itertools import pairwise

import pytest
import torch

from prunus.lab.profile.trace import PREFIX, allocated, on_device, on_host, part, stretches, traced


def span(name, start, end, thread=1):
    entry = {"cat": "user_annotation", "name": PREFIX + name, "ts": float(start), "dur": float(end - start)}
    return entry | {"tid": thread, "ph": "X"}


def launch(at, correlation, cat="cuda_runtime"):
    return {"cat": cat, "name": "cudaLaunchKernel", "ts": float(at), "dur": 1.0, "args": {"correlation": correlation}}


def kernel(start, end, correlation, cat="kernel"):
    args = {"correlation": correlation} if correlation is not None else {}
    return {"cat": cat, "name": "k", "ts": float(start), "dur": float(end - start), "args": args}


STEP = [
    span("other", 0, 1000),
    span("forward", 100, 300),
    span("backward", 300, 700),
    span("masking", 350, 400, thread=2),
    span("masking", 500, 510, thread=2),
    span("optimizer", 700, 900),
    {"cat": "user_annotation", "name": "not ours", "ts": 0.0, "dur": 5000.0},
    {"cat": "cpu_op", "name": "aten::mm", "ts": 120.0, "dur": 50.0},
]


def test_host_time_belongs_to_the_part_entered_last_and_adds_up():
    found = on_host(STEP)
    expected = {"other": 200, "forward": 200, "backward": 340, "masking": 60, "optimizer": 200}
    assert found == pytest.approx({name: us / 1e6 for name, us in expected.items()})
    assert sum(found.values()) == pytest.approx(1000 / 1e6)


def test_stretches_leave_no_gap_and_do_not_overlap():
    found = stretches(STEP)
    assert found[0].start == 0 and found[-1].end == 1000
    assert all(a.end == b.start for a, b in pairwise(found))


def test_the_device_works_for_who_launched_it_however_late():
    work = [
        *(launch(120, 1), kernel(150, 350, 1)),
        *(launch(360, 2, "cuda_driver"), kernel(350, 450, 2)),  # launched while masking
        *(launch(600, 3), kernel(650, 950, 3)),  # of the backward pass, though it runs in the optimizer's time
        *(launch(710, 4), kernel(900, 980, 4, "gpu_memset")),  # overlaps
        kernel(990, 2000, None, "gpu_memcpy"),  # no launch is known, and it ends after the window
    ]
    found = on_device(STEP + work)
    expected = {"forward": 200, "masking": 100, "backward": 300, "optimizer": 30, "other": 10, "idle": 360}
    assert found == pytest.approx({name: us / 1e6 for name, us in expected.items()})
    assert sum(found.values()) == pytest.approx(1000 / 1e6)


def test_a_trace_without_device_work_says_so():
    assert on_device(STEP) is None and on_device([]) is None
    assert on_host([]) == {} and allocated([]) == []


def test_memory_is_told_by_part_and_in_order():
    def memory(at, total, device=0):
        return {"name": "[memory]", "ts": at, "args": {"Total Allocated": total, "Device Type": device, "Bytes": 1}}

    found = allocated([*STEP, memory(720.0, 50), memory(120.0, 70), memory(130.0, 999, device=1)])
    assert found == [("forward", 120.0, 70), ("optimizer", 720.0, 50)]


def test_a_real_trace_is_split_and_its_memory_seen():
    with traced(torch.device("cpu"), memory=True) as trace:
        with part("first"):
            kept = torch.ones(1000, 1000)
            with part("inside"):
                kept @ kept
        with part("second"):
            kept = kept + 1
    seconds = on_host(trace)
    assert {"first", "inside", "second", "other"} <= set(seconds)
    assert seconds["inside"] > 0 and sum(seconds.values()) >= seconds["inside"]
    peaks = {name: size for name, _, size in sorted(allocated(trace), key=lambda row: row[2])}
    assert peaks["inside"] >= 8_000_000 and peaks["second"] >= 8_000_000
