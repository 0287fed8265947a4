"""A model in several files is whole or refused: a damaged index, files of two saves, one file missing."""

import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from every_encoding import grids, tensors
from test_compact import same

from prunus import load_sparse, save_sparse
from prunus.files import writer


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_sparse(tensors(), tmp_path / "model.safetensors", grids=grids(), max_shard_bytes=600)
    assert len(list(tmp_path.iterdir())) > 3
    return tmp_path


def test_what_was_saved_under_a_name_is_found_under_it(shards):
    found, wanted = load_sparse(shards / "model.safetensors"), tensors()
    assert set(found) == set(wanted) and all(same(found[name], wanted[name]) for name in wanted)


def index_of(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", ".a.safetensors", "a.bin", "nul\0"]
)
def test_an_index_names_only_files_beside_it(name, shards):
    index = index_of(shards)
    index["weight_map"]["bias"] = name
    del index["metadata"]["prunus"]
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="files must be beside it"):
        load_sparse(shards)


def test_an_index_that_lacks_a_tensor_is_refused_even_with_its_checksum_mended(shards):
    index = index_of(shards)
    del index["weight_map"]["bias"]
    path = shards / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_sparse(shards)
    content = [sorted(index["metadata"]["prunus"]["files"].items()), sorted(index["weight_map"].items())]
    index["metadata"]["prunus"]["crc32"] = f"{zlib.crc32(json.dumps(content).encode()):08x}"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="disagree about 'bias'"):
        load_sparse(shards)


def test_files_of_two_saves_are_not_mixed(shards, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    doubled = {name: tensor * 2 for name, tensor in tensors().items() if name != "tied"}
    both = doubled | {"tied": doubled["a"]}
    save_sparse(both, other / "model.safetensors", grids=grids(2), max_shard_bytes=600)
    file = sorted(shards.glob("*.safetensors"))[1]
    shutil.copyfile(other / file.name, file)
    with pytest.raises(ValueError, match=r"not the file that .*index\.json was written with"):
        load_sparse(shards)
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_sparse(shards)


def test_a_save_that_would_leave_two_models_in_one_place_is_refused(shards):
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    for options in ({}, {"max_shard_bytes": 600}):
        with pytest.raises(ValueError, match="remove that model first"):
            save_sparse({"a": torch.ones(3)}, shards / "model.safetensors", **options)
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == before


def test_one_file_is_not_replaced_by_several(tmp_path):
    path = tmp_path / "model.safetensors"
    save_sparse({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="remove that model first"):
        save_sparse(tensors(), path, max_shard_bytes=600)
    assert load_sparse(path)["a"].tolist() == [1, 1, 1] and len(list(tmp_path.iterdir())) == 1


def test_a_second_model_of_several_files_never_mixes_with_the_first(tmp_path, monkeypatch):
    first, second = ({name: torch.full((400,), value) for name in "abc"} for value in (1.0, 2.0))
    inner, path = writer.publish, tmp_path / "m.safetensors"

    def publish(*args, **kwargs):
        monkeypatch.setattr(writer, "publish", inner)
        save_sparse(first, path, max_shard_bytes=2000)  # another process is quicker
        inner(*args, **kwargs)

    monkeypatch.setattr(writer, "publish", publish)
    with pytest.raises(ValueError, match="remove that model first"):
        save_sparse(second, path, max_shard_bytes=2000)
    assert all(torch.equal(tensor, first[name]) for name, tensor in load_sparse(path).items())
    assert len(list(tmp_path.iterdir())) == 4


def test_an_index_says_the_newest_version_of_its_files_and_a_newer_one_is_refused(shards, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_sparse(tensors(), other / "model.safetensors", max_shard_bytes=600)
    assert [index_of(folder)["metadata"]["prunus"]["version"] for folder in (shards, other)] == [2, 1]
    index = index_of(shards)
    index["metadata"]["prunus"]["version"] = 3
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not of version 1 or 2"):
        load_sparse(shards)
