"""Two processes started by ``accelerate launch`` end with the same masks, interrupted or not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ddp_training.py")


@pytest.mark.slow
def test_two_ranks_under_the_trainer_agree_and_resume_to_the_same_bits(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run([*launch, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["whole"] == first["resumed"]
    assert first["wrapper"] == "DistributedDataParallel" and first["whole"]["sparsity"] == 0.5
    assert not any("module" in name for name in first["whole"]["names"])
