"""What is saved comes back bit for bit, as an ordinary safetensors file, in no more bytes than promised."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from every_encoding import grids
from every_encoding import tensors as every_encoding
from hypothesis import given
from hypothesis import strategies as st
from on_grids import on_grid
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_compact import drawn, same
from test_sparse_codes import example

from prunus import load_sparse, save_sparse
from prunus.export.convert import ExportJob, convert
from prunus.files import checksum
from prunus.files.encode import CODED_DTYPES
from prunus.files.metadata import ENCODINGS
from prunus.files.nofm import NOFM, indices_of, mask_of_indices, obeys, padded
from prunus.files.safetensors_header import DTYPES
from prunus.ops import bits
from prunus.ops.grid import Grid

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def nofm(n: int, m: int, shape=(8, 32), dtype=torch.float32) -> torch.Tensor:
    """Random values of which at most n of every m are not zero."""
    groups = torch.randn(shape).unflatten(-1, (-1, m))
    order = torch.rand(groups.shape).argsort(-1)
    return groups.masked_fill(order >= n, 0).flatten(-2).to(dtype)


def assorted() -> dict[str, torch.Tensor]:
    """Tensors of every kind that a file may hold."""
    found = {f"{name}.{density}": drawn(321, dtype, density) for name, dtype in DTYPES.items() for density in (0.3, 1)}
    found |= {f"{n}:{m}": nofm(n, m) for n, m in [(1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (3, 4)]}
    found |= {"empty": torch.empty(0, 3), "none": torch.empty(3, 0), "scalar": torch.tensor(2.0)}
    found |= {"zero": torch.zeros(()), "zeros": torch.zeros(40, 40), "one zero": torch.tensor([0.0])}
    found |= {
        "strided": torch.randn(9, 7).T,
        "step": torch.zeros(40, 6)[:, ::2],
        "": torch.ones(1),
        "ü\n\"'\\": torch.ones(2),
    }
    found |= {"x": torch.zeros(64), "x.bits": torch.zeros(64), "x.values": torch.ones(1), "y.indices": torch.ones(1)}
    found["y"] = nofm(1, 4)
    found["again"] = found["x"]
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert same(found[name], tensor.contiguous()), name


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    tensors = assorted()
    saved = save_sparse(tensors, tmp_path / "a.safetensors", metadata={"who": "me"})
    assert_same(load_sparse(tmp_path / "a.safetensors"), tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert {row.encoding for row in saved.rows} == {"dense", "bitmask", "same", *NOFM}
    assert all(row.stored_bytes <= row.dense_bytes for row in saved.rows)


def test_it_is_an_ordinary_safetensors_file_whose_entries_are_aligned(tmp_path):
    tensors = assorted() | every_encoding()
    saved = save_sparse(tensors, tmp_path / "a.safetensors", grids=grids())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["format"] == "prunus"
    assert sum(sizes.values()) == saved.stored_bytes
    head = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert (8 + length) % 64 == 0
    for name, entry in json.loads(head[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % DTYPES[entry["dtype"]].itemsize == 0


@given(st.data())
def test_any_tensor_comes_back(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
    density = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    tensor = drawn(int(np.prod(shape, dtype=int)), dtype, density).view(shape)
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    save_sparse({"a": tensor}, path)
    assert_same(load_sparse(path), {"a": tensor})


@pytest.mark.parametrize(
    ("dtype", "sparsity", "largest"),
    [
        (torch.float32, 0.5, 0.535),
        (torch.bfloat16, 0.5, 0.566),
        (torch.float16, 0.5, 0.566),
        (torch.float32, 0.8, 0.235),
        (torch.bfloat16, 0.8, 0.27),
    ],
    ids=str,
)
def test_files_are_as_small_as_promised(dtype, sparsity, largest, tmp_path):
    tensors = {f"layer.{i}.weight": torch.randn(256, 256).to(dtype) for i in range(4)}
    for tensor in tensors.values():
        tensor.view(-1)[torch.randperm(tensor.numel())[: round(sparsity * tensor.numel())]] = 0
    save_sparse(tensors, tmp_path / "a.safetensors")
    dense = sum(tensor.nbytes for tensor in tensors.values())
    assert (tmp_path / "a.safetensors").stat().st_size <= largest * dense


@pytest.mark.parametrize("pattern", NOFM.values(), ids=str)
def test_masks_of_n_of_m_come_back_from_their_indices(pattern):
    weight = nofm(pattern.n, pattern.m, (16, 40))
    packed = bits.pack(weight != 0)
    full = padded(packed, pattern)
    kept = bits.unpack(full, weight.shape).unflatten(-1, (-1, pattern.m))
    assert obeys(packed, pattern) and (kept.sum(-1) == pattern.n).all() and not (packed & ~full).any()
    indices = indices_of(full, pattern)
    assert len(indices) == pattern.num_bytes(weight.numel())
    assert torch.equal(mask_of_indices(indices, pattern, weight.numel()), full)


@pytest.mark.parametrize("pattern", NOFM.values(), ids=str)
def test_a_single_weight_too_many_is_no_n_of_m(pattern):
    weight = torch.zeros(64, 4096)
    weight[50, 8 : 8 + pattern.n + 1] = 1
    assert not obeys(bits.pack(weight != 0), pattern)
    weight[50, 8] = 0
    assert obeys(bits.pack(weight != 0), pattern)


@pytest.mark.parametrize(("n", "m", "stored"), [(2, 4, "2:4"), (1, 4, "1:4"), (4, 8, "bitmask"), (3, 4, "bitmask")])
def test_two_of_four_takes_two_bits_a_kept_weight(n, m, stored, tmp_path):
    weight = nofm(n, m, (128, 256), torch.bfloat16)
    (row,) = save_sparse({"a": weight}, tmp_path / "a.safetensors").rows
    assert row.encoding == stored
    if stored != "bitmask":
        kept = weight.numel() // m * n
        assert row.stored_bytes == kept * 2 + kept * 2 // 8


def test_groups_do_not_reach_over_rows(tmp_path):
    weight = torch.zeros(8, 6)
    weight[:, 0] = 1
    (row,) = save_sparse({"a": weight}, tmp_path / "a.safetensors").rows
    assert row.encoding in ("1:2", "bitmask")
    assert_same(load_sparse(tmp_path / "a.safetensors"), {"a": weight})


def test_tensors_that_are_one_stay_one_and_are_stored_once(tmp_path):
    first = torch.randn(50, 50)
    tensors = {"a": first, "b": first, "view": first[:], "part": first[:25], "equal": first.clone(), "T": first.T}
    saved = save_sparse(tensors, tmp_path / "a.safetensors")
    found = load_sparse(tmp_path / "a.safetensors")
    assert found["a"] is found["b"] is found["view"]
    assert found["a"] is not found["equal"]
    assert saved.stored_bytes == first.nbytes * 3.5
    assert_same(found, tensors)


def reader() -> dict:
    """Names that the reader on the page defines."""
    (code,) = re.findall(r"## A reader.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    return scope


def test_the_reader_on_the_page_reads_every_kind_of_tensor(tmp_path):
    tensors = assorted() | every_encoding()
    tensors["large"] = drawn(3 << 19, torch.float16, 0.9)
    more = {f"{dtype}": example(Grid(7, 50, (0, 2)), (4, 60, 8), dtype) for dtype in CODED_DTYPES}
    tensors |= {name: weight for name, (weight, _) in more.items()}
    save_sparse(tensors, tmp_path / "a.safetensors", grids=grids() | {name: one for name, (_, one) in more.items()})
    found = reader()["read"](tmp_path / "a.safetensors")
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_the_page_names_what_the_code_writes():
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in ENCODINGS)
    assert set(reader()["TYPES"]) == set(DTYPES)
    assert f"2^{checksum.PIECE.bit_length() - 1}" in page


@pytest.mark.parametrize("limit", [1, 700, 5000, 10**9])
def test_a_model_in_several_files_comes_back(limit, tmp_path):
    tensors = assorted()
    saved = save_sparse(tensors, tmp_path / "model.safetensors", max_shard_bytes=limit)
    names = sorted(path.name for path in tmp_path.iterdir())
    found = load_sparse(tmp_path)
    assert set(found) == set(tensors) and all(same(found[name], tensors[name].contiguous()) for name in tensors)
    assert found["again"] is found["x"]
    total = len(saved.files)
    if limit == 10**9:
        assert names == ["model.safetensors"]
    else:
        assert names == [
            *(f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)),
            "model.safetensors.index.json",
        ]
        assert load_sparse(tmp_path / "model.safetensors.index.json").keys() == tensors.keys()
        weight_map = json.loads((tmp_path / names[-1]).read_text())["weight_map"]
        for name, file in weight_map.items():
            with safe_open(tmp_path / file, "pt") as opened:
                assert name in opened.keys()  # noqa: SIM118
        with pytest.raises(ValueError, match=f"file 1 of {total}"):
            load_sparse(tmp_path / names[0])


def test_plain_to_small_to_plain_gives_the_same_file_of_tensors(tmp_path):
    tensors = {"w": nofm(2, 4), "b": torch.randn(5).bfloat16(), "i": torch.arange(3)}
    save_file(tensors, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "plain.safetensors", ExportJob(tmp_path / "small.safetensors", check=True))
    convert(tmp_path / "small.safetensors", ExportJob(tmp_path / "back.safetensors", small=False, check=True))
    found = load_file(tmp_path / "back.safetensors")
    assert all(same(found[name], tensor) for name, tensor in tensors.items()) and found.keys() == tensors.keys()
    with safe_open(tmp_path / "back.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_saving_twice_gives_the_same_bytes(tmp_path):
    tensors = assorted()
    for name in ("a", "b"):
        save_sparse(tensors, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


MEMORY = """
import re, sys, torch
from pathlib import Path
from prunus.export import load_sparse

def kib(key):
    return int(re.findall(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[0])

torch.set_num_threads(1)
load_sparse(sys.argv[2])  # what is loaded and made but once
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
found = load_sparse(sys.argv[1])
print(kib("VmHWM") - before, sum(tensor.nbytes for tensor in found.values()) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").is_file(), reason="measures memory as Linux does")
@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 3, 4])
def test_loading_takes_little_more_than_one_tensor_beside_the_model(bits, tmp_path):
    sparse, grids = torch.randn(1024, 2048) * (torch.rand(1024, 2048) < 0.5), {}
    if bits is not None:
        sparse, one = on_grid(sparse, Grid(bits))
        grids = dict.fromkeys((*"01234567", "a"), one)
    tensors = {f"{i}": sparse.clone() for i in range(8)} | {"a": sparse}
    for name, some in {"a": tensors.keys() - {"a"}, "one": {"a"}}.items():
        chosen = {key: tensors[key] for key in some}
        save_sparse(chosen, tmp_path / f"{name}.safetensors", grids={key: grids[key] for key in some & grids.keys()})
    run = [sys.executable, "-c", MEMORY, str(tmp_path / "a.safetensors"), str(tmp_path / "one.safetensors")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    peak, model = map(int, done.stdout.split())
    assert model == 8 * 8192
    # torch allocates by mimalloc on ARM, which rounds sizes up and keeps freed pages for a while
    allocator = model / 4 if platform.machine() in ("aarch64", "arm64") else 0
    assert peak < model + 2.5 * 8192 + allocator
