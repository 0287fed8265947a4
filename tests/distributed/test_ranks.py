"""Pruning by real processes: all checks on 2, 3 and 4 ranks that talk by gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent / "launch.py"


@pytest.mark.parametrize(
    ("world", "every"),
    [(2, 14), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 2), (3, 3), (4, 3)])],
)
def test_every_check_holds_on_every_rank(world, every, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = [sys.executable, str(LAUNCH), str(world), str(tmp_path), str(every)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=240, env=environment)
    found = {rank: tmp_path / f"{rank}.json" for rank in range(world)}
    failures = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    told = "\n".join(
        f"rank {rank}, {name}: {text}" for rank, failed in failures.items() for name, text in failed.items()
    )
    assert not told, told
    assert ended.returncode == 0 and len(failures) == world, ended.stderr[-3000:]
