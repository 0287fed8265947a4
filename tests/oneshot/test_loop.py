"""Any step goes through the one loop: it sees each group once, and what it returns can be resumed and undone."""

from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest
import torch
from probe_checks import assert_same, snapshot
from probe_models import llama
from repair_reference import llama_groups, moments_of, rows_of
from torch import nn

from prunus import prune
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.journal import Journal
from prunus.oneshot.level import Level
from prunus.oneshot.loop import Loop
from prunus.oneshot.options import Method
from prunus.oneshot.scoring import Scores
from prunus.oneshot.spill import Room
from prunus.oneshot.step import Change, LayerRepair, Layers, keep_all_but
from prunus.oneshot.steps import Mask
from prunus.oneshot.streams import Streams


@dataclass(frozen=True)
class Rounded:
    """Weights on a grid, none of them pruned."""

    targets: str = "dense"
    seen: list[Layers] = field(default_factory=list)

    def __call__(self, layers):
        self.seen.append(layers)
        grid = {name: (weight * 4).round() / 4 for name, weight in layers.weights.items()}
        return {name: Change(torch.ones_like(weight).bool(), weight) for name, weight in grid.items()}


@dataclass(frozen=True)
class WithoutFaintest(Rounded):
    """The input of the least energy is pruned; the weights that stay keep their values."""

    def __call__(self, layers):
        self.seen.append(layers)
        (moments,) = layers.moments
        faintest, repair = moments.gram.diagonal().argmin(), LayerRepair(error=0.25)
        masks = {name: torch.ones_like(weight).bool() for name, weight in layers.weights.items()}
        return {name: Change(mask.index_fill(1, faintest, False), repair=repair) for name, mask in masks.items()}


def run(model, batches, step, *, finished=lambda names: None, state=None, **options):
    """The level that a step leads to; on an exception the model is dense again."""
    calibration = Calibration(model, batches, **options)
    level = Level(calibration.weights, Scores(calibration, Method()).live({}))
    journal = Journal(state, {"step": type(step)}, calibration.each_weight()) if state else None
    with calibration.open():
        try:
            Loop(calibration, level, Mask(), journal=journal).run(step, finished)
        except KeyboardInterrupt:
            level.undo_()
            raise
    return level


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"offload": "cpu"}], ids=str)
@pytest.mark.parametrize("kind", [Rounded, WithoutFaintest])
def test_a_step_sees_each_group_once_and_changes_exactly_what_it_returns(kind, options):
    case, dense, plain = (llama(num_layers=2) for _ in range(3))
    case.model.train()
    before, step, names = snapshot(case.model), kind(), []
    level = run(case.model, case.batches, step, finished=names.append, **options)
    assert [list(layers.weights) for layers in step.seen] == [*map(list, names)] == llama_groups(2)
    models = plain.model.eval(), dense.model.eval()
    for layers in step.seen:
        (found,), expected = layers.moments, moments_of(*models, next(iter(layers.weights)), case.batches)
        for name in ("gram", "cross", "dense"):  # the first group reads what the dense model does
            if (matrix := getattr(found, name)) is not None:
                torch.testing.assert_close(matrix, getattr(expected, name))
        assert (found.cross is None) == (layers is step.seen[0])
        for name, change in kind()(replace(layers, moments=[found])).items():
            weight = dense.model.get_parameter(name) if change.weight is None else change.weight
            assert torch.equal(case.model.get_parameter(name), weight * change.mask)
            assert torch.equal(case.model.get_parameter(name) == 0, weight * change.mask == 0)
            assert level.repairs[name] == change.repair
            plain.model.get_parameter(name).data.copy_(case.model.get_parameter(name))
    changed = {name for group in names for name in group}
    for name, parameter in case.model.named_parameters():
        assert (name in changed) != torch.equal(parameter, dense.model.get_parameter(name)), name
    after = snapshot(case.model)
    assert_same(before, after, weights_too=False)
    level.undo_()
    assert_same(before, snapshot(case.model))
    level.apply_()
    assert_same(after, snapshot(case.model))


def test_a_step_with_targets_of_its_own_gets_no_moments_of_the_dense_model():
    case, step = llama(num_layers=2), Rounded("own")
    run(case.model, case.batches, step)
    assert all(part.cross is part.dense is None for layers in step.seen for part in layers.moments)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_step_that_was_interrupted_goes_on_after_its_last_group_and_ends_with_the_same_bits(at, tmp_path):
    whole, case = llama(torch.float32, num_layers=2), llama(torch.float32, num_layers=2)
    expected, before, calls = run(whole.model, whole.batches, WithoutFaintest()), snapshot(case.model), []

    def interrupt(names):
        calls.append(names)
        if len(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(case.model, case.batches, WithoutFaintest(), finished=interrupt, state=tmp_path / "state")
    assert_same(before, snapshot(case.model))
    step = WithoutFaintest()
    level = run(case.model, case.batches, step, state=tmp_path / "state")
    assert [list(layers.weights) for layers in step.seen] == llama_groups(2)[at:]
    assert all(torch.equal(a, b) for a, b in zip(case.model.parameters(), whole.model.parameters(), strict=True))
    assert level.repairs == expected.repairs
    assert all(torch.equal(level.packed[name], mask) for name, mask in expected.packed.items())
    level.undo_()
    assert_same(before, snapshot(case.model))


class Either(nn.Module):
    """One of two layers reads a sample, by its first number."""

    def __init__(self):
        super().__init__()
        self.high, self.low = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh((self.high if x[0, 0, 0] > 0 else self.low)(x))


def test_layers_that_only_a_later_sample_reaches_are_visited_in_the_order_of_their_blocks():
    model, step, x = nn.Sequential(Either(), Either(), Either()), Rounded("own"), torch.randn(8, 5, 6)
    run(model, [x], step, batch_size=1)
    visited = [name for layers in step.seen for name in layers.weights]
    assert [name[0] for name in visited] == sorted(name[0] for name in visited)
    assert set(visited) == {f"{i}.{part}.weight" for i in range(3) for part in ("high", "low")}
    for name, layers in zip(visited, step.seen, strict=True):  # what a layer reads depends on the blocks before alone
        tokens = torch.cat(rows_of(model, name, x.split(1))).flatten(0, 1).detach()
        torch.testing.assert_close(layers.moments[0].gram, tokens.T @ tokens)


@pytest.mark.parametrize("batch_size", [1, None])
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_sends_a_sample_elsewhere_once_it_is_pruned_is_repaired(seed, batch_size):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Either() for _ in range(3)))
    before = snapshot(model)
    result = prune(model, [torch.randn(8, 5, 6)], 0.7, batch_size=batch_size)
    assert result.num_pruned == sum(round(0.7 * weight.numel()) for weight in model.parameters() if weight.ndim > 1)
    result.undo_()
    assert_same(before, snapshot(model))


def test_a_layer_that_a_step_leaves_out_is_pruned_by_its_mask_and_says_so():
    case = llama()

    @dataclass(frozen=True)
    class Nothing:
        targets: str = "own"

        def __call__(self, layers):
            return {}

    calibration = Calibration(case.model, case.batches)
    level = Level(calibration.weights, Scores(calibration, Method()).live({}))
    mask = Mask(keep_all_but(dict.fromkeys(calibration.weights, 7)))
    with calibration.open():
        Loop(calibration, level, mask).run(Nothing(), lambda names: None)
    assert all(int((weight.parameter == 0).sum()) == 7 for weight in calibration.weights.values())
    assert {repair.not_repaired for repair in level.repairs.values()} == {"the step left it out"}


class Counted(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x.roll(1, -1)


class Attention(nn.Module):
    """Returns a tuple, as those of transformers do."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.core, self.output = nn.Linear(width, width), Counted(), nn.Linear(width, width)

    def forward(self, x):
        return self.output(self.core(self.inner(x))), None


class InPlace(nn.Module):
    """A block that changes what its attention returns."""

    def __init__(self, width):
        super().__init__()
        self.attention, self.up, self.down = Attention(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        mixed = self.attention(x)[0].add_(x)
        return mixed + self.down(self.up(mixed).relu_())


def test_a_module_whose_layers_are_solved_runs_once_more_and_memory_changes_no_bit(monkeypatch):
    model, batches = nn.Sequential(*(InPlace(6) for _ in range(3))), [torch.randn(1, 6) for _ in range(8)]

    def pruned(room):
        copy = deepcopy(model)
        with monkeypatch.context() as patch:
            if room is not None:
                patch.setattr(Streams, "_free_room", lambda self: Room(room))
            prune(copy, batches, sparsity=0.5, batch_size=1, progress=False)
        return snapshot(copy), copy[1].attention.core.calls

    expected, most = pruned(0)
    for room in (100, 1000, None):
        values, calls = pruned(room)
        assert_same(values, expected)
        assert calls <= most
    assert calls <= 4 * len(batches)  # before the first block, dense, to find its outputs, and once more
