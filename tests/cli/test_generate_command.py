"""prunus generate writes the text of the model, loads a small file packed, and refuses bad input in one line."""

import pytest
import torch
from causal_models import causal_model

from prunus.cli import main
from prunus.export import load_model, save_model
from prunus.sparse import SparseLinear, compiled, load_packed, sparsify_


@pytest.fixture
def folder(tmp_path):
    model = causal_model(sparsity=0.6, tie_word_embeddings=True)
    save_model(model, tmp_path / "small")
    model.save_pretrained(tmp_path / "plain")
    return tmp_path


def text_of(folder, *options, capsys):
    main(["generate", str(folder), "--tokens", "5", "6", "7", "--max-new-tokens", "12", "--device", "cpu", *options])
    said = capsys.readouterr()
    assert "a second" in said.err
    return said.out, said.err


def test_small_and_plain_folders_write_the_text_of_the_model(folder, capsys):
    ids = torch.tensor([[5, 6, 7]])
    wanted = load_model(folder / "small").generate(ids, max_new_tokens=12, do_sample=False)
    line = " ".join(map(str, wanted[0].tolist())) + "\n"
    for options, num in ((["--least", "0.5"], 14), (["--dense"], 0)):
        for name in ("small", "plain"):
            text, said = text_of(folder / name, *options, capsys=capsys)
            assert text == line
            assert f"{num} of 15 linear layers sparse on cpu" in said
    assert text_of(folder / "small", "--least", "0.5", "--batch", "2", capsys=capsys)[0] == 2 * line
    drawn = [text_of(folder / "small", "--least", "0.5", "--sample", "--seed", s, capsys=capsys)[0] for s in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_compiled_the_text_is_the_same(folder, capsys, monkeypatch):
    calls = []
    forward = compiled._forward
    monkeypatch.setattr(compiled, "_compiled_forward", lambda: lambda *args: calls.append(args) or forward(*args))
    plain, _ = text_of(folder / "small", "--least", "0.5", capsys=capsys)
    assert not calls
    assert text_of(folder / "small", "--least", "0.5", "--compile", capsys=capsys)[0] == plain
    assert calls


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
        ("GPT2LMHeadModel", {}),
        ("GPTNeoXForCausalLM", {"tie_word_embeddings": True}),
        ("Gemma3ForCausalLM", {}),  # rotary embeddings of two kinds, scaled inputs
    ],
    ids=["rotary", "transposed", "tied", "buffers"],
)
@pytest.mark.parametrize("is_small", [True, False])
def test_a_packed_model_is_the_one_that_sparsify_makes(name, options, is_small, tmp_path):
    model, ids = causal_model(name, 0.6, **options), torch.arange(8)[None]
    save_model(model, tmp_path / "model") if is_small else model.save_pretrained(tmp_path / "model")
    names = sparsify_(model, least=0.5)
    packed = load_packed(tmp_path / "model", least=0.5)

    assert names == [name for name, layer in packed.named_modules() if isinstance(layer, SparseLinear)]
    state = packed.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    buffers = dict(model.named_buffers())  # those too that no file holds
    assert all(torch.equal(tensor, buffers.pop(name)) for name, tensor in packed.named_buffers()) and not buffers
    is_tied = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, packed)]
    assert is_tied[0] == is_tied[1]
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, model(ids).logits)


def test_no_sparse_weight_is_ever_dense(folder, monkeypatch):
    from prunus.files.reader import Tensors

    read, inner = [], Tensors.read
    monkeypatch.setattr(
        Tensors, "read", lambda self, name, device="cpu": read.append(name) or inner(self, name, device)
    )
    model = load_packed(folder / "small", least=0.5)

    assert not [name for name in read if "_proj" in name]
    assert not any("_proj.weight" in name for name, _ in model.named_parameters())


def test_damage_is_one_line(folder, capsys):
    path = folder / "small" / "sparse.safetensors"
    data = bytearray(path.read_bytes())
    data[-300:] = bytes(300)
    path.write_bytes(data)
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(folder / "small"), "--tokens", "5", "--device", "cpu", "--least", "0.5"])
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(said) == 1 and "damaged" in said[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "give --prompt"),
        (["--prompt", "a", "--tokens", "1"], "give --prompt"),
        (["--prompt", "a"], "no tokenizer"),
        (["--tokens", "1", "--seed", "1"], "add --sample"),
        (["--tokens", "1", "--temperature", "0.5"], "--temperature says how tokens are drawn; add --sample"),
        (["--tokens", "1", "--top-k", "5"], "--top-k says how tokens are drawn; add --sample"),
        (["--tokens", "1", "--top-p", "1.0"], "--top-p says how tokens are drawn; add --sample"),
        (["--tokens", "1", "--batch", "17"], "1 to 16"),
        (["--tokens", "1", "--dense", "--least", "0.5"], "leave off --least"),
        (["--tokens", "99", "--dense"], "the token 99"),
        (["--tokens", "1", "--dense", "--max-new-tokens", "64"], "exceeds the 64"),
        (["--tokens", "1", "--device", "nowhere"], "no device"),
    ],
)
def test_bad_input_is_one_line(options, match, folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(folder / "small"), *options])
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(said) == 1 and match in said[0]
