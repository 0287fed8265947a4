"""A bit that changes in a checkpoint is found when it is read, or was in no value."""

import errno
import json
import random
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_parallel_input import a_state
from unbroken_run import assert_same

from prunus.doctor import examine
from prunus.files.torch_file import write_torch_file
from prunus.lab.checkpoint import load_checkpoint, resume
from prunus.lab.parallel import Team
from prunus.lab.sharded_checkpoint import by_number, save_sharded

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled", "ignore:.*TypedStorage")


def one_file(folder: Path) -> Path:
    state = by_number(a_state(), whole=True)
    write_torch_file(folder / "checkpoint.pt", {key: value for key, value in state.items() if key != "digest"})
    return folder / "checkpoint.pt"


def of_ranks(folder: Path) -> Path:
    return save_sharded(folder, a_state(), Team())


def flips(path: Path, number: int, seed: int) -> list[tuple[Path, int, int]]:
    """Bits of a checkpoint: some anywhere, some in each of its small files."""
    rng = random.Random(seed)
    files = [path] if path.is_file() else sorted(path.iterdir())
    return [
        (file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8))
        for file in files
        for _ in range(number // len(files))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [one_file, of_ranks])
def test_every_flipped_bit_is_found_or_harmless(make, tmp_path):
    path, number = make(tmp_path), 1000
    whole, found, seed = load_checkpoint(path), 0, 7
    for file, place, bit in flips(path, number, seed):
        data = file.read_bytes()
        file.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        case = f"seed {seed}: bit {bit} of byte {place} of {file.name}"
        try:
            assert_same(load_checkpoint(path), whole, case)
        except ValueError as error:
            assert "damaged" in str(error) and "\n" not in str(error), case
            found += 1
        file.write_bytes(data)
    assert found > number // 3
    assert_same(load_checkpoint(path), whole)


@pytest.mark.parametrize("where", ["a weight", "the random state"])
@pytest.mark.parametrize("make", [one_file, of_ranks])
def test_the_doctor_finds_a_flipped_bit(make, where, tmp_path):
    path = make(tmp_path)
    state = load_checkpoint(path)
    weight = (state["model"]["b.weight"] if where == "a weight" else state["rng"][100:200]).numpy().tobytes()
    file = path if path.is_file() else path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(weight) + 3] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        load_checkpoint(path)
    try:
        report = examine(path)
    except ValueError as error:
        assert "checksum" in str(error)
    else:
        assert not report.is_healthy and "checksum" in str(report)


@pytest.mark.parametrize("make", [one_file, of_ranks])
def test_a_checkpoint_that_lost_its_checksums_is_damaged(make, tmp_path):
    path = make(tmp_path)
    if make is one_file:
        torch.save(load_checkpoint(path), path)
    else:
        (path / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"damaged.*checksums"):
        load_checkpoint(path)


def test_checksums_of_other_blocks_are_damage(tmp_path):
    path = of_ranks(tmp_path)
    other = save_sharded(tmp_path / "other", a_state(4), Team())
    shutil.copy(other / "checksums.json", path / "checksums.json")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "change", [{"step": "3"}, {"model": []}, {"run": {"steps": "x"}}, {"optimizer": None}, {"rng": 3}]
)
def test_values_of_other_kinds_are_one_line(change, tmp_path):
    path = one_file(tmp_path)
    write_torch_file(path, load_checkpoint(path) | change)
    with pytest.raises(ValueError, match=r"checkpoint\.pt") as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)


def test_no_checkpoint_warns_of_itself(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_checkpoint(one_file(tmp_path))
    assert json.loads((of_ranks(tmp_path) / "checksums.json").read_text())["version"] == 1


@pytest.mark.parametrize(("number", "expected"), [(errno.EMFILE, OSError), (errno.EINVAL, ValueError)])
def test_a_checkpoint_that_the_system_does_not_let_us_read_is_not_taken_for_damaged(
    number, expected, tmp_path, monkeypatch
):
    path = one_file(tmp_path)
    shutil.copy(path, tmp_path / "checkpoint.previous.pt")

    def refuse(*_, **__):
        raise OSError(number, "said by the system", str(path))

    monkeypatch.setattr(torch, "load", refuse)
    training = SimpleNamespace(team=Team(), run=SimpleNamespace(out=tmp_path))
    with pytest.raises(expected, match="said by the system"):
        resume(training)
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "checkpoint.previous.pt"}
