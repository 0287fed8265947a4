"""Every kind of file is read alike; what files disagree about is found; hostile files are one clear line."""

import json
import re
from pathlib import Path

import pytest
import torch
from patients import folder, found, healthy, kinds, layer, places, prune_rows_, state_of, weights_of
from safetensors.torch import save_file
from torch.nn.utils import prune

from prunus import Global, Pruner, Ramp
from prunus.doctor import examine
from prunus.doctor.examine import digest_of
from prunus.doctor.sources import StoredTensor
from prunus.masks import digest
from prunus.ops import bits

UP = "model.layers.1.mlp.up_proj.weight"
SHARD, ELSEWHERE = "model-00002-of-00003.safetensors", "model-00001-of-00003.safetensors"  # UP is in the first
OLD = "model-00007-of-00009.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return folder(tmp_path / "model", prune_rows_(healthy()), shards=3)


def index_of(path):
    file = path / "model.safetensors.index.json"
    return file, json.loads(file.read_text())


def with_two(text: str, name: str, value: object) -> str:
    """JSON in which ``name`` stands twice, with another ``value`` first."""
    at = text.index(json.dumps(name))
    return f"{text[:at]}{json.dumps(name)}: {json.dumps(value)}, {text[at:]}"


def repeat_in_header(file: Path, name: str) -> None:
    data = file.read_bytes()
    size, other = int.from_bytes(data[:8], "little"), {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = with_two(data[8 : 8 + size].decode(), name, other).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


@pytest.mark.parametrize("where", ["file", "folder", "index", "masks", "prefix"])
def test_a_name_that_stands_twice_is_refused(where, sharded, tmp_path):
    path, options = sharded, {}
    if where == "index":
        file, index = index_of(sharded)
        file.write_text(with_two(file.read_text(), UP, next(iter(index["weight_map"].values()))))
    else:
        tensors = prune_rows_(healthy())
        if where == "prefix":
            tensors[f"module.{UP}"] = tensors[UP].clone()
        file = folder(tmp_path / "one", tensors) / "model.safetensors"
        if where != "prefix":
            repeat_in_header(file, UP)
        path, options = {"file": (file, {}), "masks": (sharded, {"masks": file})}.get(where, (file.parent, {}))
    with pytest.raises(ValueError, match=f"'{UP}' (occurs )?twice"):
        examine(path, **options)


def store_twice(path: Path, index: dict) -> None:
    tensors, home = prune_rows_(healthy()), index["weight_map"][UP]
    other = next(file for file in index["weight_map"].values() if file != home)
    here = [name for name, file in index["weight_map"].items() if file == other]
    save_file({name: tensors[name] for name in (*here, UP)}, path / other)


SPOILED = {
    "an index lacks a tensor": (lambda path, index: index["weight_map"].pop(UP), UP),
    "an index places a tensor wrongly": (lambda path, index: index["weight_map"].update({UP: ELSEWHERE}), UP),
    "an index names what no shard has": (lambda path, index: index["weight_map"].update({"a.other": SHARD}), "a.other"),
    "a tensor is in two shards": (store_twice, UP),
    "a shard is lost": (lambda path, index: (path / SHARD).unlink(), SHARD),
    "the index is lost": (lambda path, index: index.clear(), "shards need their index"),
    "there are two models": (lambda path, index: save_file(healthy(), path / "model.safetensors"), "outdated"),
    "a shard is left over": (lambda path, index: save_file({UP: torch.ones(1)}, path / OLD), OLD),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_folder_whose_files_disagree_is_refused(sharded, case):
    change, said = SPOILED[case]
    file, index = index_of(sharded)
    change(sharded, index)
    file.write_text(json.dumps(index)) if index else file.unlink()
    with pytest.raises(ValueError, match=re.escape(said)):
        examine(sharded)


def test_files_that_are_not_read_are_noted_and_one_file_of_another_name_is_the_model(sharded, tmp_path):
    save_file({"x": torch.ones(1)}, sharded / "consolidated.safetensors")
    for path in (sharded, sharded / "model.safetensors.index.json"):
        report = examine(path)
        assert report.is_healthy and "consolidated.safetensors" in report.notes[0]
    (tmp_path / "other").mkdir()
    save_file(prune_rows_(healthy()), tmp_path / "other" / "diffusion.safetensors")
    assert examine(tmp_path / "other", sparsity=0.5).is_healthy


def test_one_file_and_a_plain_state_dict_agree_with_a_folder(tmp_path):
    tensors = prune_rows_(healthy())
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({"state_dict": {f"_orig_mod.{name}": t for name, t in tensors.items()}}, tmp_path / "b.pt")
    expected = {layer.name: layer for layer in examine(folder(tmp_path / "model", tensors)).layers}
    for name in ("a.pt", "b.pt", "model/model.safetensors"):
        assert {layer.name: layer for layer in examine(tmp_path / name).layers} == expected


# --- masks and digests ---


def test_pruning_left_in_two_tensors_is_found(tmp_path):
    linear = torch.nn.Linear(8, 8)
    prune.l1_unstructured(linear, "weight", 0.5)
    save_file({k: v.contiguous() for k, v in linear.state_dict().items()}, tmp_path / "a.safetensors")
    report = examine(tmp_path / "a.safetensors", sparsity=0.5)
    assert places(report) == {("not-removed", "weight")}
    assert layer(report, "weight").num_zeros == 32


def test_the_digest_is_that_of_the_masks_however_they_are_stored():
    tensors = prune_rows_(healthy())
    masks = {name: tensors[name] != 0 for name in weights_of(tensors)}
    stored = {name: StoredTensor.of(name, t, "") for name, t in tensors.items()}
    for form in (lambda mask: mask, bits.pack, lambda mask: mask.float(), lambda mask: bits.pack(mask).float()):
        assert digest_of({n: StoredTensor.of(n, form(m), "") for n, m in masks.items()}, stored) == digest(masks)


def test_a_stored_digest_is_held_to_the_masks(tmp_path):
    tensors = prune_rows_(healthy())
    state = {"model": tensors, "pruner": state_of(tensors)}
    torch.save(state, tmp_path / "a.pt")
    report = examine(tmp_path / "a.pt", sparsity=0.5, pattern="row")
    assert report.is_healthy and report.digest == state["pruner"]["digest"]
    assert layer(report, UP).num_pruned == layer(report, UP).num // 2

    keep = tensors[UP] != 0
    kept, pruned = keep[0].nonzero()[0], (~keep[0]).nonzero()[0]
    keep[0, kept], keep[0, pruned] = False, True  # the same number of others
    state["pruner"]["masks"][UP] = bits.pack(keep)
    torch.save(state, tmp_path / "a.pt")
    assert kinds(examine(tmp_path / "a.pt", sparsity=0.5)) == {"digest", "came-back"}


@pytest.mark.parametrize("bad", ["short", "stray"])
def test_packed_bits_of_another_tensor_are_found(tmp_path, bad):
    tensors = {"a.weight": torch.randn(3, 3), "b.weight": torch.randn(4, 4)}
    masks = {name: bits.full(t.numel()) for name, t in tensors.items()}
    if bad == "short":
        masks["b.weight"] = masks["b.weight"][:1]
    else:
        masks["a.weight"][-1] = 255
    torch.save({"model": tensors, "pruner": {"masks": masks}}, tmp_path / "a.pt")
    finding = found(examine(tmp_path / "a.pt"), "bad-mask")
    assert finding.where == ("b.weight" if bad == "short" else "a.weight")


def test_masks_come_from_any_file_that_holds_them(tmp_path):
    tensors = prune_rows_(healthy())
    path, state = folder(tmp_path / "model", tensors), state_of(tensors)
    save_file(state["masks"], tmp_path / "0.safetensors")
    for i, value in enumerate((state, {"pruner": state, "model": tensors}, state["masks"])):
        torch.save(value, tmp_path / f"{i}.pt")
    for file in ("0.safetensors", "0.pt", "1.pt", "2.pt"):
        report = examine(path, masks=tmp_path / file, sparsity=0.5, pattern="row")
        assert report.is_healthy and report.digest == state["digest"]


# --- files that are none ---


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", b"", "cannot be read"),
        ("a.safetensors", b"\xff" * 64, "cannot be read"),
        ("a.safetensors", (2**62).to_bytes(8, "little") + b"{}", "cannot be read"),
        ("a.pt", b"PK\x03\x04 no", "not a complete torch.save file"),
        ("a.safetensors.index.json", b"[1]", "weight_map"),
        ("a.safetensors.index.json", b"{", "JSON is damaged"),
        ("a.safetensors.index.json", b"{}", "weight_map"),
        ("a.safetensors.index.json", b"[" * 100_000, "nested too deep"),
        ("a.safetensors.index.json", b'{"weight_map": {"a": "../b.safetensors"}}', "files must be beside it"),
        ("a.safetensors.index.json", b'{"weight_map": {"a": 3}}', "mappings of strings"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        examine(tmp_path / name)


def test_folders_and_states_without_a_model_are_refused(tmp_path):
    torch.save({"step": 3}, tmp_path / "a.pt")
    torch.save([1], tmp_path / "b.pt")
    for name, said in (("a.pt", "no tensors"), ("b.pt", "expected a mapping"), ("", "no safetensors file")):
        with pytest.raises(ValueError, match=said):
            examine(tmp_path / name)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="safe_serialization"):
        examine(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sparsity": 1.0}, r"\[0, 1\)"),
        ({"sparsity": float("nan")}, r"\[0, 1\)"),
        ({"pattern": "4:2"}, "N:M"),
        ({"pattern": "rows"}, "N:M"),
        ({"pattern": "2:4", "sparsity": 0.3}, "a sparsity of 0.5"),
        ({"allow": "everything"}, "kinds of findings"),
        ({"exclude": "nowhere.*"}, "nowhere"),
        ({"masks": "nowhere.pt"}, "no mask file"),
    ],
    ids=str,
)
def test_mistakes_are_refused(tmp_path, options, said):
    path = folder(tmp_path, healthy())
    with pytest.raises(ValueError, match=said):
        examine(path, **options)


# --- training ---


def test_a_pruner_in_a_script_is_healthy_until_someone_trains_on(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pruner = Pruner(model, optimizer, select=Global(), schedule=Ramp(0.5, begin=1, end=4), every=1)

    def train(steps):
        for _ in range(steps):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def save():
        parts = {"model": model, "optimizer": optimizer, "pruner": pruner}
        torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "a.pt")
        return examine(tmp_path / "a.pt", sparsity=0.5)

    train(6)
    report = save()
    assert report.is_healthy and report.digest == pruner.digest()
    optimizer.state[model[0].weight]["exp_avg"].fill_(1.0)
    assert places(save()) == {("moments", "0.weight")}
    optimizer.state[model[0].weight]["mask"] = bits.full(32 * 48)
    assert kinds(save()) == {"masks-disagree"}
    pruner.remove()
    train(1)
    assert "came-back" in kinds(save())
