"""A file is whole or not there, and nothing is left beside it."""

import pytest

from prunus.files import write_atomically


def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    def full(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "a.json").write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a.json", full)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]
