"""A folder is pruned as its model in memory is; its result stays of use, and a failure leaves nothing behind."""

import shutil

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
from families import SIZES, build, text  # noqa: E402

from prunus import Global, PerLayer, PerRow, prune, quantize  # noqa: E402
from prunus.export.huggingface import load_any_model  # noqa: E402
from prunus.oneshot.disk_offload import opened  # noqa: E402
from prunus.oneshot.model_folder import model_on_disk  # noqa: E402
from prunus.ops.bits import words_of  # noqa: E402

BAD = {
    "sparsity must be": {"sparsity": 2.0},
    "matches no parameter": {"include": "nothing"},
    "batches hold token": {"batches": [torch.full((1, 4), 10**6)]},
    "the score fisher needs the whole model in memory": {"score": "fisher"},
    "allocate='moments' needs the whole model in memory": {"select": PerLayer("moments"), "moments": {}},
}
FAMILIES = {"llama": ("LlamaForCausalLM", SIZES | {"num_hidden_layers": 3}, text)}


@pytest.fixture
def folder(tmp_path):
    build("llama", FAMILIES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def logits(model):
    with opened(model):
        return model(**text()).logits


@pytest.mark.parametrize("bits", [None, 4])
def test_the_model_of_the_result_runs_with_the_values_that_were_written(folder, bits):
    held, out, how = load_any_model(folder), folder.with_name("out"), {"bits": bits, "progress": False}
    prune(held, [text()], **how)
    result = prune(folder, [text()], out=out, **how)
    wanted = logits(held)
    assert torch.equal(logits(load_any_model(out)), wanted) and torch.equal(logits(result.model), wanted)
    shutil.rmtree(out)
    assert torch.equal(logits(result.model), wanted)  # its files are open still


@pytest.mark.slow
@torch.no_grad()
def test_masks_alone_are_those_of_the_values_that_each_call_began_with(folder):
    held, disk, how = load_any_model(folder), model_on_disk(folder), {"include": "lm_head", "progress": False}
    for number, sparsity in enumerate((0.4, 0.7)):
        wanted = prune(held, [text()], sparsity, **how)
        result = prune(disk, [text()], sparsity, **how, state=folder.with_name(f"state{number}"))
        with wanted.masks_alone(), result.masks_alone():
            assert torch.equal(logits(disk), logits(held))
        assert torch.equal(logits(disk), logits(held))
    wanted, result = quantize(held, [text()]), quantize(disk, [text()], state=folder.with_name("bits"))
    with wanted.masks_alone(), result.masks_alone():
        assert torch.equal(logits(disk), logits(held))


@pytest.mark.parametrize("select", [Global(), PerLayer("erk"), PerRow()], ids=str)
@torch.no_grad()
def test_a_folder_pruned_by_masks_alone_has_the_bits_of_its_model_in_memory(folder, select):
    held = load_any_model(folder)
    for name, parameter in held.named_parameters():
        if "mlp" in name:
            parameter[::3] = -0.0
            parameter[1::3] = parameter[1::3].sign() / 8  # ties
    held.save_pretrained(folder)
    out, how = folder.with_name("out"), {"sparsity": 0.6, "select": select, "include": "lm_head", "progress": False}
    prune(held, **how)
    result = prune(folder, out=out, **how)
    written = load_any_model(out).state_dict()
    for name, wanted in held.state_dict().items():
        assert torch.equal(words_of(written[name]), words_of(wanted)), name
    assert result.num_pruned == sum(int((held.get_parameter(name) == 0).sum()) for name in result.level.weights)


def test_masks_alone_are_dense_values_after_a_folder_was_written_too(folder):
    held, how = load_any_model(folder), {"progress": False}
    wanted, result = prune(held, [text()], **how), prune(folder, [text()], out=folder.with_name("out"), **how)
    with wanted.masks_alone(), result.masks_alone():
        assert torch.equal(logits(result.model), logits(held))


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [4, 22])
def test_an_interrupted_model_has_its_old_values_and_the_same_call_goes_on(folder, num_steps):
    held, disk = load_any_model(folder), model_on_disk(folder)
    how = {"include": "lm_head", "state": folder.with_name("state")}

    def stop(num_done, total, said):
        if num_done >= num_steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(disk, [text()], progress=stop, **how)
    assert any(how["state"].glob("group_*.pt")) and torch.equal(logits(disk), logits(held))
    prune(disk, [text()], progress=False, **how)
    prune(held, [text()], progress=False, include="lm_head")
    assert torch.equal(logits(disk), logits(held))


@pytest.mark.parametrize("said", BAD)
def test_bad_input_leaves_nothing_behind(folder, said):
    with pytest.raises(ValueError, match=said):
        prune(folder, **{"batches": [text()], **BAD[said]}, out=folder.parent / "new" / "out", progress=False)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
