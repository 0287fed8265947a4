"""The memory of ``prunus prune`` on a folder does not grow with its number of blocks."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4}
BLOCK = 4 * (4 * 256 * 256 + 3 * 256 * 768)  # bytes
GROWTH = 0.4  # of the bytes of the blocks that are added; masks and what was not zero before take two bits a weight
PEAK = """
import sys
import torch
from prunus.cli import main
torch.set_num_threads(1)
main(sys.argv[1:])
print(open("/proc/self/status").read())
"""


def folder_of(tmp_path, num_blocks):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=num_blocks, max_position_embeddings=64, **SIZE)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="10MB")
    np.random.default_rng(0).integers(0, 64, 2000).astype("<u2").tofile(tmp_path / "tokens.u16")
    return tmp_path / "model"


def peak_of(tmp_path, num_blocks, options):
    """The most memory that the command had, in bytes."""
    home = tmp_path / str(num_blocks)
    home.mkdir()
    folder, tokens = folder_of(home, num_blocks), home / "tokens.u16"
    data = f"--tokens {tokens} --eval-tokens {tokens} --samples 4 --length 16 --eval-windows 4 --out {home / 'out'}"
    command = [sys.executable, "-c", PEAK, "prune", str(folder), *data.split(), *options]
    # tensors lie apart from the heap, whose holes differ from run to run by more than a few blocks take
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    [size] = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    return 1024 * int(size)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--no-repair", "--score", "magnitude"], ["--bits", "4"]], ids=" ".join)
def test_memory_grows_by_a_fraction_of_the_blocks_that_are_added(tmp_path, options):
    less, more = 4, 32
    peaks = {num: peak_of(tmp_path, num, options) for num in (less, more)}
    growth = (peaks[more] - peaks[less]) / ((more - less) * BLOCK)
    assert growth < GROWTH, (peaks, growth)
