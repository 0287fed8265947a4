"""The decoder writes what model.generate writes, dense and sparse, and says in one line what it cannot run."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from causal_models import FAMILIES, SIZES, causal_model, transformers
from covering import quickly
from torch import nn

from prunus.ops import wide_products
from prunus.sparse import Decoder, compiled, sparsify_
from prunus.sparse.decoder import Sampling
from prunus.sparse.linear import SparseLinear, replace_
from prunus.sparse.tiles import tiles_of_dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "MixtralForCausalLM")
COMPILED = quickly([*FIRST, "OPTForCausalLM", "FalconForCausalLM"], "LlamaForCausalLM")
STORIES = Path(os.environ.get("PRUNUS_DATA", "")) / "models" / "stories15M"


def tiny(*args, **options):
    return causal_model(*args, **options).to(DEVICE)


def prompts(num=3, length=7):
    return torch.randint(3, 64, (num, length)).to(DEVICE)


def expected(model, ids, num=20, **options):
    return model.generate(ids, max_new_tokens=num, do_sample=False, **options)


@pytest.mark.parametrize("name", quickly(FAMILIES, *FIRST))
def test_the_text_is_that_of_generate(name):
    model, ids = tiny(name), prompts()
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :1] = 0, 0
    decoder = Decoder(model)

    for some, its_mask in ((ids, mask), (ids[:1], None), (ids[:2, :1], None)):
        found = decoder.generate(some, attention_mask=its_mask, max_new_tokens=20)
        assert torch.equal(found, expected(model, some, attention_mask=its_mask))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_a_sparse_model_writes_what_the_dense_one_does(name):
    model, ids = tiny(name, sparsity=0.6), prompts(2)
    dense = expected(model, ids)
    assert sparsify_(model, least=0.5)

    assert torch.equal(Decoder(model).generate(ids, max_new_tokens=20), dense)
    assert torch.equal(expected(model, ids), dense)


@pytest.mark.parametrize("num", quickly([1, 15, 16, 17, 40], 1, 17))
def test_texts_end_where_those_of_generate_do(num):
    model, ids = tiny(), prompts(4)
    text = expected(model, ids, 40, eos_token_id=63)[:, 7:]
    for end in (int(text[0, 0]), int(text[1, 9]), [int(text[0, 20]), int(text[2, 3])]):
        found = Decoder(model).generate(ids, max_new_tokens=num, eos_token_id=end, pad_token_id=5)
        assert torch.equal(found, expected(model, ids, num, eos_token_id=end, pad_token_id=5))
    assert Decoder(model).generate(ids, max_new_tokens=num, eos_token_id=-1).shape == (4, 7 + num)


def test_padding_is_found_as_generate_finds_it():
    model, ids = tiny(), prompts(2)
    ids[0, :4] = SIZES["pad_token_id"]
    assert torch.equal(Decoder(model).generate(ids, max_new_tokens=9), expected(model, ids, 9))


def test_calls_do_not_depend_on_those_before_and_leave_the_model_as_it_was():
    model = tiny()
    before, decoder = {name: tensor.clone() for name, tensor in model.state_dict().items()}, Decoder(model)
    for ids, num in [(prompts(2, 9), 20), (prompts(1, 3), 5), (prompts(2, 4), 20), (prompts(2, 9), 20)]:
        wanted = expected(model.eval(), ids, num)
        assert torch.equal(decoder.generate(ids, max_new_tokens=num), wanted)
        assert torch.equal(Decoder(model.train()).generate(ids, max_new_tokens=num), wanted)
        assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_seed_repeats_a_sampled_text_and_texts_of_a_batch_differ():
    decoder, ids = Decoder(tiny()), prompts(1).expand(4, -1)
    first, again, other = (
        decoder.generate(ids, do_sample=True, seed=seed, max_new_tokens=20, eos_token_id=-1) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(text) for text in first.tolist()}) == 4
    torch.manual_seed(3)
    loose = decoder.generate(ids, do_sample=True, max_new_tokens=20)
    torch.manual_seed(3)
    assert torch.equal(decoder.generate(ids, do_sample=True, max_new_tokens=20), loose)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.5}]
)
def test_tokens_are_drawn_with_the_probabilities_of_generate(options):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(1, 12) * 2
    wanted, warpers = logits, (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
    for name, warper in zip(("temperature", "top_k", "top_p"), warpers, strict=True):
        if name in options:
            wanted = warper(options[name])(None, wanted)
    drawn = Sampling(True, **options)(logits.expand(20_000, -1), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=12) / 20_000

    assert torch.allclose(share, wanted.softmax(-1)[0], atol=0.015)
    assert not share[wanted[0] == -torch.inf].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_can_be_trained_on_the_text_that_it_wrote(mode):
    model = tiny()
    with mode():
        decoder = Decoder(model)
        texts = [decoder.generate(prompts(2), max_new_tokens=3)]
    texts.append(decoder.generate(prompts(2), max_new_tokens=3))
    for text in texts:
        model(input_ids=text.add_(0), labels=text).loss.backward()
    assert model.lm_head.weight.grad.any()


@pytest.fixture
def num_compiled(monkeypatch):
    """Blocks are compiled by a quick backend; the number of graphs that it was given."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    quick = torch.compile(compiled._forward, backend=backend, dynamic=False, fullgraph=True)
    monkeypatch.setattr(compiled, "_compiled_forward", lambda: quick)
    return lambda: len(graphs)


def attributes(model):
    return [(module, list(vars(module))) for module in model.modules()]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_the_text_is_the_same_and_one_graph_serves_all_blocks(name, num_compiled):
    model, ids = tiny(name, **({"n_layer": 3} if name.startswith("GPT2") else {"num_hidden_layers": 3})), prompts()
    before, decoder = attributes(model), Decoder(model, compile=True)

    assert torch.equal(decoder.generate(ids, max_new_tokens=20), expected(model, ids))
    assert num_compiled() == 1
    assert attributes(model) == before
    assert torch.equal(decoder.generate(ids[:, 2:], max_new_tokens=15), expected(model, ids[:, 2:], 15))
    decoder.generate(ids, max_new_tokens=9, do_sample=True, seed=1)
    assert num_compiled() == 1  # prompts, lengths and samples need no other
    assert torch.equal(decoder.generate(ids[:1], max_new_tokens=20), expected(model, ids[:1]))
    assert num_compiled() == 2


@pytest.mark.slow
@pytest.mark.parametrize("form", quickly(["gaps", "tiles"], "tiles"))
def test_compiled_sparse_blocks_share_a_graph_whatever_the_number_of_their_zeros(form, num_compiled, monkeypatch):
    model, ids, num = tiny(num_hidden_layers=3, hidden_size=128, intermediate_size=256), prompts(2), 6
    if form == "tiles":
        model.to(torch.float16)
        monkeypatch.setattr(wide_products, "slow_types", lambda: [torch.float16])  # compiled, products are wide too
    for i, block in enumerate(model.model.layers):
        for layer in block.modules():
            if type(layer) is nn.Linear:
                layer.weight.data[torch.rand_like(layer.weight) < 0.6 + 0.1 * i] = 0
    if form == "gaps":
        dense = expected(model, ids, num)
        assert len(sparsify_(model, least=0.5)) == 21
    else:
        for name, layer in list(model.model.layers.named_modules()):
            if type(layer) is nn.Linear:
                replace_(model, f"model.layers.{name}", tiles_of_dense(layer.weight))
        assert len({layer.form.stage for layer in model.modules() if isinstance(layer, SparseLinear)}) > 1
        dense = Decoder(model).generate(ids, max_new_tokens=num)

    assert torch.equal(Decoder(model, compile=True).generate(ids, max_new_tokens=num), dense)
    assert num_compiled() == 1


@pytest.mark.parametrize("broken", ["graph break", "other layer", "no blocks", "error"])
def test_a_model_whose_blocks_cannot_be_compiled_goes_on_with_one_warning(broken, num_compiled, monkeypatch):
    model, ids = tiny(), prompts()
    kind = type(model.model.layers[0])
    forward, update = kind.forward, compiled.LayerCache.update
    if broken == "graph break":
        monkeypatch.setattr(kind, "forward", lambda *args, **kw: (torch._dynamo.graph_break(), forward(*args, **kw))[1])
    elif broken == "other layer":
        monkeypatch.setattr(compiled.LayerCache, "update", lambda self, k, v, i: update(self, k, v, i + 1))
    elif broken == "no blocks":
        vars(model.model.layers[0])["forward"] = model.model.layers[0].forward
    else:
        monkeypatch.setattr(compiled, "_compiled_forward", lambda: lambda *_: 1 / 0)
    before, decoder = attributes(model), Decoder(model, compile=True)

    with pytest.warns(UserWarning, match=r"LlamaForCausalLM cannot be compiled, so text is slower: .") as warned:
        for some in (ids, ids[:2]):
            found = decoder.generate(some, max_new_tokens=20)
            assert torch.equal(found, expected(model, some))
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert attributes(model) == before


@pytest.mark.slow
def test_compiled_by_inductor_a_sparse_model_writes_the_same_text():
    model, ids = tiny(sparsity=0.6), prompts(2)
    dense = expected(model, ids)
    assert sparsify_(model, least=0.5)
    assert torch.equal(Decoder(model, compile=True).generate(ids, max_new_tokens=20), dense)


IDS = torch.ones(1, 4, dtype=torch.int64)
BAD_PROMPTS = [
    (IDS.float(), r"got torch\.float32; pass input_ids\.long\(\)"),
    (IDS > 0, r"got torch\.bool; pass"),
    (IDS[0], r"\(batch, length\), got \(4,\); for one prompt, pass input_ids\[None\]"),
    (IDS[0, 0], r"got \(\); give one row for each prompt"),
    (IDS[None], r"got \(1, 1, 4\); give one row"),
    (IDS[:, :0], r"got \(1, 0\); begin with the start token"),
    (IDS[:0], r"got \(0, 4\); begin with"),
    (IDS.tolist(), r"must be a tensor \(batch, length\), such as torch\.tensor"),
    ({"input_ids": IDS}, r"must be a tensor \(batch, length\)"),
    (IDS * 64, "the token 64, but the model's tokens are 0 to 63"),
    (IDS.expand(17, -1), "1 to 16 sequences"),
]
BAD_OPTIONS = [
    ({"max_new_tokens": 61}, "exceeds the 64"),
    ({"max_new_tokens": 0}, "at least 1"),
    ({"max_new_tokens": 2.5}, "a whole number of at least 1, got 2.5"),
    ({"attention_mask": [[1, 1, 1, 1]], "max_new_tokens": 4}, "on the left"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 0]]), "max_new_tokens": 4}, "on the left"),
    ({"do_sample": True, "temperature": 0.0}, "above 0"),
    ({"top_p": 1.5}, "top_p must"),
    ({"top_k": 0}, "top_k must"),
    ({"temperature": 0.7}, r"temperature=0\.7 only affects sampling.*add do_sample=True, or leave out temperature"),
    ({"top_k": 5}, r"top_k=5 only affects sampling.*add do_sample=True"),
    ({"top_p": 1.0}, r"top_p=1\.0 only affects sampling.*add do_sample=True"),
]


def test_a_call_that_cannot_be_is_refused_in_one_line():
    decoder = Decoder(tiny())
    calls = [({"input_ids": ids}, match) for ids, match in BAD_PROMPTS]
    for call, match in [*calls, *(({"input_ids": IDS, **options}, match) for options, match in BAD_OPTIONS)]:
        with pytest.raises(ValueError, match=match) as error:
            decoder.generate(**call)
        assert "\n" not in str(error.value)


def test_models_that_it_cannot_run_are_refused_in_one_line():
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    repeating = tiny()
    repeating.generation_config.repetition_penalty = 1.1
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, d_model=16, d_ff=8, num_layers=1))
    cases = [(nn.Linear(2, 2), "is not one"), (mamba, "a static cache"), (repeating, "repetition_penalty")]
    for model, match in [*cases, (empty, "on the meta device.*load them first"), (t5, "has an encoder")]:
        with pytest.raises(ValueError, match=match) as error:
            Decoder(model)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"does not run with a static cache.*use model\.generate"):
        Decoder(tiny("FalconForCausalLM", alibi=True)).generate(prompts(1), max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="needs stories15M")
def test_a_real_model_writes_the_same_text_sparse_and_dense():
    from prunus.export import load_model

    model = load_model(STORIES, DEVICE)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "layers" in name:
            least = parameter.abs().flatten().kthvalue(int(0.6 * parameter.numel())).values
            parameter.data[parameter.abs() <= least] = 0
    ids = torch.tensor([[1, 9038, 2501, 263, 931]], device=DEVICE)
    dense = expected(model, ids, 100)
    assert torch.equal(Decoder(model).generate(ids, max_new_tokens=100), dense)
    assert len(sparsify_(model, least=0.5)) == 42
    assert torch.equal(Decoder(model).generate(ids, max_new_tokens=100), dense)
    assert torch.equal(expected(model, ids, 100), dense)


def sparsified(sparsity, name="LlamaForCausalLM"):
    """A model, sparse if it has zeros, and its text while it was dense."""
    model, ids = tiny(name, sparsity), prompts()
    dense = expected(model, ids)
    if sparsity:  # the layers of Falcon are of a class of its own, and stay dense
        assert sparsify_(model, least=0.5) or name == "FalconForCausalLM"
    return model, ids, dense


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "compile"), [*((name, False) for name in FAMILIES), ("LlamaForCausalLM", True)])
@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_on_a_gpu_a_step_is_a_graph_and_the_text_is_that_of_generate(name, compile, sparsity):
    model, ids, dense = sparsified(sparsity, name)
    decoder = Decoder(model, compile=compile)
    is_on_host = name == "FalconForCausalLM"  # makes a tensor on the host at every step, which no graph can hold
    with pytest.warns(UserWarning, match="cannot be captured") if is_on_host else nullcontext():
        for _ in range(2):
            assert torch.equal(decoder.generate(ids, max_new_tokens=20), dense)
    (state,) = decoder.states.values()
    assert (state.graph is None) == is_on_host and state.compile == compile


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16])
def test_on_a_gpu_batches_and_samples_replay(batch):
    decoder, ids = Decoder(sparsified(0.6)[0]), prompts(batch)
    first, again = (
        decoder.generate(ids, do_sample=True, top_p=0.9, seed=4, max_new_tokens=20, eos_token_id=-1) for _ in range(2)
    )
    assert torch.equal(first, again)
    assert len({tuple(text) for text in first[:, 7:].tolist()}) == batch
    assert any(isinstance(layer, SparseLinear) for layer in decoder.model.modules())


@pytest.mark.gpu
def test_on_a_gpu_two_of_four_writes_what_dense_does():
    from prunus.sparse import semi_structured_

    model = tiny(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    for layer in model.modules():
        if type(layer) is nn.Linear:
            weight = layer.weight.data.view(-1, 4)
            weight.scatter_(1, weight.abs().topk(2, 1, largest=False).indices, 0)
    ids = prompts(1)
    dense = expected(model, ids, 12)
    assert semi_structured_(model, only=["*proj*"])
    found = Decoder(model).generate(ids, max_new_tokens=12)
    assert torch.equal(found[:, :9], dense[:, :9])  # bfloat16 rounds otherwise there, so that later tokens may differ


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_on_a_gpu_prompts_of_one_length_are_read_by_a_graph(sparsity):
    decoder = Decoder(sparsified(sparsity)[0])
    for seed, length in enumerate([7, 7, 7, 5, 5, 5, 7, 7]):
        ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[0, : seed % 3] = 0
        found = decoder.generate(ids, attention_mask=mask, max_new_tokens=12)
        expected = decoder.model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert torch.equal(found, expected)
    (state,) = decoder.states.values()
    assert state.prompt.graph is not None and state.prompt.length == 7
