"""The study of programs: every arm from real folders, stopped and continued; the text that it learns from."""

import numpy as np
import pytest
from causal_models import causal_model
from chat_models import chat_tokenizer, save, write_problems

from benchmarks.__main__ import main

pytest.importorskip("accelerate")


@pytest.fixture
def chat_model(tmp_path):
    """A folder with a tiny random Llama that can be asked, two problems, and tokens."""
    model = causal_model(vocab_size=257, max_position_embeddings=512, eos_token_id=0)
    save(model, tmp_path / "model")
    chat_tokenizer(tmp_path / "model")
    write_problems(tmp_path / "problems.jsonl", 2)
    draw = np.random.default_rng(0)
    for name in ("learn", "choose", "python", "prose"):
        draw.integers(1, 257, 800).astype("<u4").tofile(tmp_path / f"{name}.u32")
    return tmp_path


@pytest.fixture
def study(chat_model):
    names = {"tokens": "learn", "train-tokens": "learn", "held-out-tokens": "choose", "eval-tokens": "python"}
    files = [
        part
        for name, file in (names | {"prose-tokens": "prose"}).items()
        for part in (f"--{name}", str(chat_model / f"{file}.u32"))
    ]
    sizes = ["--length", "16", "--windows", "4", "--eval-windows", "4", "--steps", "2", "--batch", "2", "--lr", "1e-3"]
    sizes += ["--max-new-tokens", "8", "--speed-tokens", "10", "--dtype", "float32"]
    places = {"model": "model", "work": "work", "problems": "problems.jsonl", "results": "results"}
    places = [part for name, file in places.items() for part in (f"--{name}", str(chat_model / file))]
    return ["programs-study", *places, *files, *sizes]


def test_every_arm(study, records, capsys):
    main([*study, "--run-code"])
    rows = records()
    print(capsys.readouterr().out)
    for row in rows:
        print({k: v for k, v in row.items() if k != "answers"})
    assert 0
