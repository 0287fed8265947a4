"""A model of which one block at a time is in memory is pruned to the bits and files of the one that is held whole."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from covering import quickly

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
sys.path.append(str(Path(__file__).parents[1] / "sweep"))
from families import SIZES, build, text  # noqa: E402
from table import TABLE  # noqa: E402

from prunus import Global, NofM, PerLayer, PerRow, Repair, prune, quantize, save_model  # noqa: E402
from prunus.export.huggingface import load_any_model  # noqa: E402
from prunus.files.reader import open_tensors  # noqa: E402
from prunus.grids import on_grids  # noqa: E402
from prunus.oneshot.blocks import is_stubbed  # noqa: E402
from prunus.oneshot.disk_offload import disk_offload_of  # noqa: E402
from prunus.oneshot.model_folder import Unfit, model_on_disk, save_from_disk  # noqa: E402

GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}
MODELS = TABLE | {
    "llama": ("LlamaForCausalLM", SIZES | {"num_hidden_layers": 3}, text),
    "tied llama": ("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}, text),
    "gpt2": ("GPT2LMHeadModel", GPT2, text),
}
HELD = {"marian": "is computed, not stored", "albert": "no list of blocks", "ibert": "no list of blocks"}
HELD |= {"rwkv": "changes its weights while it runs"}
NORMS = "segformer resnet regnet mobilenet_v1 mobilenet_v2 mobilevit levit cvt glpn wav2vec2-conformer patchtst".split()
HELD |= dict.fromkeys(NORMS, "batch norms")
MASKS = {"score": "magnitude", "repair": None}
WAYS = {
    "repair": {},
    "repair, own targets": {"repair": Repair("own")},
    "repair of magnitude": {"score": "magnitude"},
    "repair of 2:4": {"select": NofM(2, 4)},
    "global magnitude": MASKS | {"batches": ()},
    "magnitude by layer": MASKS | {"select": PerLayer(), "batches": ()},
    "magnitude by row": MASKS | {"select": PerRow(), "batches": ()},
    "2:4": MASKS | {"select": NofM(2, 4), "batches": ()},
    "wanda": {"score": "wanda", "repair": None},
    "global wanda": {"score": "wanda", "select": Global(), "repair": None},
    "random": {"score": "random", "repair": None},
    "4 bits": {"bits": 4},
    "4 bits by masks": {"bits": 4, "score": "magnitude"},
    "4 bits without batches": MASKS | {"bits": 4, "batches": ()},
}
QUICK = ("repair", "global magnitude", "4 bits")


def folder_of(tmp_path, name="llama", dtype=torch.float32, **how):
    model = build(name, MODELS).to(dtype)
    model.save_pretrained(tmp_path / "model", **how)
    return tmp_path / "model", {"batches": [MODELS[name][2]()]}


def both(folder, run):
    """The model in memory, the one on disk, and what ``run`` gives for each."""
    held, disk = load_any_model(folder), model_on_disk(folder)
    state = folder.with_name("state")
    return held, disk, run(held), run(disk, state=state)


def values_of(model):
    """Parameters and buffers; of those on disk their values now."""
    disk = disk_offload_of(model)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {n: disk.value(n) if disk and n in disk.names else v.detach() for n, v in named.items()}


def bits_of(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same_values(model, other):
    a, b = values_of(model), values_of(other)
    assert list(a) == list(b)
    assert [name for name in a if bits_of(a[name]) != bits_of(b[name])] == []


def assert_same_results(a, b):
    shown, other = ([asdict(layer) for layer in result.layers] for result in (a, b))
    assert shown == other and a.num_pruned == b.num_pruned and a.notes == b.notes


def stored(folder):
    """Bits of every tensor by the name under which it lies in the files."""
    with open_tensors(folder) as tensors:
        return {name: bits_of(tensors.read(name)) for name in tensors.records}


def assert_same_files(held, disk, folder):
    """What ``save_pretrained`` writes of the model in memory."""
    wanted, written = folder.with_name("wanted"), folder.with_name("written")
    held.save_pretrained(wanted)
    written.mkdir()
    save_from_disk(disk, folder, written)
    assert stored(written) == stored(wanted)
    assert json.loads((written / "config.json").read_text()) == json.loads((wanted / "config.json").read_text())
    type(held).from_pretrained(written)


@pytest.mark.parametrize("name", quickly(["llama", "gpt2", "mixtral"], "llama"))
@pytest.mark.parametrize("way", quickly(WAYS, *QUICK))
def test_every_way_to_prune_gives_the_same_bits_counts_errors_and_files(tmp_path, name, way):
    folder, given = folder_of(tmp_path, name)
    held, disk, a, b = both(folder, lambda model, **more: prune(model, progress=False, **given | WAYS[way], **more))
    assert_same_values(held, disk)
    assert_same_results(a, b)
    assert_same_files(held, disk, folder)
    if "4 bits" in way:
        found, wanted = on_grids(disk), on_grids(held)
        assert found.keys() == wanted.keys() and all(torch.equal(found[n].scales, wanted[n].scales) for n in wanted)


@pytest.mark.parametrize("name", quickly(TABLE, "mixtral"))
def test_every_family_has_the_same_bits_and_files_or_says_why_it_is_held(tmp_path, name):
    folder, given = folder_of(tmp_path, name)
    try:
        model_on_disk(folder)
    except Unfit as reason:
        assert name in HELD and HELD[name] in str(reason)
        return
    assert name not in HELD
    held, disk, a, b = both(folder, lambda model, **more: prune(model, progress=False, **given, **more))
    assert_same_values(held, disk)
    assert_same_results(a, b)
    assert_same_files(held, disk, folder)


@pytest.mark.parametrize(
    "name", quickly(["tied llama", "gpt2", "t5", "mixtral", "llama4_text", "gemma3"], "tied llama")
)
@pytest.mark.parametrize("dtype", quickly([torch.bfloat16, torch.float16], torch.bfloat16))
def test_sixteen_bits_in_several_shards_give_the_same_bits(tmp_path, name, dtype):
    folder, given = folder_of(tmp_path, name, dtype, max_shard_size="4KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    held, disk, a, b = both(folder, lambda model, **more: prune(model, progress=False, **given, **more))
    assert {value.dtype for value in values_of(disk).values()} == {v.dtype for v in values_of(held).values()}
    assert_same_values(held, disk)
    assert_same_results(a, b)
    assert_same_files(held, disk, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", quickly(["llama", "mixtral", "vit"], "llama"))
def test_a_small_folder_is_read_block_by_block_too_and_written_small(tmp_path, name):
    model, batches = build(name, MODELS), [MODELS[name][2]()]
    prune(model, sparsity=0.5, progress=False)
    save_model(model, tmp_path / "model")
    how = {"batches": batches, "sparsity": 0.7, "progress": False}
    held, disk, a, b = both(tmp_path / "model", lambda model, **more: prune(model, **how, **more))
    assert_same_values(held, disk)
    assert_same_results(a, b)
    assert_same_files(held, disk, tmp_path / "model")
    save_model(held, tmp_path / "small", source=tmp_path / "model")
    (tmp_path / "small from disk").mkdir()
    save_from_disk(disk, tmp_path / "model", tmp_path / "small from disk", small=True)
    assert stored(tmp_path / "small") == stored(tmp_path / "small from disk")
    assert_same_values(load_any_model(tmp_path / "small from disk"), held)


@pytest.mark.slow
@pytest.mark.parametrize("with_batches", quickly([True, False], True))
@pytest.mark.parametrize("dtype", quickly([torch.float32, torch.bfloat16], torch.bfloat16))
def test_a_pruned_folder_is_quantised_to_the_same_codes(tmp_path, dtype, with_batches):
    model = build("llama", MODELS).to(dtype)
    prune(model, sparsity=0.5, progress=False)
    model.save_pretrained(tmp_path / "model")
    batches = [text()] if with_batches else ()
    run = lambda model, **more: quantize(model, batches, progress=False, **more)  # noqa: E731
    held, disk, a, b = both(tmp_path / "model", run)
    assert_same_values(held, disk)
    assert_same_results(a, b)
    save_model(held, tmp_path / "small")
    (tmp_path / "from disk").mkdir()
    save_from_disk(disk, tmp_path / "model", tmp_path / "from disk", small=True)
    assert stored(tmp_path / "small") == stored(tmp_path / "from disk")
    assert on_grids(load_any_model(tmp_path / "from disk")).keys() == on_grids(held).keys()


@pytest.mark.slow
@pytest.mark.parametrize("way", quickly(WAYS, "wanda"))
def test_interrupted_anywhere_it_ends_with_the_same_bits(tmp_path, way):
    folder, given = folder_of(tmp_path)
    held = load_any_model(folder)
    how = given | WAYS[way] | {"progress": False}
    wanted = prune(held, **how)
    for num_steps in (1, 4, 9):

        def stop(num_done, total, said, num_steps=num_steps):
            if num_done >= num_steps:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prune(model_on_disk(folder), state=tmp_path / "state", **how | {"progress": stop})
    disk = model_on_disk(folder)
    result = prune(disk, state=tmp_path / "state", **how)
    assert_same_values(held, disk)
    assert_same_results(wanted, result)


def test_one_block_is_in_memory_at_a_time_and_none_at_the_end(tmp_path):
    folder, given = folder_of(tmp_path)
    disk = model_on_disk(folder)
    offload = disk_offload_of(disk)

    def here():
        return [k for k, b in enumerate(offload.blocks) if not b.mlp.up_proj.weight.isnan().any()]

    assert here() == []
    seen = []

    def note(block, *_):
        if not is_stubbed(block):
            seen.append(here())

    for block in offload.blocks:
        block.register_forward_hook(note)
    result = prune(disk, **given, state=tmp_path / "state", progress=False)
    assert {len(blocks) for blocks in seen} == {1} and here() == []
    assert result.num_pruned == round(result.num_weights / 2)
    names = {name for name, p in disk.named_parameters() if p.isnan().any()}
    assert names == set(offload.names) and "lm_head.weight" not in names


def test_a_model_that_ties_tensors_which_differ_is_held(tmp_path):
    folder, _ = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(Unfit, match=r"ties .* but they differ"):
        model_on_disk(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"score": "wanda", "repair": None}, {"bits": 4}], ids=str)
def test_blocks_that_travel_from_disk_to_a_gpu_end_as_those_of_main_memory_do(tmp_path, how):
    folder, inputs = folder_of(tmp_path)
    held, on_disk = load_any_model(folder), model_on_disk(folder)
    how = how | inputs | {"sparsity": 0.5, "offload": "cuda", "progress": False}
    prune(held, **how)
    prune(on_disk, **how, state=tmp_path / "state")
    disk = disk_offload_of(on_disk)
    for name, parameter in held.named_parameters():
        value = disk.value(name) if name in disk.names else on_disk.get_parameter(name)
        assert torch.equal(value, parameter), name
