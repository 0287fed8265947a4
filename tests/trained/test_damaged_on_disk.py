"""Files that are damaged, cut or changed stop a model on disk with one line; what is done is kept, and it goes on."""

import gc
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from covering import quickly

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
from families import SIZES, build, text  # noqa: E402

from prunus import prune  # noqa: E402
from prunus.cli import main  # noqa: E402
from prunus.files.reader import open_tensors  # noqa: E402
from prunus.oneshot.disk_offload import disk_offload_of  # noqa: E402
from prunus.oneshot.journal import Journal  # noqa: E402
from prunus.oneshot.model_folder import model_on_disk, save_from_disk  # noqa: E402

LLAMA = {"llama": ("LlamaForCausalLM", SIZES | {"num_hidden_layers": 3}, text)}


@pytest.fixture
def folder(tmp_path):
    build("llama", LLAMA).save_pretrained(tmp_path / "model", max_shard_size="12KB")
    np.random.default_rng(0).integers(3, 64, 400).astype("<u2").tofile(tmp_path / "tokens.u16")
    return tmp_path / "model"


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def written(folder):
    with open_tensors(folder) as tensors:
        return {name: tensors.read(name).numpy().tobytes() for name in tensors.records}


def pruned(folder, out, **how):
    """The tensors that a call writes, with its state beside the folder."""
    model = model_on_disk(folder)
    prune(model, [text()], state=folder.with_name("state"), progress=False, **how)
    out.mkdir()
    save_from_disk(model, folder, out)
    return written(out)


def cut(path):
    os.truncate(path, path.stat().st_size - 4)


def overwrite(path):
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half : half + 64] = bytes(255 - byte for byte in data[half : half + 64])
    with path.open("r+b") as file:
        file.write(data)


def delete(path):
    path.unlink()


def damage_header(path):
    with path.open("r+b") as file:
        file.seek(9)
        file.write(b"\0\0")


@pytest.mark.parametrize("damage", [cut, delete, damage_header])
def test_a_shard_that_is_missing_or_damaged_is_refused_in_one_line_before_the_work_begins(folder, damage):
    damage(shards(folder)[-1])
    with pytest.raises(ValueError, match=shards(folder)[-1].name if damage is not delete else "missing") as raised:
        model_on_disk(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", quickly([cut, overwrite], cut))
def test_a_shard_that_changes_while_it_is_read_stops_the_call_and_once_it_is_back_the_call_goes_on(
    folder, tmp_path, monkeypatch, damage
):
    wanted = pruned(folder, tmp_path / "wanted")
    shutil.rmtree(tmp_path / "state")
    last, save, saved = shards(folder)[-1], Journal.save, []
    kept = last.read_bytes()

    def save_and_damage(self, file, *given):
        save(self, file, *given)
        saved.append(file)
        if len(saved) == 3:
            damage(last)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", save_and_damage)
        with pytest.raises(OSError, match=f"{last.name} changed .* restore it") as raised:
            pruned(folder, tmp_path / "out")
    assert "\n" not in str(raised.value) and len(saved) >= 3 and not (tmp_path / "out").exists()
    last.write_bytes(kept)
    again = []
    monkeypatch.setattr(Journal, "save", lambda self, file, *given: (again.append(file), save(self, file, *given)))
    assert pruned(folder, tmp_path / "out") == wanted
    assert again and not set(again) & set(saved)


def test_a_folder_whose_values_changed_since_the_call_began_is_refused(folder, tmp_path):
    pruned(folder, tmp_path / "out")
    overwrite(shards(folder)[1])
    with pytest.raises(ValueError, match="started with other weights"):
        pruned(folder, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("damage", quickly([cut, overwrite, delete], overwrite))
def test_a_finished_group_that_is_gone_or_damaged_is_done_again_and_nothing_else(folder, tmp_path, damage):
    wanted = pruned(folder, tmp_path / "wanted")
    shutil.rmtree(tmp_path / "state")
    model = model_on_disk(folder)
    prune(model, [text()], state=tmp_path / "state", progress=False)
    group = sorted((tmp_path / "state").glob("*.pt"))[4]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "state").glob("*.pt") if path != group}
    damage(group)
    (tmp_path / "out").mkdir()
    with (
        pytest.warns() if damage is not delete else nullcontext(),
        pytest.raises(OSError, match="repeat the call"),
    ):
        save_from_disk(model, folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with pytest.warns(match="is computed again") if damage is not delete else nullcontext():
        assert pruned(folder, tmp_path / "out") == wanted
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_that_is_dropped_closes_its_files(folder):
    model = model_on_disk(folder)
    offload = disk_offload_of(model)
    assert _open_files(folder) == len(shards(folder))
    del model
    gc.collect()
    assert offload is not None and _open_files(folder) == 0


def _open_files(folder):
    return sum(str(folder) in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_the_command_says_it_in_one_line_keeps_what_is_done_and_goes_on(folder, tmp_path, monkeypatch, capsys):
    data = (
        f"--tokens {tmp_path}/tokens.u16 --eval-tokens {tmp_path}/tokens.u16 --samples 4 --length 12 --eval-windows 6"
    )
    main(["prune", str(folder), *data.split(), "--out", str(tmp_path / "wanted")])
    last, save, saved = shards(folder)[-1], Journal.save, []
    kept = last.read_bytes()

    def save_and_cut(self, file, *given):
        save(self, file, *given)
        saved.append(file)
        if len(saved) == 3:
            cut(last)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", save_and_cut)
        with pytest.raises(SystemExit):
            main(["prune", str(folder), *data.split(), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("prunus prune: ") and f"{last.name} changed" in said
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.unfinished").is_dir()
    with pytest.raises(SystemExit):  # before the work begins
        main(["prune", str(folder), *data.split(), "--out", str(tmp_path / "out")])
    assert last.name in capsys.readouterr().err.splitlines()[-1]
    last.write_bytes(kept)
    main(["prune", str(folder), *data.split(), "--out", str(tmp_path / "out")])
    assert written(tmp_path / "out") == written(tmp_path / "wanted")
    assert not (tmp_path / ".out.unfinished").exists()
