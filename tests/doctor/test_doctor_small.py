"""The small form is examined like the plain one, and a damaged one is not examined at all."""

import json

import pytest
import torch
from on_grids import on_grid
from patients import CONFIG, folder, healthy, places, prune_groups_, prune_rows_, weights_of

from prunus.cli import main
from prunus.doctor import examine
from prunus.export import save_sparse
from prunus.ops.grid import Grid

UP = "model.layers.1.mlp.up_proj.weight"


def small(path, tensors, **options):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": True}))
    save_sparse(tensors, path / "sparse.safetensors", **options)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prune", [prune_rows_, prune_groups_])
@pytest.mark.parametrize("limit", [10**9, 3000], ids=["one file", "shards"])
def test_the_small_form_agrees_with_the_plain_one(tmp_path, prune, dtype, limit):
    tensors = prune(healthy(dtype))
    plain = examine(folder(tmp_path / "plain", tensors), sparsity=0.5)
    path = small(tmp_path / "small", tensors, max_shard_bytes=limit)
    report = examine(path, sparsity=0.5)
    assert report.is_healthy and report.kind == "small folder" and report.pattern == plain.pattern
    assert {one.name: one for one in report.layers} == {one.name: one for one in plain.layers}
    assert len(list(path.glob("*.safetensors"))) == 1 or limit == 3000


def on_grids_(tensors, bits):
    """Round the weights to grids, which are returned."""
    grids = {}
    for name in weights_of(tensors):
        tensors[name], grids[name] = on_grid(tensors[name], Grid(bits))
    return grids


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("limit", [10**9, 1000], ids=["one file", "shards"])
def test_codes_are_examined_as_the_values_that_they_mean_and_a_note_says_their_bits(tmp_path, bits, limit):
    tensors = prune_rows_(healthy(torch.bfloat16))
    grids = on_grids_(tensors, bits)
    plain = examine(folder(tmp_path / "plain", tensors), sparsity=0.5)
    report = examine(small(tmp_path / "small", tensors, grids=grids, max_shard_bytes=limit), sparsity=0.5)
    assert report.is_healthy and report.pattern == plain.pattern
    assert {one.name: one for one in report.layers} == {one.name: one for one in plain.layers}
    assert f"kept weights of 12 tensors are in {bits} bits" in report.notes


def test_one_small_file_is_a_path_too_and_what_is_sick_in_it_is_found(tmp_path):
    tensors = prune_rows_(healthy())
    save_sparse(tensors, tmp_path / "a.safetensors")
    report = examine(tmp_path / "a.safetensors", sparsity=0.5)
    assert report.is_healthy and report.kind == "small file" and "where plain tensors take" in report.notes[0]
    tensors[UP][0, tensors[UP][0].nonzero()[0]] = float("inf")
    save_sparse(tensors, tmp_path / "a.safetensors")
    assert places(examine(tmp_path / "a.safetensors", sparsity=0.5)) == {("not-finite", UP)}


def test_tied_tensors_are_one(tmp_path):
    tensors = prune_rows_(healthy())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    report = examine(small(tmp_path / "small", tensors))
    assert report.is_healthy and any("one tensor under two names" in note for note in report.notes)


@pytest.mark.parametrize("is_coded", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lost shard"])
def test_damage_is_one_line_and_exit_code_2(tmp_path, capsys, damage, is_coded):
    tensors = prune_rows_(healthy())
    grids = on_grids_(tensors, 4) if is_coded else None
    path = small(tmp_path / "small", tensors, grids=grids, max_shard_bytes=800 if is_coded else 3000)
    file = sorted(path.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-3] ^= 4
    file.write_bytes(data[:-5] if damage == "cut" else data)
    if damage == "lost shard":
        file.unlink()
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(path)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and len(said.err.strip().splitlines()) == 1
    assert file.name in said.err
