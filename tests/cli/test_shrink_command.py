"""``prunus shrink``: the folder it writes, what it prints and refuses, and flags that moved."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_prune_command import MINE, refused, run

from prunus.cli.console import Terminal
from prunus.cli.shrink_work import _layers
from prunus.oneshot.shrink_result import ShrunkLayer

FAST = "--samples 16 --length 12 --eval-windows 6".split()
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}


def quick_speed(patch):
    patch.setattr("prunus.trained.speed.SECONDS", 0.0)
    patch.setattr("prunus.trained.speed.ROUNDS", 1)


@pytest.fixture(autouse=True)
def _quick_speed(monkeypatch):
    quick_speed(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny Llama with a tokenizer and a generation config, and text of its words."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("shrink")
    words = [f"w{i}" for i in range(38)]
    vocab = {word: i for i, word in enumerate(["<unk>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    tokens.save_pretrained(folder / "dense")
    torch.manual_seed(0)
    options = {"num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.3}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(folder / "dense")
    (folder / "dense" / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    draw = np.random.default_rng(0)
    (folder / "corpus.txt").write_text("\n".join(" ".join(draw.choice(words, 12)) for _ in range(80)))
    return folder


def shrink(made, out, *options):
    run("shrink", made / "dense", "--text", made / "corpus.txt", *FAST, "--out", out, *options)
    return result_of(out)


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def shrunk(made, tmp_path_factory):
    """The folder at half its size, and what was printed."""
    out = tmp_path_factory.mktemp("shrunk") / "out"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        quick_speed(patch)
        shrink(made, out, "--size", "0.5")
    return out, said.getvalue()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def assert_complete(folder, numbers):
    """A folder that transformers reads, with the small files of the dense one, and the numbers that were wanted."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    result = result_of(folder)
    assert numbers.items() <= config_of(folder).items()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == result["sizes"]["after"]["parameters"]
    assert len(AutoTokenizer.from_pretrained(folder)) == 40
    assert GenerationConfig.from_pretrained(folder).temperature == 0.7
    before, after = result["sizes"]["before"], result["sizes"]["after"]
    assert all(after[key] < before[key] for key in ("weights", "parameters", "num_bytes"))
    assert set(result["speed"]["per_second"]) == {"dense", "shrunk"}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_folder_is_complete_and_at_most_as_large_as_was_asked_for(shrunk):
    out, said = shrunk
    assert_complete(out, {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 4})
    result = result_of(out)
    before, after = result["sizes"]["before"], result["sizes"]["after"]
    assert 0.4 * before["weights"] < after["weights"] <= 0.5 * before["weights"]
    assert f"{after['parameters']:,}" in said and "tokens a second" in said and "Removed: " in said
    assert list(result["rows"]) == ["dense", "solved"] and result["rows"]["solved"]["sparsity"] == 0.0


def test_zeros_of_a_model_that_was_pruned_are_counted_and_stay(made, shrunk, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    assert "were zero before" not in shrunk[1]
    zeros = shutil.copytree(made / "dense", tmp_path / "zeros")
    model = AutoModelForCausalLM.from_pretrained(zeros)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[::2] = 0
    model.save_pretrained(zeros)
    run("shrink", zeros, "--text", made / "corpus.txt", *FAST, "--heads", "1", "--out", tmp_path / "out")
    said = capsys.readouterr().out
    assert "as it came" in said and "of the weights were zero before; they are zero still" in said
    smaller = tensors_of(tmp_path / "out")
    for number in range(SIZES["num_hidden_layers"]):
        kept = smaller[f"model.layers.{number}.self_attn.o_proj.weight"]  # solved anew
        assert not kept[::2].any() and kept[1::2].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--neurons", "0.25", "--heads", "1"], {"intermediate_size": 18, "num_key_value_heads": 1, "head_dim": 4}),
        (["--layers", "1"], {"num_hidden_layers": 2, "intermediate_size": 24}),
        (["--neurons", "9", "--multiple", "4"], {"intermediate_size": 12, "num_attention_heads": 4}),
    ],
    ids=" ".join,
)
def test_fractions_and_numbers_say_what_goes(made, options, numbers, tmp_path, capsys):
    result, said = shrink(made, tmp_path / "out", *options), capsys.readouterr().out
    assert " 0.00 GiB" not in said  # of memory that nobody measured
    assert ("dropped" in result) == ("--layers" in options) == ("Layers removed: model.layers." in said)
    assert all(name in said for name in result.get("dropped", []))
    assert_complete(tmp_path / "out", numbers)


def test_the_card_has_the_command_the_sizes_and_the_figures_and_keeps_the_source(made, shrunk):
    out, result = shrunk[0], result_of(shrunk[0])
    card = (out / "README.md").read_text()
    assert (
        "prunus shrink dense --out out --text corpus.txt --length 12 --eval-windows 6 --size 0.5 --samples 16" in card
    )
    assert f"| weights of the blocks | {result['sizes']['before']['weights']:,} |" in card
    assert all(f"{row['parameters']:,} | {row['perplexity']:.4f} |" in card for row in result["rows"].values())
    assert "- shrunk" in card and "- sparse" not in card and "license: mit" in card
    assert (out / "SOURCE_README.md").is_file() and str(made) not in card


def test_other_commands_read_the_folder(made, shrunk, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(shrunk[0], out)
    run("eval", out, "--text", made / "corpus.txt", "--length", 12, "--eval-windows", 0)
    assert "perplexity" in capsys.readouterr().out
    run("report", out)
    page, rows = (out / "report.html").read_text(), result_of(out)["rows"]
    assert "parameters stay" in page and all(f"{row['parameters']:,}</data>" in page for row in rows.values())
    assert "sparsity" not in page.partition("<table")[2].partition("</table>")[0]  # of a model without zeros
    run("doctor", out)
    said = capsys.readouterr().out
    num = result_of(out)["sizes"]["after"]["weights"]
    assert f"of {num:,} prunable weights" in said and "left dense" not in said and "healthy" in said
    run("export", out, "--out", tmp_path / "small", "--check")
    assert "loaded as LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.slow
def test_every_layer_is_shown_on_request(made, shrunk, tmp_path, capsys):
    names = {f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("mlp.down_proj", "self_attn.o_proj")}
    shrink(made, tmp_path / "all", "--size", "0.5", "--every-layer")
    every = capsys.readouterr().out
    assert sum(name in shrunk[1] for name in names) == 5 and all(name in every for name in names)
    assert "--every-layer shows all" in shrunk[1] and "--every-layer" not in every


@pytest.mark.slow
def test_tuning_and_recovery_have_rows_of_their_own(made, tmp_path, capsys):
    result = shrink(made, tmp_path / "out", "--size", "0.6", "--tune", "--recover", "400")
    assert list(result["rows"]) == ["dense", "solved", "tuned", "recovered"]
    assert result["recovery"]["after"]["kl"] <= result["recovery"]["before"]["kl"]
    assert result["rows"]["recovered"]["parameters"] == result["sizes"]["after"]["parameters"]
    assert "recovered" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_measured_split_says_what_was_tried(made, tmp_path, capsys):
    result = shrink(made, tmp_path / "out", "--size", "0.6", "--split", "measured", "--tune")
    best = min(result["mixtures"], key=lambda one: one["distance"])
    assert config_of(tmp_path / "out")["num_hidden_layers"] == 3 - best["layers"]
    assert "with 0 layers removed" in capsys.readouterr().out and len(result["mixtures"]) > 1


@pytest.mark.slow
def test_offloaded_it_comes_to_the_same_but_for_the_speed(made, tmp_path):
    options = ["--size", "0.7"]
    kept, moved = shrink(made, tmp_path / "kept", *options), shrink(made, tmp_path / "moved", *options, "--offload")
    assert kept["rows"] == moved["rows"] and kept["layers"] == moved["layers"] and "speed" not in moved
    first, second = tensors_of(tmp_path / "kept"), tensors_of(tmp_path / "moved")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_killed_when_only_its_own_folder_was_left_to_remove_the_same_command_removes_it(made, shrunk, tmp_path, capsys):
    shutil.copytree(shrunk[0], tmp_path / "out")
    (tmp_path / ".out.unfinished").mkdir()
    shrink(made, tmp_path / "out", "--size", "0.5")
    assert "out: already written" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_interrupted_it_goes_on_from_what_is_done_and_writes_the_same(made, shrunk, tmp_path, monkeypatch):
    from prunus.oneshot.journal import Journal

    save, saved = Journal.save, []

    def stops(self, file, names, content):
        save(self, file, names, content)
        saved.append(file)
        if len(saved) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", stops)
        with pytest.raises(SystemExit):
            shrink(made, tmp_path / "out", "--size", "0.5")
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    monkeypatch.setattr(Journal, "save", lambda self, file, *_: saved.append(file))
    again, whole = shrink(made, tmp_path / "out", "--size", "0.5"), shrunk[0]
    assert again["rows"] == result_of(whole)["rows"] and len(saved) == len(set(saved)) and len(saved) > 3
    first, second = tensors_of(whole), tensors_of(tmp_path / "out")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--size 0.7, or what to remove: --neurons, --heads, --layers or --experts"),
        (["--size", "1.5"], "above 0 and below 1"),
        (["--size", "0.7", "--neurons", "0.5"], "either size, or neurons and heads"),
        (["--size", "0.001"], "leaves no neuron"),
        (["--neurons", "24"], "so that at least one stays"),
        (["--neurons", "many"], "--neurons takes a number"),
        (["--neurons", "12", "--multiple", "16"], "12 of 24 neurons would stay, fewer than multiple=16"),
        (["--heads", "2"], "so that at least one stays"),
        (["--layers", "3"], "so that at least one stays"),
        (["--layers", "-1"], "at least 1, or a fraction"),
        (["--neurons", "0.01"], "is less than one; give a larger fraction"),
        (["--experts", "0.5"], "no experts"),
        (["--size", "0.7", "--multiple", "0"], "at least 1"),
        (["--layers", "1", "--multiple", "4"], "nothing reads --multiple"),
        (["--layers", "1", "--split", "measured"], "give --size and leave off --layers"),
        (["--size", "0.7", "--samples", "0"], "at least 1"),
        (["--size", "0.7", "--length", "-3"], "--length must be at least 0"),
        (["--size", "0.7", "--private"], "without --push"),
        (["--size", "0.7", "--device", "nowhere"], "nowhere"),
        (["--size", "0.7", "--out", __file__], "is there already"),
        (["--size", "0.7", "--recover", "0"], "a budget is a number"),
        (["--size", "0.7", "--recover", "400", "--offload"], "leave off --offload"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(made, options, said, tmp_path, capsys):
    command = ["shrink", made / "dense", "--text", made / "corpus.txt", *FAST, "--out", tmp_path / "out", *options]
    line = refused(capsys, *command)
    assert said in line and line.startswith("prunus shrink: ")
    assert list(tmp_path.iterdir()) == []


def test_too_little_text_is_one_line_that_says_what_to_give(made, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    data = ["--text", tmp_path / "short.txt", "--size", "0.7"]
    line = refused(capsys, "shrink", made / "dense", *data, "--out", tmp_path / "out")
    assert "give more text, or a smaller --length" in line
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_quantised_folder_is_refused_with_what_to_give(made, tmp_path, capsys):
    shutil.copytree(made / "dense", tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    data = ["--text", made / "corpus.txt", *FAST, "--size", "0.7"]
    line = refused(capsys, "shrink", tmp_path / "packed", *data, "--out", tmp_path / "out")
    assert "it is quantised; take the unquantised model" in line
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.usefixtures("few_weights")
def test_a_checkpoint_of_train_is_refused_with_what_to_do(tmp_path, capsys):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    train = "--model gpt2-tiny --context 8 --batch 2 --steps 4 --every 2 --eval-size 3 --warmup 1 --data".split()
    run("train", *train, tmp_path / "data.txt", "--out", tmp_path / "run")
    line = refused(capsys, "shrink", tmp_path / "run", "--size", "0.7", "--out", tmp_path / "out")
    assert "shrink the model in Python" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("prune MODEL --experts 0.5", "prunus shrink MODEL --experts 0.5 --out SMALLER, then prunus prune SMALLER"),
        ("prune MODEL --experts=0.25 --out x", "--experts 0.25"),
        ("prune MODEL --layers --out x", "write --every-layer"),
        ("eval MODEL --layers", "write --every-layer"),
    ],
)
def test_a_flag_that_moved_is_answered_with_what_to_write(command, said, capsys):
    line = refused(capsys, *command.split())
    assert said in line and "not an option any more" in line


def test_a_function_of_a_users_own_gives_model_and_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_shrunk.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run(*"shrink mine_shrunk:subject --neurons 0.25 --out out".split())
    said = capsys.readouterr().out
    assert tensors_of(tmp_path / "out")["2.weight"].shape == (3, 6)
    assert "samples a second" in said and "before load_state_dict" in said


@pytest.mark.slow
def test_images_are_counted_in_images(tmp_path, capsys):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(image_size=8, patch_size=4, num_labels=5, num_channels=1, **sizes)
    ViTForImageClassification(config).save_pretrained(tmp_path / "dense")
    images = np.random.default_rng(0).normal(size=(64, 1, 8, 8)).astype("float32")
    np.savez(tmp_path / "data.npz", pixel_values=images, labels=np.arange(64) % 5)
    data = ("--batches", tmp_path / "data.npz", "--samples", 32, "--neurons", 0.25)
    run("shrink", tmp_path / "dense", *data, "--out", tmp_path / "out")
    assert "images a second" in capsys.readouterr().out and config_of(tmp_path / "out")["intermediate_size"] == 18


@pytest.mark.slow
def test_experts_go_and_the_rest_is_pruned_by_the_next_command(tmp_path, capsys):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "dense")
    np.random.default_rng(0).integers(0, 40, 800).astype("<u2").tofile(tmp_path / "tokens.u16")
    data = ("--tokens", tmp_path / "tokens.u16", *FAST)
    run("shrink", tmp_path / "dense", *data, "--experts", 0.25, "--out", tmp_path / "smaller")
    result = json.loads((tmp_path / "smaller" / "result.json").read_text())
    assert config_of(tmp_path / "smaller")["num_local_experts"] == 3 and "removed experts" in capsys.readouterr().out
    assert list(result["rows"]) == ["dense", "shrunk"] and len(result["experts"]) == 3
    run("prune", tmp_path / "smaller", *data, "--out", tmp_path / "pruned")
    both = json.loads((tmp_path / "pruned" / "result.json").read_text())
    assert both["rows"]["repaired"]["sparsity"] == pytest.approx(0.5, abs=1e-3) and "sizes" not in both


@pytest.mark.slow
def test_a_shrunk_folder_recovers_and_its_card_still_says_what_was_removed(made, shrunk, tmp_path):
    data = ("--text", made / "corpus.txt", "--budget", 400, "--length", 12, "--batch", 4, "--eval-windows", 6)
    run("recover", shrunk[0], "--teacher", made / "dense", *data, "--out", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 of 2 head groups" in card and "- recovery: " in card and "| parameters |" in card
    assert "| model | perplexity |" in card  # the rows of a recovery have no sparsity
    assert config_of(tmp_path / "out")["num_key_value_heads"] == 1


PLAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "prunus":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
ids = AutoTokenizer.from_pretrained(sys.argv[1])("w1 w2 w3 w4", return_tensors="pt").input_ids
text = model.generate(ids, max_new_tokens=4, do_sample=False)
assert text.shape == (1, 8) and "prunus" not in sys.modules
torch.save(model(ids).logits, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--size", "0.5"], ["--layers", "1", "--heads", "1"]], ids=" ".join)
def test_plain_transformers_loads_the_folder_in_a_process_without_prunus(made, options, tmp_path):
    from transformers import AutoModelForCausalLM

    shrink(made, tmp_path / "out", *options)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "out"), str(tmp_path / "logits.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(torch.tensor([[3, 4, 5, 6]])).logits)


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_layers_cuts_no_name(width):
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(8)]
    layers = [ShrunkLayer(name, "heads", 8, (0, 1, 2), 0.2, 0.01 * i) for i, name in enumerate(names)]
    console = Terminal(width=width)
    with console.capture() as shown:
        console.print(_layers(layers, every_one=False))
    assert max(map(len, shown.get().splitlines())) <= width
    assert re.findall(r"layers\.(\d)\.self_attn\.o_proj\.weight", shown.get()) == list("76543")
