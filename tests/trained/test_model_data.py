"""Samples for trained models: windows of tokens and text, with start tokens where they belong, and what is held out."""

import json

import numpy as np
import pytest
import torch
from families import build, transformers

from prunus.cli import main
from prunus.trained.data import Windows, drawn, spread
from prunus.trained.model import ModelSource, load_trained

WORDS = [f"w{i}" for i in range(60)]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 900))


def write_tokenizer(folder, starts=True):
    """A tokenizer of words, which opens texts with token 1 where it ``starts``."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {word: i for i, word in enumerate(WORDS, 4)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if starts:
        inner.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return np.array([known[word] for word in TEXT.split()])


@pytest.fixture
def folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def source(folder, **options):
    return ModelSource(str(folder / "model"), **{"samples": 5, "length": 12, "eval_windows": 6} | options)


@pytest.mark.parametrize(("starts", "choice", "expected"), [
    (True, "auto", 1), (False, "auto", None), (True, "no", None), (False, "yes", 1), (True, "yes", 1)])  # fmt: skip
def test_text_is_read_by_the_folders_own_tokenizer_with_its_start_token(starts, choice, expected, folder):
    ids = write_tokenizer(folder / "model", starts)
    found = load_trained(source(folder, text=folder / "text.txt", start_token=choice))
    start, edge = [] if expected is None else [expected], len(ids) - len(ids) // 10
    step = 12 - len(start)
    windows = {(*start, *ids[:edge][i * step : (i + 1) * step]) for i in range(edge // step)}
    (batch,) = found.batches
    assert batch.shape == (5, 12) and {tuple(row) for row in batch.tolist()} <= windows
    places = spread(len(ids[edge:]) // step, 6).tolist()
    kept = torch.tensor([[*start, *ids[edge:][i * step : (i + 1) * step]] for i in places])
    with torch.no_grad():
        logits = found.model(kept).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept[:, 1:].flatten())
    assert found.evaluate(found.model) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_text_and_the_same_tokens_come_to_the_same(folder):
    ids = write_tokenizer(folder / "model")
    edge = len(ids) - len(ids) // 10
    for name, kind in (("u16", "<u2"), ("u32", "<u4"), ("npy", None)):
        for part, tokens in (("calib", ids[:edge]), ("valid", ids[edge:])):
            path = folder / f"{part}.{name}"
            np.save(path, tokens) if kind is None else tokens.astype(kind).tofile(path)
        data = {"tokens": folder / f"calib.{name}", "eval_tokens": folder / f"valid.{name}"}
        by_tokens = load_trained(source(folder, **data, start_token="yes"))
        by_text = load_trained(source(folder, text=folder / "text.txt"))
        assert torch.equal(by_tokens.batches[0], by_text.batches[0])
        assert by_tokens.evaluate(by_tokens.model) == by_text.evaluate(by_text.model)


def test_text_goes_through_prune_and_eval_from_the_command_line(folder, capsys):
    write_tokenizer(folder / "model")
    options = ["--text", folder / "text.txt", "--eval-text", folder / "text.txt"]
    options += [
        "--out",
        folder / "out",
        *"--samples 4 --length 12 --eval-windows 6 --score magnitude --no-repair".split(),
    ]
    main([str(arg) for arg in ["prune", folder / "model", *options]])
    row = json.loads((folder / "out" / "result.json").read_text())["rows"]["magnitude"]
    capsys.readouterr()
    options = ["--text", folder / "text.txt", "--length", 12, "--eval-windows", 6]
    main([str(arg) for arg in ["eval", folder / "out", *options]])
    assert f"perplexity {row['perplexity']:.3f}, " in capsys.readouterr().out


def test_a_folder_of_texts_goes_through_prune_and_eval_and_its_note_is_printed_once(folder, capsys):
    write_tokenizer(folder / "model")
    words = TEXT.split()
    (folder / "texts").mkdir()
    for part in range(3):
        (folder / "texts" / f"{part}.txt").write_text(" ".join(words[part * 300 : part * 300 + 300]))
    (folder / "joined.txt").write_text(" </s> ".join(" ".join(words[i : i + 300]) for i in (0, 300, 600)))
    (folder / "texts" / "binary").write_bytes(bytes(9))
    lines = []
    for name in ("texts", "joined.txt"):
        options = "--samples 4 --length 12 --score magnitude --no-repair".split()
        out = folder / f"from {name}"
        main([str(arg) for arg in ["prune", folder / "model", "--text", folder / name, "--out", out, *options]])
        pruned = capsys.readouterr().out
        main([str(arg) for arg in ["eval", out, "--text", folder / name, "--length", 12]])
        evaluated = capsys.readouterr().out
        assert [out.count("1 of 4 files are left out") for out in (pruned, evaluated)] == [name == "texts"] * 2
        lines.append(evaluated.splitlines()[-1].partition(": ")[2])
    assert lines[0] == lines[1] and "perplexity" in lines[0]


def test_a_text_without_a_tokenizer_or_without_letters_is_one_line(folder, capsys):
    def refused(*args):
        with pytest.raises(SystemExit):
            main([str(arg) for arg in args])
        return capsys.readouterr().err.strip().splitlines()[-1]

    prune = ["prune", folder / "model", "--out", folder / "out"]
    assert "has no tokenizer" in refused(*prune, "--text", folder / "text.txt")
    assert "not a file of uint16 tokens" in refused(*prune, "--tokens", folder / "text.txt")
    write_tokenizer(folder / "model")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in refused(*prune, "--text", folder / "bytes.txt")
    assert "nowhere.txt" in refused(*prune, "--text", folder / "nowhere.txt")
    (folder / "none").mkdir()
    assert "none holds no text" in refused(*prune, "--text", folder / "text.txt", "--eval-text", folder / "none")
    assert "none holds no text" in refused("eval", folder / "model", "--text", folder / "none")
    np.arange(600, dtype="<u4").tofile(folder / "wide.u16")
    assert "looks like uint32" in refused(*prune, "--tokens", folder / "wide.u16")
    assert "looks like uint32" in refused("eval", folder / "model", "--tokens", folder / "wide.u16")
    assert not (folder / "out").exists()


def test_vocabularies_over_65536_are_pruned(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=70_000, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokens = np.random.default_rng(0).integers(0, 70_000, 300)
    tokens.astype("<u4").tofile(tmp_path / "data.u32")
    tokens.astype("<u4").tofile(tmp_path / "data.bin")
    options = "--samples 4 --length 12 --eval-windows 2 --score magnitude --no-repair".split()
    for name, more in (("data.u32", []), ("data.bin", ["--token-type", "uint32"])):
        args = ["prune", tmp_path / "model", "--tokens", tmp_path / name, *more, *options]
        main([str(arg) for arg in [*args, "--out", tmp_path / f"from {name}"]])
    rows = [
        json.loads((tmp_path / f"from {name}" / "result.json").read_text())["rows"] for name in ("data.u32", "data.bin")
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("start", [[], [7]])
def test_windows_open_with_the_start_tokens_and_go_on_with_the_file(start):
    ids = np.arange(100, 200)
    samples = Windows(ids, 8, start)
    windows = samples.at(spread(len(samples), 0))
    num, step = 100 // (8 - len(start)), 8 - len(start)
    assert windows[:, len(start) :].flatten().tolist() == ids[: num * step].tolist()
    assert windows[:, : len(start)].tolist() == [start] * num
    chosen = drawn(samples, 4, 0)
    assert chosen.shape == (4, 8) and len({tuple(row) for row in chosen.tolist()}) == 4
    assert len(set(chosen[:, len(start) :].flatten().tolist())) == 4 * (8 - len(start))


@pytest.mark.parametrize("total", [1, 2, 7, 100, 1001])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 33, 2000])
def test_fewer_samples_are_spread_evenly(total, limit):
    places = spread(total, limit).tolist()
    assert len(places) == min(total, limit or total) and len(set(places)) == len(places)
    edges = [i * total / len(places) for i in range(len(places) + 1)]  # one lies in each of so many equal parts
    assert all(low - 1 < place < high for low, place, high in zip(edges[:-1], places, edges[1:], strict=True))
