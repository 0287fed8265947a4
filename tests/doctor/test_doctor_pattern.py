"""Counts agree with their plain definitions, and a planted pattern is the one that is named."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patients import folder, healthy, layer, prune_globally_, prune_groups_, prune_layers_, prune_rows_
from safetensors.torch import save_file

from prunus.doctor import examine
from prunus.doctor import pattern as patterns
from prunus.doctor.pattern import count_kept, is_nonzero, num_crowded, num_not_finite, pattern_of


@st.composite
def masks(draw):
    rows, columns = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 4, 7, 8, 12, 16, 20, 32, 48]))
    share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    seed = draw(st.integers(0, 10_000))
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share


both_sizes = pytest.mark.parametrize("chunk", [1 << 20, 16], ids=["at once", "in chunks"])


@contextmanager
def chunks_of(size):
    """A fixture would stay on while other tests run: hypothesis wants one that lasts for the module."""
    before, patterns.CHUNK = patterns.CHUNK, size
    try:
        yield
    finally:
        patterns.CHUNK = before


@both_sizes
@given(keep=masks())
def test_counts_and_tiles_are_those_of_their_definition(chunk, keep):
    with chunks_of(chunk):
        found = count_kept(keep)
        crowded = {m: num_crowded(keep, 2, m) for m in found.most}
    num_columns = keep.shape[1]
    assert found.rows.tolist() == [int(row.sum()) for row in keep]
    assert found.columns.tolist() == [int(column.sum()) for column in keep.T]
    assert found.num_dead_rows == sum(not row.any() for row in keep)
    for m in (4, 8, 16, 32):
        groups = [int(group.sum()) for row in keep for group in row.split(m)]
        assert found.most.get(m) == (max(groups) if num_columns % m == 0 else None)
        if num_columns % m == 0:
            assert crowded[m] == sum(group > 2 for group in groups)
    runs = num_columns % 4 == 0 and all(len(group.unique()) == 1 for row in keep for group in row.split(4))
    assert (found.tile is not None) == runs
    if found.tile:
        tiles = [part for band in keep.split(found.tile[0]) for part in band.split(found.tile[1], 1)]
        assert all(len(part.unique()) == 1 for part in tiles)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 3), m=st.sampled_from([4, 8, 16, 32]))
def test_planted_groups_are_named_with_the_smallest_m(seed, n, m):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(64, 256 // m, m, generator=generator).argsort(2)
    keep = (order < n).flatten(1)
    assert pattern_of(count_kept(keep)) == f"{n}:{m}"
    keep[3, keep[3].nonzero()[0]] = False  # a live zero
    assert pattern_of(count_kept(keep)) == f"{n}:{m}"


@given(seed=st.integers(0, 10_000), sparsity=st.sampled_from([0.3, 0.5, 0.7]))
def test_planted_rows_and_chance_are_told_apart(seed, sparsity):
    scores = torch.rand(40, 50, generator=torch.Generator().manual_seed(seed))
    order = scores.argsort(1).argsort(1)
    assert pattern_of(count_kept(order >= round(sparsity * 50))) == "row-uniform"
    assert pattern_of(count_kept(scores >= sparsity)) == "unstructured"


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("dense", lambda keep: None),
        ("dense", lambda keep: keep[0, :3].zero_()),
        ("all zero", lambda keep: keep.zero_()),
        ("rows", lambda keep: keep[5:9].zero_()),
        ("columns", lambda keep: keep[:, ::2].zero_()),
        ("rows and columns", lambda keep: (keep[7].zero_(), keep[:, 3].zero_())),
        ("16x16 blocks", lambda keep: (keep[:16, 16:32].zero_(), keep[32:48, :32].zero_())),
        ("4x4 blocks", lambda keep: keep.view(16, 4, 16, 4)[::3, :, 1::5].zero_()),
        ("1x8 blocks", lambda keep: keep.view(64, 8, 8)[::5, 2].zero_()),
        ("2:4", lambda keep: keep.view(64, 16, 4)[..., :2].zero_()),
        ("8:16", lambda keep: keep.view(64, 4, 16)[:, :, 4:12].zero_()),
    ],
)
def test_a_planted_pattern_is_named(name, zero):
    keep = torch.ones(64, 64, dtype=torch.bool)
    zero(keep)
    if name in ("2:4", "8:16"):  # shuffled, else whole columns are gone
        m = int(name.split(":")[1])
        keep = keep.view(64, -1, m)
        shuffle = torch.rand(keep.shape).argsort(2)
        keep = keep.gather(2, shuffle).flatten(1)
    assert pattern_of(count_kept(keep)) == name


@pytest.mark.parametrize(
    ("name", "prune"),
    [
        ("dense", lambda tensors: tensors),
        ("global", prune_globally_),
        ("layer-uniform", prune_layers_),
        ("row-uniform", prune_rows_),
        ("2:4", prune_groups_),
        ("4:8", lambda tensors: prune_groups_(tensors, 4, 8)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_pattern_of_another_tools_model_is_named(name, prune, dtype, tmp_path):
    report = examine(folder(tmp_path, prune(healthy(dtype))))
    assert report.pattern == name and report.is_healthy
    own = {"global": "unstructured"}.get(name, name)
    assert {layer.pattern for layer in report.layers if layer.is_prunable} == {own}


def test_a_few_zeros_are_no_groups():
    keep = torch.rand(64, 64) > 0.005
    assert 0.001 < 1 - keep.float().mean() < 0.01 and pattern_of(count_kept(keep)) == "unstructured"


def test_one_weight_alone_is_uniform_with_nothing_and_different_patterns_are_mixed(tmp_path):
    weight = torch.randn(20, 20)
    weight[weight.abs() < 0.5] = 0
    save_file({"a.weight": weight, "b.weight": torch.randn(20, 20)}, tmp_path / "a.safetensors")
    report = examine(tmp_path / "a.safetensors")
    assert report.pattern == "global" and [layer.pattern for layer in report.layers] == ["unstructured", "dense"]
    tensors, name = prune_layers_(healthy()), "model.layers.0.mlp.up_proj.weight"
    tensors[name] = prune_groups_(healthy())[name]
    tensors["model.layers.0.mlp.down_proj.weight"][:8] = 0
    report = examine(folder(tmp_path / "mixed", tensors))
    assert report.pattern == "mixed" and layer(report, name).pattern == "2:4"


def test_rows_of_a_weight_stored_input_first_are_its_columns(tmp_path):
    """GPT-2 of Hugging Face stores (in, out): 2:4 runs down the first dimension."""
    tensors = {"h.0.attn.c_attn.weight": torch.randn(16, 48), "h.0.attn.c_proj.weight": torch.randn(16, 16)}
    for weight in tensors.values():
        lowest = weight.view(4, 4, -1).abs().argsort(1)[:, :2]
        weight.view(4, 4, -1).scatter_(1, lowest, 0.0)
    save_file(tensors, tmp_path / "a.safetensors")
    report = examine(tmp_path / "a.safetensors", pattern="2:4", sparsity=0.5)
    assert report.pattern == "2:4" and report.is_healthy

    tensors = {name: weight.T.contiguous() for name, weight in tensors.items()}
    save_file(tensors, tmp_path / "b.safetensors")  # as plain linear layers: (out, in)
    assert examine(tmp_path / "b.safetensors", pattern="2:4", sparsity=0.5).is_healthy


def test_inputs_of_a_convolution_are_channels(tmp_path):
    weight = torch.randn(6, 4, 3, 3)
    weight[:, 2] = 0
    weight[0, 0, 1, 1] = 0
    weight[5] = 0
    save_file({"conv.weight": weight}, tmp_path / "a.safetensors")
    found = layer(examine(tmp_path / "a.safetensors"), "conv.weight")
    assert (found.num_dead_rows, found.num_dead_columns) == (1, 1)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64]
)
def test_zeros_and_values_that_are_not_finite_are_counted_in_every_dtype(dtype):
    tensor = torch.tensor([0.0, -0.0, 1.0, float("nan"), -2.0, 0.0]).to(dtype)
    assert is_nonzero(tensor).tolist() == [False, False, True, True, True, False] and num_not_finite(tensor) == 1
    tiny = torch.tensor([5e-324, -0.0], dtype=torch.float64)
    assert is_nonzero(tiny).tolist() == is_nonzero(torch.tensor([1e-45, -0.0])).tolist() == [True, False]


@both_sizes
def test_values_that_are_not_finite_are_counted_in_every_chunk_and_large_sums_are_none(chunk):
    tensor, huge = torch.ones(100), torch.full((1000,), 1.7e308, dtype=torch.float64)
    tensor[[50, 99]], tensor[17] = float("nan"), float("inf")
    with chunks_of(chunk):
        assert num_not_finite(tensor) == 3 and num_not_finite(huge) == 0
        huge[3], huge[4] = float("inf"), -float("inf")
        assert num_not_finite(huge) == 2


def test_empty_tensors_scalars_and_integers_are_taken_as_they_are(tmp_path):
    tensors = {
        "a.weight": torch.empty(0, 4),
        "b.weight": torch.empty(4, 0),
        "scale": torch.tensor(0.0),
        "position_ids": torch.zeros(1, 9, dtype=torch.int64),
        "attn.bias": torch.ones(1, 1, 4, 4).tril(),
        "bn.running_mean": torch.zeros(7),
        "one.weight": torch.ones(1, 1),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    report = examine(tmp_path / "a.safetensors", sparsity=0.0, pattern="global")
    assert report.is_healthy and report.num_prunable == 1 and len(report.layers) == 7
