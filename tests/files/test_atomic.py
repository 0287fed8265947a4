"""A file is whole or not there, and nothing is left beside it."""

import pytest
import torch

from prunus.files.atomic import write_atomically


class Full:
    """A file on a disk without room."""

    def write(self, data):
        raise OSError(28, "No space left on device")

    def flush(self):
        pass


@pytest.mark.parametrize("by_torch", [False, True])
def test_what_cannot_be_written_leaves_the_old_file_alone(by_torch, tmp_path):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.json'"):
        write_atomically(
            tmp_path / "a.json", lambda file: torch.save(torch.ones(9), Full()) if by_torch else Full().write(b"new")
        )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]
