"""Passes that go block by block give the bits of whole passes, and every block runs for all batches before the next."""

from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise

import pytest
import torch
from families import FAMILIES, SIZES, START, T5, build, pairs, text, tokens
from probe_models import cnn, llama, mlp
from probe_odd import TIME, WIDTH, Skips
from torch import nn
from torch.utils import _pytree as pytree

from prunus.oneshot.blocks import is_stubbed
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.disk_offload import BY_BLOCK, by_block, model_blocks
from prunus.oneshot.norms import input_norms
from prunus.oneshot.samples import Chunk
from prunus.oneshot.streams import Streams
from prunus.trained import quality
from prunus.trained.quality import metric_of, token_quality

GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
OPT = SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 8}  # with projections before and behind the blocks
DEEP_T5 = T5 | START | {"num_layers": 4}  # more blocks than a block has layers
MORE = {"gpt2": ("GPT2LMHeadModel", GPT2, text), "opt": ("OPTForCausalLM", OPT, text)}
MORE["t5"] = ("T5ForConditionalGeneration", DEEP_T5, pairs)
MODELS = FAMILIES | MORE
SIZES_OF_CHUNKS = (2, 1, 1)


class Tuples(nn.Module):
    """Blocks take and return a state in parts, one of them without a row for each sample."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}) for _ in range(3)])
        for block in self.blocks:
            block.forward = self.block(block)

    @staticmethod
    def block(block):
        def forward(state):
            x, more = state
            y = block["a"](x).tanh()
            return x + y, {"sum": more["sum"] + y.sum(), "rows": block["b"](more["rows"])}

        return forward

    def forward(self, x):
        state = x, {"sum": x.new_zeros(()), "rows": x * 2}
        for block in self.blocks:
            state = block(state)
        return state[0] * state[1]["sum"] + state[1]["rows"]


class Turned(nn.Module):
    """Returns a tensor whose dimensions are not in the order of its memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x.transpose(1, 2).contiguous()).transpose(1, 2)


def chunks_of():
    edges = [0, *accumulate(SIZES_OF_CHUNKS)]
    return [Chunk(0, start, stop) for start, stop in pairwise(edges)]


def tensors(output):
    leaves = pytree.tree_leaves(list(output.values()) if isinstance(output, dict) else output)
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]


@contextmanager
def computed(blocks):
    """Numbers of the blocks that compute, in the order of their calls."""
    calls = []

    def hook(number):
        def note(block, args):
            if not is_stubbed(block):
                calls.append(number)

        return note

    handles = [block.register_forward_pre_hook(hook(number)) for number, block in enumerate(blocks)]
    yield calls
    for handle in handles:
        handle.remove()


def assert_same_bits(model, run):
    """The values of all chunks; returns the numbers of the blocks that compute."""
    blocks, chunks = model_blocks(model), chunks_of()
    with torch.no_grad():
        expected = [tensors(run(chunk)) for chunk in chunks]
    with computed(blocks) as calls:
        values = [tensors(value) for value in by_block(model, blocks, chunks, run)]
    for ours, whole in zip(values, expected, strict=True):
        assert len(ours) == len(whole) > 0
        for a, b in zip(ours, whole, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    return calls


def in_order(num_blocks):
    """A whole pass over the first chunk, then three chunks block by block."""
    return [*range(num_blocks), *(block for block in range(num_blocks) for _ in SIZES_OF_CHUNKS)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_values_have_the_bits_of_whole_passes(name, padded):
    model, arguments = build(name, MODELS), MODELS[name][2]()
    if padded and "input_ids" in arguments:
        mask = torch.ones_like(arguments["input_ids"])
        mask[0, 7:] = mask[3, 2:] = 0
        arguments["attention_mask"] = mask
    if "input_ids" in arguments and "labels" not in arguments and "For" in type(model).__name__:
        arguments["labels"] = arguments["input_ids"]

    def run(chunk):
        return model(**{key: array[chunk.rows] for key, array in arguments.items()})

    calls = assert_same_bits(model, run)
    if name in ("llama", "gpt2", "opt", "bert", "t5", "vit", "mixtral"):
        assert calls == in_order(len(model_blocks(model))) and calls


def repeated():
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(*layers, *layers)


PLAIN = {
    "repeated": (repeated, (4, 6)),
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 6), nn.Tanh()), (4, 6)),
    "tuples": (Tuples, (4, 6)),
    "skips": (Skips, (4, TIME, WIDTH)),
    "turned": (lambda: nn.Sequential(*[Turned() for _ in range(3)]), (4, 6, 5)),
    "convolutions": (
        lambda: nn.Sequential(*[nn.Conv2d(3, 3, 3) for _ in range(3)]).to(memory_format=torch.channels_last),
        (4, 3, 12, 9),
    ),
    "no blocks": (lambda: nn.Linear(6, 6), (4, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_have_the_bits_of_whole_passes(name, dtype):
    make, shape = PLAIN[name]
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(shape).to(dtype)
    calls = assert_same_bits(model, lambda chunk: model(x[chunk.rows].clone()))
    if name not in ("skips", "no blocks", "repeated"):
        assert calls == in_order(len(model_blocks(model)))


def test_an_error_of_the_model_is_raised_and_no_stub_is_left():
    model, ids = build("llama"), tokens(4)
    blocks = model_blocks(model)

    def run(chunk):
        if chunk.start == 3:
            raise ValueError("mine")
        return model(ids[chunk.rows], use_cache=False).logits

    with pytest.raises(ValueError, match="mine"):
        list(by_block(model, blocks, chunks_of(), run))
    assert not any("forward" in vars(block) for block in blocks)


def test_a_model_that_returns_nan_goes_block_by_block_too():
    model, ids = build("llama"), tokens(4)
    blocks, chunks = model_blocks(model), chunks_of()
    model.lm_head.weight.data[3, 2] = torch.nan
    with computed(blocks) as calls:
        list(by_block(model, blocks, chunks, lambda chunk: model(ids[chunk.rows], use_cache=False).logits))
    assert calls == in_order(len(blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [1, 3 * 12 * 64, 1 << 24])
def test_the_quality_of_tokens_is_the_same_to_the_bit(most, dtype, monkeypatch):
    model, windows = build("llama").to(dtype), tokens(20)
    monkeypatch.setattr(quality, "MOST_LOGITS", {"cpu": most})
    whole, sizes = token_quality(model, windows), []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    BY_BLOCK.add(model)
    assert token_quality(model, windows) == whole
    handle.remove()
    assert max(sizes) <= max(most, 12 * 64)


@pytest.mark.parametrize("name", ["llama", "bert classifier", "t5", "vit", "bert"])
def test_every_metric_is_the_same_to_the_bit(name, monkeypatch):
    model, rows = build(name), MODELS[name][2]()
    monkeypatch.setattr(quality, "SIZE", 3)
    metric, measure = metric_of(model, rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    whole = measure(model)
    BY_BLOCK.add(model)
    assert metric_of(model, rows)[0] == metric and measure(model) == whole


def num_reads(calls):
    """How often a model that holds one block at a time reads its first one."""
    return sum(block == 0 for block, _ in groupby(calls))


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("make", [cnn, llama, mlp, "llama", "gpt2", "opt", "bert", "t5", "vit", "mixtral", "qwen3_moe"])
def test_input_norms_are_the_same_to_the_bit_and_read_the_model_thrice(make, offload):
    if isinstance(make, str):
        model, arguments = build(make, MODELS), MODELS[make][2]()
        long = {key: torch.cat([array, array.flip(0), array[:1]]) for key, array in arguments.items()}
        batches = [long, {key: array[:1] for key, array in arguments.items()}]
        if "input_ids" in long:
            long["attention_mask"] = torch.ones_like(long["input_ids"])
            long["attention_mask"][4, 7:] = 0
    else:
        case = make()
        model, batches = case.model.eval(), case.batches

    def norms():
        calibration = Calibration(model, batches, offload=offload)
        with calibration.open():
            calibration.check_model()
            with computed(calibration.blocks) as calls:
                return input_norms(calibration), calls

    whole, _ = norms()
    BY_BLOCK.add(model)
    found, calls = norms()
    assert found.keys() == whole.keys() and all(torch.equal(found[name], norm) for name, norm in whole.items())
    assert num_reads(calls) == 3


@pytest.mark.parametrize("shares", ["weight", "block"])
@torch.no_grad()
def test_a_weight_in_two_blocks_takes_whole_passes_and_has_the_same_norm(shares):
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).eval(), torch.randn(9, 6)
    if shares == "weight":
        model[2].weight = model[0].weight
    else:
        model[2] = model[0]

    def norms():
        calibration = Calibration(model, [x])
        with calibration.open():
            return input_norms(calibration)

    whole = norms()
    BY_BLOCK.add(model)
    assert all(torch.equal(norm, whole[name]) for name, norm in norms().items())


def test_a_model_is_read_four_times_before_its_first_block_is_repaired():
    case = llama()
    BY_BLOCK.add(case.model)
    calibration = Calibration(case.model, case.batches)
    with torch.no_grad(), calibration.open(), computed(calibration.blocks) as calls:
        calibration.check_model()
        streams = Streams(calibration)
    assert len(streams.blocks) == len(calibration.blocks) and num_reads(calls) == 4
