"""Nobody waits for the writer of a pipe; a loop of links and a full disk are one line that says where."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prunus import load_sparse, save_sparse
from prunus.cli import main
from prunus.doctor import examine
from prunus.files.atomic import new_folder
from prunus.files.distributed import StoredBlock, read_block
from prunus.files.gguf_header import check_gguf
from prunus.files.json_file import read_json
from prunus.files.regular import check_regular, check_regular_files
from prunus.files.torch_file import read_torch_file
from prunus.lab.run_files import read_metrics
from prunus.lab.study.arms import read_base
from prunus.trained.data import read_batches

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes with names")


class Waited(BaseException):
    """Raised inside a reader that waits; nothing may catch it."""


@pytest.fixture
def impatient() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS = {
    "torch file": ("a.pt", read_torch_file),
    "GGUF": ("a.gguf", check_gguf),
    "JSON": ("a.json", read_json),
    "settings": ("a.toml", read_base),
    "metrics": ("metrics.jsonl", lambda path: read_metrics(path.parent)),
    "arrays": ("a.npz", read_batches),
    "sparse file": ("a.safetensors", load_sparse),
    "doctor, file": ("a.safetensors", examine),
    "doctor, folder": ("model.safetensors", lambda path: examine(path.parent)),
    "doctor, shard": ("b-00001-of-00002.safetensors", lambda path: examine(path.parent)),
    "distributed": ("__0_0.distcp", lambda path: read_block(path.parent, StoredBlock(path.name, 0, 4))),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_nobody_waits_for_its_writer(reader, tmp_path):
    name, read = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError) as error:
        read(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.usefixtures("impatient")
def test_a_folder_with_a_pipe_is_refused_before_a_library_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    from prunus.export import load_model
    from prunus.trained.data import read_token_file, tokenizer_of

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    os.mkfifo(tmp_path / "model" / "tokenizer.json")
    for read in (tokenizer_of, load_model, lambda folder: read_token_file(tmp_path / "a.txt", folder, is_text=True)):
        with pytest.raises(ValueError, match=r"tokenizer\.json is a pipe"):
            read(tmp_path / "model")


@pytest.mark.usefixtures("impatient")
def test_the_card_of_a_file_beside_a_pipe_does_not_read_it(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model" / "model.safetensors")
    os.mkfifo(tmp_path / "model" / "config.json")
    main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")])
    assert "out: " in capsys.readouterr().out and not (tmp_path / "out" / "config.json").exists()


def test_files_folders_links_and_nothing_pass(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    check_regular_files(tmp_path)
    check_regular(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a device"):
        check_regular(Path("/dev/zero"))


@pytest.mark.parametrize("below", ["", "below"])
def test_a_loop_of_links_is_no_place_to_write_to(below, tmp_path, capsys):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(ValueError, match="symbolic link to itself"), new_folder(tmp_path / "one" / below):
        pass
    save_file({"a": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "one" / below)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "one" in said
    for command in (["doctor"], ["eval"], ["report"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, str(tmp_path / "one" / below)])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes, which writers see as they see a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    tensors = {"a": torch.randn(300, 300)}
    for options in ({}, {"max_shard_bytes": 1000}):
        with pytest.raises(OSError, match=r"a\.safetensors'") as error, small_disk(100_000):
            save_sparse(tensors, tmp_path / "a.safetensors", **options)
        assert error.value.errno and not list(tmp_path.iterdir())


def test_a_full_disk_under_a_new_folder_names_the_folder(tmp_path, capsys):
    save_file({"a": torch.randn(300, 300)}, tmp_path / "a.safetensors")
    with pytest.raises(SystemExit), small_disk(100_000):
        main(["export", str(tmp_path / "a.safetensors"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.strip().endswith("out'") and ".part" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
