"""Weights on grids come back from a file bit for bit, and so do their codes and scales, in the bits that they take."""

import json

import pytest
import torch
from on_grids import on_grid
from safetensors.torch import load_file
from test_compact import same

from prunus import load_sparse, save_sparse
from prunus.export.convert import ExportJob, convert
from prunus.files.reader import open_tensors
from prunus.grids import OnGrid
from prunus.ops.grid import Grid, decoded

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def sparse_weight(shape, dtype=torch.float32, sparsity=0.5, seed=0):
    """A weight of which so many elements are zero, exactly."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=rng).to(dtype)
    order = torch.randperm(weight.numel(), generator=rng)
    weight.view(-1)[order[: round(sparsity * weight.numel())]] = 0
    return weight


def example(grid=Grid(4), shape=(24, 300), dtype=torch.bfloat16, sparsity=0.5):
    return on_grid(sparse_weight(shape, dtype, sparsity), grid)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize(
    ("shape", "outputs"), [((24, 300), (0,)), ((300, 24), (1,)), ((3, 8, 129), (0, 1)), ((3, 129, 8), (0, 2))]
)
def test_values_codes_and_scales_come_back_bit_for_bit(shape, outputs, bits, dtype, tmp_path):
    weight, found = example(Grid(bits, outputs=outputs), shape, dtype)
    (row,) = save_sparse({"a": weight}, tmp_path / "a.safetensors", grids={"a": found}).rows
    assert (row.encoding, row.bits, row.num_nonzero) == ("codes", bits, int(weight.count_nonzero()))
    assert same(load_sparse(tmp_path / "a.safetensors")["a"], weight)
    with open_tensors(tmp_path / "a.safetensors") as tensors:
        kept = tensors.read_coded("a")
        values, packed = tensors.read_packed("a")
    assert (kept.grid, kept.shape) == (found.grid, shape) and torch.equal(kept.scales, found.scales)
    assert torch.equal(kept.codes, found.grid.codes(weight, found.scales)[weight != 0])
    assert same(decoded(kept, dtype), weight) and same(values, weight[weight != 0]) and torch.equal(packed, kept.packed)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("width", [512, 700])
def test_a_file_is_within_two_percent_of_the_formula(bits, sparsity, width, tmp_path):
    shape, grid = (1024, width), Grid(bits)
    weight, found = example(grid, shape, torch.bfloat16, sparsity)
    save_sparse({"layer.weight": weight}, tmp_path / "a.safetensors", grids={"layer.weight": found})
    density = int(weight.count_nonzero()) / weight.numel()
    formula = 1 + density * bits + 16 * -(-width // 128) / width
    assert 8 * (tmp_path / "a.safetensors").stat().st_size / weight.numel() == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("case", ["no zero", "one zero", "all zero", "tiny", "one element"])
def test_codes_are_written_where_there_is_a_zero_and_nothing_is_smaller(case, tmp_path):
    shapes = {"tiny": (40, 2), "one element": (1, 1)}
    sparsity = {"no zero": 0.0, "all zero": 1.0, "one zero": 1 / 7200, "one element": 0.0}.get(case, 0.5)
    weight, found = example(shape=shapes.get(case, (24, 300)), dtype=torch.bfloat16, sparsity=sparsity)
    (row,) = save_sparse({"a": weight}, tmp_path / "a.safetensors", grids={"a": found}).rows
    (plain,) = save_sparse({"a": weight}, tmp_path / "b.safetensors").rows
    assert (row.encoding == "codes") == (case == "one zero")
    assert row == plain or row.stored_bytes < plain.stored_bytes
    assert same(load_sparse(tmp_path / "a.safetensors")["a"], weight)
    version = 2 if case == "one zero" else 1
    assert f'\\"version\\":{version},'.encode() in (tmp_path / "a.safetensors").read_bytes()


def test_a_zero_of_either_sign_is_pruned_and_comes_back_positive(tmp_path):
    weight, found = example()
    negative = torch.where(weight == 0, -0.0, weight)
    rows = [
        save_sparse({"a": tensor}, tmp_path / f"{name}.safetensors", grids={"a": found}).rows
        for name, tensor in (("a", weight), ("b", negative))
    ]
    assert rows[0] == rows[1] and same(load_sparse(tmp_path / "b.safetensors")["a"], weight)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_tensor_with_two_names_is_on_the_grid_of_either(tmp_path):
    weight, found = example()
    save_sparse({"a": weight, "b": weight}, tmp_path / "a.safetensors", grids={"b": found})
    loaded = load_sparse(tmp_path / "a.safetensors")
    assert loaded["a"] is loaded["b"] and same(loaded["a"], weight)
    with open_tensors(tmp_path / "a.safetensors") as tensors:
        assert tensors.is_coded("a") and tensors.is_coded("b")
        assert torch.equal(tensors.read_coded("b").codes, tensors.read_coded("a").codes)


def test_what_is_not_stored_as_codes_has_none(tmp_path):
    save_sparse({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with open_tensors(tmp_path / "a.safetensors") as tensors, pytest.raises(ValueError, match="not store 'a' as codes"):
        tensors.read_coded("a")


@pytest.mark.parametrize("end", [".scales", ".codes", ".bits"])
def test_a_tensor_whose_entries_would_have_another_ones_name_is_stored_dense(end, tmp_path):
    weight, found = example()
    tensors = {"a": weight, f"a{end}": torch.ones(2)}
    assert save_sparse(tensors, tmp_path / "a.safetensors", grids={"a": found}).rows[1].encoding == "dense"
    loaded = load_sparse(tmp_path / "a.safetensors")
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


BAD = {
    "left": (lambda w, g: (w.index_put_((torch.tensor(0), w[0].nonzero()[0]), w.max() * 1.3), g), "a has 1 weights"),
    "not a number": (lambda w, g: (w.fill_(float("nan")), g), "a has 7,200 weights off its 4-bit grid"),
    "cast": (lambda w, g: (w.float() * 1.001, g), "weights off its 4-bit grid"),
    "no tensor": (lambda w, g: (w, {"b": g}), "there is a grid for 'b', but no tensor of that name"),
    "other shape": (lambda w, g: (w[:5], g), r"with scales \(24, 3\) cannot be on a grid: expected .* scales \(5, 3\)"),
    "integers": (lambda w, g: (w.int(), g), "expected floating-point weights"),
    "negative scale": (lambda w, g: (w, OnGrid(g.grid, -g.scales)), "a cannot be stored as codes: 72 of its 72 scales"),
    "infinite": (lambda w, g: (w, OnGrid(g.grid, g.scales * torch.inf)), "scales are not positive and finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_weight_that_is_not_on_its_grid_is_refused_by_name_and_nothing_is_written(case, tmp_path):
    change, said = BAD[case]
    weight, found = change(*example())
    grids = found if isinstance(found, dict) else {"a": found}
    with pytest.raises(ValueError, match=said) as error:
        save_sparse({"first": torch.ones(3), "a": weight}, tmp_path / "a.safetensors", grids=grids)
    assert not list(tmp_path.iterdir()) and "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [10**9, 3000], ids=["one file", "shards"])
def test_small_to_small_keeps_codes_and_small_to_plain_writes_values(limit, tmp_path):
    kinds = zip((2, 3, 4, 8), DTYPES, strict=True)
    weights = {f"{bits}.weight": example(Grid(bits), dtype=dtype) for bits, dtype in kinds}
    tensors = {name: weight for name, (weight, _) in weights.items()} | {"bias": torch.randn(24)}
    grids = {name: found for name, (_, found) in weights.items()}
    save_sparse(tensors, tmp_path / "a.safetensors", grids=grids, max_shard_bytes=limit)
    convert(tmp_path / "a.safetensors", ExportJob(tmp_path / "b.safetensors", check=True, max_shard_bytes=limit))
    first, second = (sorted(tmp_path.glob(f"{name}*")) for name in "ab")
    assert [path.read_bytes() for path in first if path.suffix != ".json"] == [
        path.read_bytes() for path in second if path.suffix != ".json"
    ]
    convert(tmp_path / "a.safetensors", ExportJob(tmp_path / "plain.safetensors", small=False, check=True))
    plain = load_file(tmp_path / "plain.safetensors")
    assert all(same(plain[name], tensor) for name, tensor in tensors.items()) and plain.keys() == tensors.keys()
    convert(tmp_path / "plain.safetensors", ExportJob(tmp_path / "c.safetensors", check=True))
    assert all(same(tensor, tensors[name]) for name, tensor in load_sparse(tmp_path / "c.safetensors").items())


def test_wide_groups_take_no_more_memory_than_a_row(tmp_path):
    weight, found = example(Grid(4, group=1 << 50))
    save_sparse({"a": weight}, tmp_path / "a.safetensors", grids={"a": found})
    assert same(load_sparse(tmp_path / "a.safetensors")["a"], weight)


def test_a_description_says_the_grid(tmp_path):
    weight, found = example(Grid(3, 100, (1,)), (300, 24))
    save_sparse({"a": weight}, tmp_path / "a.safetensors", grids={"a": found})
    data = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    record = json.loads(header["__metadata__"]["prunus"])["tensors"]["a"]
    assert {key: record[key] for key in ("encoding", "bits", "group", "outputs")} == {
        "encoding": "codes", "bits": 3, "group": 100, "outputs": [1]
    }  # fmt: skip
    assert [header[f"a.{end}"]["dtype"] for end in ("bits", "scales", "codes")] == ["U8", "BF16", "U8"]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_are_unpacked_on_a_gpu_as_on_the_cpu_and_saved_from_there(bits, tmp_path):
    weight, found = example(Grid(bits), (512, 700))
    there = OnGrid(found.grid, found.scales.cuda())
    save_sparse({"a": weight}, tmp_path / "a.safetensors", grids={"a": found})
    save_sparse({"a": weight.cuda()}, tmp_path / "b.safetensors", grids={"a": there})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert same(load_sparse(tmp_path / "a.safetensors", "cuda")["a"].cpu(), weight)
