"""A command of the benchmarks that runs at a small size, and a model for it."""

import json

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.page import tables


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
def small_shape():
    """That of a random Llama."""
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}
    return shape | {"num_attention_heads": 4, "num_key_value_heads": 2}
