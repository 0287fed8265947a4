"""Activations beyond a limit of memory go to a file and have the same bits there; the file ends with the process."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import build, tokens
from hypothesis import given
from hypothesis import strategies as st
from probe_models import cnn, llama, mlp
from torch import nn
from torch.utils import _pytree as pytree

from prunus import BlockTuning, Repair, prune
from prunus.oneshot.blocks import Stream
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.disk_offload import LIMITS, by_block
from prunus.oneshot.forward import outputs
from prunus.oneshot.samples import Chunk, copied_rows, room_for, rows, write_rows
from prunus.oneshot.spill import FileRows, Room, Spill, _File

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def drawn(shape, dtype):
    return (torch.randn(shape) * 10).to(dtype)


def in_memory(tree):
    return pytree.tree_map(lambda leaf: leaf[:] if isinstance(leaf, FileRows) else leaf, tree)


def same(a, b):
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    return len(left) == len(right) and all(
        torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(y) else x == y
        for x, y in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (1, 4), (5, 0), (4, 3, 2, 5)])
def test_rows_come_back_as_they_were_written(dtype, shape, tmp_path):
    values, spill = drawn(shape, dtype), Spill(0, tmp_path)
    in_file = spill.room(values[:1], len(values))
    assert isinstance(in_file, FileRows) or not values.numel()
    for row in reversed(range(len(values))):
        in_file[row : row + 1] = values[row : row + 1]
    order = torch.tensor([len(values) - 1, 0, 0])
    assert torch.equal(in_file[:], values) and torch.equal(in_file[1:3], values[1:3])
    assert torch.equal(in_file[order], values[order]) and in_file.nbytes == values.nbytes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3)])
def test_dimensions_keep_their_order_in_memory(dims, tmp_path):
    values = torch.randn(4, 5, 6, 7).permute(dims)
    in_file = Spill(0, tmp_path).room(values, 4)
    in_file[:] = values
    assert torch.equal(in_file[:], values) and in_file[1:3].stride() == values[1:3].stride()


@pytest.mark.parametrize("limit", [0, 100, 200, 1 << 20])
def test_trees_are_the_same_however_much_of_them_is_in_memory(limit, tmp_path):
    tree = {
        "x": drawn((6, 4), torch.float32),
        "more": [drawn((6, 2, 3), torch.bfloat16), drawn((3,), torch.float32), 7],
    }
    spill = Spill(limit, tmp_path)
    chunks = [Chunk(0, 0, 2), Chunk(0, 2, 5), Chunk(0, 5, 6)]
    stored = room_for(rows(tree, slice(0, 2), 6), 2, 6, None, spill)
    for chunk in chunks:
        stored = write_rows(stored, rows(tree, chunk.rows, 6), chunk, 6, spill)
    assert same(in_memory(stored), tree)
    assert spill.used == sum(
        leaf.nbytes for leaf in pytree.tree_leaves(stored) if torch.is_tensor(leaf) and len(leaf) == 6
    )
    assert spill.used <= limit
    other = copied_rows(stored, 6, spill)
    stored = write_rows(stored, pytree.tree_map(lambda x: x * 0, rows(tree, slice(0, 2), 6)), chunks[0], 6, spill)
    assert same(in_memory(other), tree) and same(rows(other, [3, 0], 6), rows(tree, [3, 0], 6))
    del stored, other
    assert spill.used == 0


def test_space_that_was_given_back_is_used_again(tmp_path):
    spill, x = Spill(0, tmp_path), torch.randn(8, 16)
    for _ in range(5):
        stored = spill.room(x, 8)
        stored[:] = x
        small = spill.room(x[:, :4], 8)
        small[:] = x[:, :4]
        assert torch.equal(stored[:], x) and torch.equal(small[:], x[:, :4])
        del stored, small
    assert os.fstat(spill._file.file.fileno()).st_size <= 2 * x.nbytes
    spill.close()
    again = spill.room(x, 8)
    again[:] = x
    assert torch.equal(again[:], x)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=40))
def test_pieces_of_the_file_never_overlap_and_all_of_it_comes_back_as_one(steps):
    file, pieces = _File(Path(tempfile.gettempdir())), []
    for takes, number in steps:
        if takes:
            offset = file.take(number)
            assert all(offset + number <= start or start + size <= offset for start, size in pieces if size and number)
            pieces.append((offset, number))
        elif pieces:
            file.give(*pieces.pop(number % len(pieces)))
    taken = sum(size for _, size in pieces)
    assert taken + sum(size for _, size in file.gaps) == file.end <= sum(number for takes, number in steps if takes)
    for piece in pieces:
        file.give(*piece)
    assert sum(size for _, size in file.gaps) == file.end and len([gap for gap in file.gaps if gap[1]]) <= 1
    file.file.close()


def test_a_room_takes_memory_then_its_share_of_the_disk_and_gets_both_back(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4000))
    x, spill = torch.randn(8, 16), Spill(0, tmp_path)  # 512 bytes
    room = Room(600, spill)
    kept = [room.copy(x) for _ in range(2)]
    assert torch.is_tensor(kept[0]) and isinstance(kept[1], FileRows)
    assert all(torch.equal(rows[:], x) for rows in kept)
    assert room.has(576) and not room.has(577)  # 88 bytes of memory and 488 of the disk
    for stored in kept:
        room.give(stored)
    assert room.has(1600) and not room.has(1601)
    assert torch.is_tensor(Room(0).take(x, 8)) and not Room(0).has(1)  # without a file, whoever takes has asked


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("memory", [0, 3000, 1 << 30])
@pytest.mark.parametrize("make", [cnn, llama, mlp])
def test_a_stream_with_a_limit_gives_the_bits_of_one_without(make, memory, offload, tmp_path):
    case = make()
    calibration = Calibration(case.model, case.batches, offload=offload, memory=memory, scratch=tmp_path)

    def forward(chunk):
        return outputs(calibration.model, calibration.batch(chunk))

    with torch.no_grad(), calibration.open():
        limited, free = calibration.stream(calibration.blocks), Stream(calibration.blocks, calibration.samples)
        for k in range(len(calibration.blocks)):
            for stream in (limited, free):
                stream.advance(k, forward, lambda act: calibration.visit(2, act))
            for chunk in calibration.samples.chunks(3):
                assert same(limited.stored(k + 1, chunk), free.stored(k + 1, chunk))
        assert calibration.spill.used <= memory // 2 and limited.num_bytes == free.num_bytes
        other = calibration.stream(calibration.blocks)
        other.copy_from(limited, len(calibration.blocks))
        assert same(in_memory(other._outputs), free._outputs)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tune", [False, BlockTuning(epochs=1, whole_epochs=0, batch=2)])
@pytest.mark.parametrize("memory", [0, 20_000])
@pytest.mark.parametrize("make", [llama, cnn])
def test_repair_with_a_limit_gives_the_weights_of_repair_without(make, memory, tune, tmp_path):
    case, repair = make(), Repair(iterations=9, tune=tune)
    whole = deepcopy(case.model)
    prune(whole, case.batches, sparsity=0.5, repair=repair)
    for state in (None, tmp_path / "state"):
        ours = deepcopy(case.model)
        prune(ours, case.batches, sparsity=0.5, repair=repair, memory=memory, state=state)
        assert same(ours.state_dict(), whole.state_dict())


def test_a_folder_is_pruned_with_a_limit_to_the_same_bits(tmp_path):
    model, ids = build("llama"), tokens(6)
    model.save_pretrained(tmp_path / "dense")
    how = {"sparsity": 0.5, "score": "wanda", "repair": Repair(iterations=9)}
    for name, memory in {"free": None, "limited": 0}.items():
        prune(tmp_path / "dense", [ids], out=tmp_path / name, memory=memory, **how)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("free", "limited")]
    assert files[0] == files[1]


@pytest.mark.parametrize("limit", [0, 300])
def test_passes_block_by_block_keep_to_the_limit_of_their_model(limit):
    model, x = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), torch.randn(9, 6)
    chunks = [Chunk(0, 0, 4), Chunk(0, 4, 8), Chunk(0, 8, 9)]
    LIMITS[model] = limit, None
    for chunk, value in zip(chunks, by_block(model, list(model), chunks, lambda c: model(x[c.rows])), strict=True):
        assert torch.equal(value, model(x[chunk.rows]))


def test_a_limit_must_be_a_number_of_bytes():
    case = mlp()
    for wrong in (-1, 0.5, "4GB"):
        with pytest.raises(ValueError, match=r"^memory must be a number of bytes, at least 0, or None, got "):
            Calibration(case.model, case.batches, memory=wrong)


SCRIPT = """
    import os, resource, signal, sys, torch
    from pathlib import Path
    from prunus.oneshot.spill import Spill
    folder = Path(sys.argv[1])
    x = torch.randn(64, 1024)
    in_file = Spill(0, folder).room(x, 64)
"""


def started(code, folder):
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_that_names_the_folder(tmp_path):
    code = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            in_file[:] = x
        except OSError as error:
            print(error.errno, error)
    """
    done = started(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "beyond the memory limit" in done.stdout and str(tmp_path) in done.stdout
    assert len(done.stdout.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path):
    done = started("in_file[:] = x\nos.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


def test_a_folder_is_made_and_a_file_in_its_place_is_one_line(tmp_path):
    Spill(0, tmp_path / "new").room(torch.zeros(2, 3), 2)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="activations beyond the memory limit go there"):
        Spill(0, tmp_path / "file").room(torch.zeros(2, 3), 2)
