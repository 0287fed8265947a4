"""Files of torch.save are read, old ones too, and what is none of them is refused in a few words."""

import io
import pickle
from pathlib import Path

import pytest
import torch

from prunus.doctor import examine
from prunus.files.torch_file import read_torch_file


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "of before 2020"])
@pytest.mark.parametrize("mmap", [True, False])
def test_old_and_new_files_are_read(is_new, mmap, tmp_path):
    state = {"fc.weight": torch.randn(8, 8)}
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=is_new)
    assert torch.equal(read_torch_file(tmp_path / "model.pt", mmap=mmap)["fc.weight"], state["fc.weight"])
    assert examine(tmp_path / "model.pt").is_healthy


@pytest.mark.parametrize(
    "content",
    [b"", b"hi\n", b"{}", pickle.dumps(Path("x")), pickle.dumps({"a": io.StringIO})],
    ids=["empty", "text", "json", "an object", "a class"],
)
def test_what_is_no_such_file_is_refused_without_advice_to_execute_it(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"^.{3,160}$") as refused:
        read_torch_file(tmp_path / "x.pt", mmap=True)
    assert "weights_only" not in str(refused.value) and "mmap" not in str(refused.value)
