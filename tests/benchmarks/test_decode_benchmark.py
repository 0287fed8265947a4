"""The benchmark of decoding runs each way at its batch sizes, keeps what it measured, and compares the ways."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decode


def row(way, batch, tokens_s, zeros="none"):
    return {"way": way, "zeros": zeros, "batch": batch, "tokens_s": tokens_s, "times_faster": 1.0}


@pytest.fixture
def command(monkeypatch, tmp_path):
    model = SimpleNamespace(requires_grad_=lambda flag: None, generation_config=SimpleNamespace())
    monkeypatch.setattr(decode, "random_llama", lambda *_: (model, torch.zeros(4, 1)))
    monkeypatch.setattr(decode, "pruned_model", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(decode.Decode, "_rows", lambda self, models, way, ids: [row(way, len(ids), 2.0)])
    ways = ("decoder", "compiled", "generate", "static")
    return decode.Decode(device="cpu", ways=ways, zeros=("50%", "80%"), batches=(1, 4), results=tmp_path)


def test_model_generate_is_run_at_its_own_batch_sizes(command):
    _, _, rows = command.measure()
    assert [(row["way"], row["batch"]) for row in rows] == [
        *((way, 1) for way in decode.WAYS.values()),
        ("generate, static cache", 1),  # once with each sparse model
        ("decoder", 4),
        ("decoder, compiled", 4),
    ]


def test_a_run_that_ends_early_keeps_its_rows(command, monkeypatch, capsys):
    def rows(self, models, way, ids):
        if way == "generate":
            raise KeyboardInterrupt
        return [row(way, len(ids), 2.0)]

    monkeypatch.setattr(decode.Decode, "_rows", rows)
    with pytest.raises(KeyboardInterrupt):
        command.measure()
    (path,) = command.results.glob("*.json")
    assert [row["way"] for row in json.loads(path.read_text())["rows"]] == ["decoder", "decoder, compiled"]
    assert "decoder, compiled, zeros none, batch 1: 2 tokens/s" in capsys.readouterr().out


def test_the_page_sets_our_dense_decoder_beside_a_static_cache():
    rows = [row("decoder", 1, 130.0), row("decoder, compiled", 1, 220.0), row("generate, static cache", 1, 100.0)]
    rows += [row("decoder", 4, 5.0), row("generate, static cache", 4, 1.0, "80%"), row("decoder", 1, 9.0, "80%")]
    beside = [decode.beside_static(each, {"rows": rows}).get("times_static") for each in rows]
    assert beside == [1.3, 2.2, None, None, None, None]
