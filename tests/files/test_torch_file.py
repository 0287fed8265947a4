"""Files of torch.save are read, old ones too, and what is none of them is refused in a few words."""

import io
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from prunus.doctor import examine
from prunus.files.distributed import read_entries
from prunus.files.torch_file import FORMAT, read_torch_file, write_torch_file

SPANNED = struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 2) + b"PK\x05\x06" + bytes(18)


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "of before 2020"])
@pytest.mark.parametrize("mmap", [True, False])
def test_old_and_new_files_are_read(is_new, mmap, tmp_path):
    state = {"fc.weight": torch.randn(8, 8)}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=is_new)
    assert torch.equal(read_torch_file(tmp_path / "model.pt", mmap=mmap)["fc.weight"], state["fc.weight"])
    assert examine(tmp_path / "model.pt").is_healthy


@pytest.mark.parametrize(
    "content",
    [b"", b"hi\n", b"{}", pickle.dumps(Path("x")), pickle.dumps({"a": io.StringIO}), SPANNED],
    ids=["empty", "text", "json", "an object", "a class", "a zip of several disks"],
)
def test_what_is_no_such_file_is_refused_without_advice_to_execute_it(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.{3,160}$") as refused:
        read_torch_file(tmp_path / "x.pt", mmap=True)
    assert "weights_only" not in str(refused.value) and "mmap" not in str(refused.value)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as source, zipfile.ZipFile(tmp_path / "b.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "b.pt").stat().st_size < 1 << 16
    with pytest.raises(ValueError):
        read_torch_file(tmp_path / "b.pt")


def test_values_that_contain_themselves_have_no_checksum(tmp_path):
    state: dict = {"format": FORMAT, "checksums": {}, "a": []}
    state["a"].append(state["a"])
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="damaged"):
        read_torch_file(tmp_path / "a.pt")


def test_a_tensor_that_repeats_few_numbers_is_refused_with_our_checksums(tmp_path):
    torch.save({"format": FORMAT, "checksums": {}, "a": torch.zeros(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="more elements than the file stores"):
        read_torch_file(tmp_path / "a.pt")


def test_a_file_becomes_the_previous_one_and_is_never_missing(tmp_path):
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    for step in range(3):
        write_torch_file(paths[0], {"step": step}, previous=paths[1])
    assert [read_torch_file(path)["step"] for path in paths] == [2, 1]
    assert sorted(tmp_path.iterdir()) == list(paths)


@pytest.mark.parametrize("place", ["relative_path", "offset", "size", "dtype", "path"])
def test_metadata_that_share_values_many_times_over_are_refused_at_once(place, tmp_path):
    nested: list = []
    for _ in range(100):  # 2^100 values when written out
        nested = [nested, nested]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [])
    info = _StorageInfo("__0_0.distcp", 0, 4)
    changed = {"relative_path": info, "offset": info, "size": tensor, "dtype": tensor.properties}
    if place in changed:
        setattr(changed[place], place, nested)
    paths = {"a": (nested,)} if place == "path" else {}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"a": tensor}, paths, {MetadataIndex("a"): info})))
    with pytest.raises(ValueError) as error:
        read_entries(tmp_path)
    assert len(str(error.value)) < 200
