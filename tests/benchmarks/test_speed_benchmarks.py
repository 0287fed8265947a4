"""The benchmarks of speed run at a small size, check what they time, and are drawn by the page."""

import pytest
import torch

from benchmarks import export, matvec, recover_step, select, step
from benchmarks.__main__ import main
from benchmarks.benchmark import write_record
from benchmarks.distributed import parts
from benchmarks.export import Packing
from benchmarks.matvec import Product
from benchmarks.page import tables
from benchmarks.select import CUTS, ScoredWeights, check_exact
from benchmarks.step import ARMS, MASKED, TRAINED, WITH_RATES, check_agrees, measure_updates

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("select --layers 0", "--layers must be at least 1"),
        ("select --repeat 0", "--repeat must be at least 1"),
        ("step --tokens 8 0", "--tokens must be at least 1"),
        ("select --threads -1", "--threads must be at least 0"),
        ("selct", "there is no such command"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*options.split(), *(["--results", str(tmp_path / "results")] if "--" in options else [])])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "results").exists()


# Finding masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_masks_are_checked_before_they_are_timed(dtype, monkeypatch):
    weights = ScoredWeights([(40, 24), (8, 24)], CPU, dtype)
    assert check_exact(weights) == weights.all_scores().sort().values[weights.num_drop]
    monkeypatch.setattr(weights, "num_drop", 5)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        check_exact(weights)


@pytest.mark.parametrize("rivals", [True, False])
def test_every_way_is_measured_and_rivals_are_left_out_where_weights_are_too_many(rivals, measure, monkeypatch):
    monkeypatch.setattr(select, "peak_extra_mib", lambda *_: 1.0 if rivals else None)
    monkeypatch.setattr(select, "LARGEST", 3 * 40 * 40 - (not rivals))
    rows, drawn = measure("select --layers 3 --dim 40 --repeat 1")
    assert [row["method"] for row in rows] == [name for name in CUTS if rivals or name.startswith("prunus")]
    assert all(row["kept_too_many"] == 0 for row in rows if row["method"].startswith("prunus"))
    assert all(row["ms"] > 0 and f"| {row['method']} |" in drawn for row in rows)
    assert ("| not measured |" in drawn) == (not rivals)


# Keeping masks


@pytest.mark.parametrize(
    ("options", "arms"),
    [
        ("step --model gpt2-tiny --tokens 8 --repeat 1", [*ARMS, *ARMS]),
        (
            "train --model gpt2-tiny --context 8 --batch 1 --no-compile --precision float32 --repeat 1 --every 1",
            [*TRAINED],
        ),
    ],
)
@pytest.mark.slow
def test_a_step_and_a_whole_training_are_measured_in_every_arm(options, arms, measure, monkeypatch):
    monkeypatch.setattr(step, "CONTEXT", 8)
    rows, drawn = measure(options)
    assert [row["arm"] for row in rows] == arms
    assert all(row["ms"] > 0 and f"| {row['arm']} |" in drawn for row in rows)
    assert all((row["sparsity"] > 0.4) == (row["arm"] != arms[0]) for row in rows if "sparsity" in row)


def test_the_step_with_factors_on_learning_rates_is_held_against_the_masked_one(tmp_path):
    rows = measure_updates([(16, 16)] * 2, 2, CPU)
    names = [row["way"] for row in rows]
    assert names.index(WITH_RATES) == names.index(MASKED) + 1
    assert [row["way"] for row in rows if "overhead" in row] == [WITH_RATES]
    write_record("update", {}, rows, tmp_path)
    assert f"| {rows[names.index(WITH_RATES)]['overhead']:+.2%} |" in tables(tmp_path)["update"]


def test_no_speed_is_reported_where_the_step_is_not_that_of_torch(monkeypatch):
    assert check_agrees((16, 16), CPU) < 8
    monkeypatch.setattr(step, "AdamWPrune", torch.optim.SGD)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        check_agrees((16, 16), CPU)


@pytest.mark.slow
def test_every_number_of_ranks_is_measured_and_one_rank_beside_none(measure, tmp_path):
    rows, _ = measure("distributed --layers 2 --dim 16 --repeat 1")
    assert [row.get("ranks", row.get("way")) for row in rows[:4]] == [1, 2, 4, "plain"]
    drawn = parts(tmp_path / "results")
    assert rows[-1]["num_sums"] > 0 and "| 4 ranks, gloo |" in drawn["ranks"]
    assert drawn["projection"].count("\n") == 1  # a CPU says nothing about GPUs


# Files


@pytest.mark.slow
def test_every_way_to_pack_is_measured_and_as_small_as_it_should_be(measure):
    rows, drawn = measure("export --megabytes 1 --repeat 2")
    assert len(rows) == 4 * 5 and all(f"| {row['way']} |" in drawn for row in rows)
    assert all(row["pack_gb_s"] > 0 and row["unpack_gb_s"] > 0 for row in rows)
    assert all(row["size"] <= (row["size_goal"] or 9) for row in rows)


def test_a_way_gives_back_what_it_packed_or_is_not_timed(tmp_path):
    tensor = export.pruned_weight("bfloat16", 0.5, 4096, CPU)
    assert (tensor == 0).sum() == 2048
    for way in export.ways(tmp_path / "a.safetensors", CPU).values():
        assert torch.equal(way.unpack(way.pack(tensor), tensor), tensor)
    broken = Packing(lambda tensor: tensor, lambda packed, like: packed * 2, lambda packed: packed.nbytes)
    with pytest.raises(RuntimeError, match="no speed is reported"):
        export.measure_way(broken, tensor, 2)


# Products


@pytest.fixture
def small_products(monkeypatch):
    monkeypatch.setattr("prunus.sparse.times.PATIENCE", 0.0)
    monkeypatch.setattr("prunus.sparse.times.MOST_COPIES", 2)
    cases = [Product((64, 128), 0.5), Product((64, 128), 0.9, vectors=3), Product((64, 64), 0.5, 64, two_of_four=True)]
    monkeypatch.setattr(matvec, "cases", lambda device: cases)


def test_products_are_measured_beside_dense_ones(small_products, measure):
    rows, drawn = measure("matvec --repeat 2")
    assert {row["way"] for row in rows} == {"dense", "prunus, gaps"}
    assert all(row["times_faster"] == 1 for row in rows if row["way"] == "dense")
    assert all(row["error"] < 1e-5 and row["us"] > 0 for row in rows) and "| 64 x 128 | 90% | 3 |" in drawn
    assert Product((64, 4096), 0.8).weight(CPU, torch.bfloat16).eq(0).float().mean().item() == pytest.approx(
        0.8, abs=0.01
    )
    structured = Product((64, 64), 0.5, two_of_four=True).weight(CPU, torch.float32)
    assert (structured.view(-1, 4).count_nonzero(1) == 2).all()


def test_products_in_four_bits_are_measured_beside_the_same_weights_as_values(small_products, monkeypatch, measure):
    monkeypatch.setattr(matvec, "coded_cases", lambda: [Product((64, 300), 0.5, 2, is_coded=True)])
    rows, drawn = measure("matvec --bits 4 --repeat 2")
    assert {row["way"] for row in rows} == {"dense", "prunus, gaps"}  # a CPU has no other
    assert "4 bits" in drawn and all(row["error"] < 1e-5 for row in rows)


def test_a_product_that_is_wrong_is_not_timed(small_products, monkeypatch):
    monkeypatch.setattr("prunus.sparse.times.product", lambda x, form: x.new_zeros(len(x), form.shape[0]))
    with pytest.raises(RuntimeError, match="no speed is reported"):
        list(matvec.rows_of(Product((64, 128), 0.5), 2, CPU, torch.float32))


# The loss of distillation


def test_the_loss_of_distillation_is_timed_beside_cross_entropy(monkeypatch):
    monkeypatch.setattr(recover_step, "CHUNK", 16)
    rows = list(recover_step.rows_of(40, 33, 8, 1, CPU))
    assert len(rows) == 5 and all(row["ms"] > 0 for row in rows) and {row["shape"] for row in rows} == {"40 x 33 x 8"}
