"""Advice is measured, counts each kind of layer once, and says in plain words what to do."""

import random

import numpy as np
import pytest
import torch
from causal_models import causal_model
from torch import nn

from prunus import save_model, save_sparse
from prunus.cli import main
from prunus.sparse import Decoder, load_packed, sparsify_, times
from prunus.sparse.advise import Advice, LayerTimes, Load, advise, dense_step_seconds
from prunus.sparse.times import WeightKind, cache_file, microseconds, num_copies, winner

SMALL = Load(batch=1, tokens=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("prunus.sparse.times.PATIENCE", 0.0)
    monkeypatch.setattr("prunus.sparse.times.MOST_COPIES", 2)


def weights():
    def sparse(shape, sparsity):
        return torch.randn(shape).masked_fill_(torch.rand(shape) < sparsity, 0)

    found = {f"layers.{i}.up.weight": sparse((64, 128), 0.6) for i in range(3)}
    found |= {"layers.0.down.weight": sparse((128, 64), 0.6), "layers.1.down.weight": sparse((128, 64), 0.9)}
    found |= {"head.weight": torch.randn(100, 64), "norm.weight": torch.zeros(64), "conv.weight": torch.zeros(4, 4, 3)}
    return found


def row(decode, prefill, num=2, **options):
    return LayerTimes(
        WeightKind((64, 128), torch.bfloat16, 0.5), [f"{i}" for i in range(num)], decode, prefill, **options
    )


@pytest.fixture
def measured(monkeypatch):
    """Shapes and numbers of vectors that were measured."""
    found, inner = [], times.measured

    def measured(weight, num, scales):
        found.append((*weight.shape, num))
        return inner(weight, num, scales)

    monkeypatch.setattr(times, "measured", measured)
    return found


def test_each_kind_is_measured_once_on_a_machine_and_counted(measured):
    model = weights()
    advice = advise(model, load=SMALL)

    kinds = [(64, 128), (128, 64), (128, 64)]
    assert sorted(measured) == sorted((*shape, num) for shape in kinds for num in (1, 4))
    assert [row.layers[0] for row in advice.rows] == [f"layers.{kind}.weight" for kind in ("0.up", "0.down", "1.down")]
    assert [len(row.layers) for row in advice.rows] == [3, 1, 1]
    assert [row.kind.shape for row in advice.rows] == kinds
    assert all(set(row.decode) == set(row.prefill) == {"dense", "sparse"} for row in advice.rows)
    assert all(time > 0 for row in advice.rows for time in (*row.decode.values(), *row.prefill.values()))
    times._table.cache_clear()  # as in another process
    assert advise(model, load=SMALL) == advice
    assert len(measured) == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"torch": "', '"torch": "0'),
        lambda text: text.replace('"dense"', '"thick"'),
        lambda text: text.replace('"gaps": ', '"gaps": -'),
        lambda text: text.replace(", coded gaps", ""),
    ],
    ids=["cut", "no object", "another torch", "another way", "negative", "fewer forms"],
)
def test_a_file_of_times_that_cannot_be_is_measured_anew(damage, measured):
    path = cache_file(torch.device("cpu"))
    advise(weights(), load=SMALL)
    path.write_text(damage(path.read_text()))
    times._table.cache_clear()
    advise(weights(), load=SMALL)
    assert len(measured) == 12
    times._table.cache_clear()
    advise(weights(), load=SMALL)
    assert len(measured) == 12


def test_a_folder_that_cannot_be_written_to_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert advise(weights(), load=SMALL).rows


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.o_proj, self.out = nn.Linear(64, 64), nn.Linear(64, 10)
        for layer, sparsity in ((self.q_proj, 0.49), (self.k_proj, 0.5), (self.v_proj, 0.51), (self.o_proj, 0.8)):
            layer.weight.data.view(-1)[torch.randperm(layer.weight.numel())[: int(sparsity * layer.weight.numel())]] = 0


@pytest.mark.parametrize(("launch", "taken"), [(0.0, "qkvo"), (2.0, "o"), (5.0, "")])
def test_the_advice_is_what_sparsify_does(monkeypatch, launch, taken):
    """A device on which sparse products gain at 80 %, and at 50 % if they are few enough."""

    def measured(weight, vectors, scales):
        dense = 1.0 + weight.numel() / 1000
        share = 1.03 if weight.count_nonzero() > 0.4 * weight.numel() else 0.5
        return {"dense": dense, "gaps": share * dense + launch}

    monkeypatch.setattr(times, "measured", measured)
    monkeypatch.setattr(times, "WORTH", 1.0)
    model = Attention()
    rows = advise(model, load=Load(2, 64)).rows
    wanted = {name for row in rows if winner(row.decode) == "sparse" for name in row.layers}
    names = sparsify_(model, vectors=2)

    assert "".join(name[0] for name in names) == taken
    assert {f"{name}.weight" for name in names} == wanted
    assert [(row.kind.shape, len(row.layers)) for row in rows] == [((128, 64), 3), ((64, 64), 1)]


def test_models_files_and_mappings_give_the_same_kinds(tmp_path):
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128))
    model[0].weight.data[torch.rand(64, 128) < 0.7] = 0
    save_sparse(model.state_dict(), tmp_path / "model.safetensors")
    sources = (model, dict(model.named_parameters()), tmp_path / "model.safetensors", str(tmp_path))

    for source in sources:
        (found,) = advise(source, load=SMALL).rows
        assert (found.kind.shape, found.layers, found.kind.dtype) == ((64, 128), ["0.weight"], torch.float32)
        assert found.kind.sparsity == pytest.approx(0.7, abs=0.05)


def test_a_pattern_of_two_in_four_is_a_kind_of_its_own():
    half, other = torch.zeros(2, 64, 64)
    half[:, ::2], other[:, :32] = 1, 1
    rows = advise({"a.weight": half, "b.weight": other}, load=SMALL).rows
    assert [row.kind.two_of_four for row in rows] == [True, False]


def test_the_verdict_says_when_nothing_is_gained():
    slower = {"dense": 10.0, "sparse": 30.0}
    text = str(Advice("this CPU", Load(), [row(slower, slower)]))

    assert "no layer is faster on this CPU: keep the dense file to run, the small file to store" in text
    assert "30.0 us (0.33x)" in text
    assert "nothing to gain" in str(Advice("this CPU", Load(), []))


def test_the_verdict_counts_layers_and_weighs_them():
    rows = [
        row({"dense": 30.0, "sparse": 20.0}, {"dense": 100.0, "sparse": 120.0, "2:4": 80.0}, num=3),
        row({"dense": 10.0, "sparse": 10.0}, {"dense": 50.0, "sparse": 60.0}, num=1),
    ]
    decode, prefill, *_ = Advice("a GPU", Load(1, 4096), rows).verdict
    assert decode == "decoding, 1 at a time: of 4 sparse layers 3 as sparse are faster; together 1.43 times"
    assert prefill == "a prompt of 4096 tokens: of 4 sparse layers 3 as 2:4 are faster; together 1.21 times"


def test_dense_layers_joined_ones_and_all_else_that_a_step_does_are_weighed():
    times = {"dense": 32.0, "sparse": 16.0}
    decode, whole, *_ = Advice("a GPU", Load(), [row(times, times, num_joined=2)], dense_bytes=64 * 128 * 2).verdict
    assert decode.endswith("of 2 sparse layers 2 as sparse are faster; together 2.00 times")
    assert whole.endswith("about 1.33 times faster")  # (32 + 32) / (16 + 32)
    decode, whole, *_, last = Advice("a GPU", Load(), [row(times, times)], 999, step_us=128.0).verdict
    assert decode.endswith("together 2.00 times")
    assert whole == "the decoder: about 1.33 times faster, 0.10 ms a token in place of 0.13"  # 128 / (128 - 32)
    assert "attention" not in last


def test_a_step_of_a_model_is_timed_with_two_blocks_and_none_where_it_cannot_run(monkeypatch, tmp_path):
    model = causal_model(sparsity=0.8, num_hidden_layers=9)
    model.save_pretrained(tmp_path)
    seen = []
    timed = "prunus.sparse.advise._seconds_a_token"
    monkeypatch.setattr(timed, lambda each, batch: seen.append(each.model) or 1.0 + len(seen))
    cpu, kind = torch.device("cpu"), torch.float32

    assert dense_step_seconds(tmp_path, kind, cpu, 1) == 2.0 + 8 * 1.0
    assert [len(each.model.layers) for each in seen] == [1, 2]
    assert len(model.model.layers) == model.config.num_hidden_layers == 9
    assert dense_step_seconds(nn.Linear(2, 2), kind, cpu, 1) is None
    assert dense_step_seconds(tmp_path / "model.safetensors", kind, cpu, 1) is None
    monkeypatch.setattr(times, "measured", lambda *_: {"dense": 10.0, "gaps": 5.0})
    assert advise(model, load=SMALL).step_us == (4.0 + 8 * 1.0) * 1e6
    assert "the decoder: about 1.00 times faster" in str(advise(model, load=SMALL))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draws():
    """What each generator that a user seeds would draw next."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
    return [state.tolist() for state in states], random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_that_measures_draws_from_the_generators_of_the_user(device, measured, tmp_path):
    model = causal_model(sparsity=0.9, num_hidden_layers=1).to(device)
    save_model(model, tmp_path / "small")
    calls = {
        "advise": lambda: advise(model, device, Load(1, 4)),
        "a step": lambda: dense_step_seconds(model, torch.float32, torch.device(device), 1),
        "load_packed": lambda: load_packed(tmp_path / "small", device, vectors=2),
        "sparsify_": lambda: sparsify_(model, vectors=3),
        "greedy": lambda: Decoder(model).generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=3),
    }
    for name, call in calls.items():
        before = draws()
        assert call() is not None
        assert draws() == before, name
    assert {num for *_, num in measured} == {1, 2, 3, 4}  # the caches were cold


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"dense": 10.0, "sparse": 5.0}, "sparse"),
        ({"dense": 10.0, "sparse": 9.9}, "dense"),
        ({"dense": 10.0, "sparse": 8.0, "2:4": 7.0}, "2:4"),
        ({"dense": 10.0}, "dense"),
    ],
)
def test_what_wins_must_be_worth_it(times, best):
    assert winner(times) == best


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Load(batch=0)
    with pytest.raises(ValueError, match="there is no file or folder"):
        advise("nowhere")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no device 'cuda'"):
            advise({}, device="cuda")


@pytest.mark.parametrize("vectors, is_copied", [(1, False), (4, False), (5, True), (300, True)])
def test_a_product_of_a_dense_copy_is_never_said_to_be_faster(vectors, is_copied, monkeypatch):
    falling = iter([9.0, 8.0])
    monkeypatch.setattr(times, "microseconds", lambda *_: next(falling))
    found = times.measured(torch.randn(8, 8), vectors)
    assert found == {"dense": 9.0, "gaps": 9.0 if is_copied else 8.0}


def test_copies_go_round():
    calls = []
    microseconds([lambda i=i: calls.append(i) for i in range(2)], torch.device("cpu"), 3)

    assert calls[:3] == [0, 1, 0]
    assert num_copies(10**12) == 2


def test_the_command_prints_a_table_and_a_verdict_and_writes_nothing(tmp_path, capsys):
    save_sparse(weights(), tmp_path / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    main(["export", str(tmp_path), "--advise", "--prompt-tokens", "4"])
    said = capsys.readouterr().out

    assert "64 x 128" in said and "3" in said
    assert "faster" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_refuses_what_makes_no_sense(tmp_path, capsys):
    save_sparse(weights(), tmp_path / "model.safetensors")
    out = ["--out", str(tmp_path / "out")]
    unread = (
        ["--advise", *out],
        ["--advise", "--check"],
        ["--advise", "--form", "dense"],
        ["--advise", "--tokens", "8"],
    )
    for args in (*unread, [*out, "--prompt-tokens", "8"], ["--advise", "--batch", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(["export", str(tmp_path), *args])
        assert stop.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
