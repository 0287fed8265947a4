"""lm-evaluation-harness runs pruned, shrunk and recovered folders as they are, and measures what is in them."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from causal_models import causal_model
from chat_models import chat_tokenizer, save

from prunus.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs pip install lm-eval"),
]
TASK = """
task: own
dataset_path: json
dataset_kwargs:
  data_files: {test: TEXTS}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
"""
TEXTS = ["the cat sat on the mat", "a dog did not", "and the end"]


@pytest.fixture
def folder(tmp_path):
    save(causal_model(vocab_size=257, eos_token_id=0, bos_token_id=0, intermediate_size=32), tmp_path / "dense")
    chat_tokenizer(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("the cat and the dog sat on the mat and did not end. " * 80)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "tasks" / "own.yaml").write_text(TASK.replace("TEXTS", str(tmp_path / "texts.jsonl")))
    return tmp_path


def made(name, folder):
    options = ["--text", folder / "text.txt", "--length", "16", "--eval-windows", "8", "--out", folder / "out"]
    if name == "recovered":
        made("pruned", folder)
        (folder / "out").rename(folder / "pruned")
        how = ["recover", folder / "pruned", "--teacher", folder / "dense", "--budget", "600", "--lr", "0.001"]
    else:
        sizes = {"pruned": ["--sparsity", "0.5"], "shrunk": ["--neurons", "0.5"]}[name]
        how = ["prune" if name == "pruned" else "shrink", folder / "dense", "--samples", "8", *sizes]
    main([str(part) for part in (*how, *options)])
    return folder / "out"


@pytest.mark.parametrize("name", ["pruned", "shrunk", "recovered"])
def test_a_folder_runs_as_it_is(name, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = made(name, folder)
    call = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={out}", "--tasks", "own"]
    call += ["--include_path", folder / "tasks", "--device", "cpu", "--output_path", folder / "results"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run([str(part) for part in call], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (json.loads(path.read_text())["results"]["own"] for path in folder.glob("results/**/results_*.json"))

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    nats = 0.0
    for text in TEXTS:
        ids = torch.tensor([[0, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    wanted = math.exp(nats / sum(len(text.encode()) for text in TEXTS))
    assert results["byte_perplexity,none"] == pytest.approx(wanted, rel=1e-4)
