"""``prune``: what it promises of the model, the strategies, the rules for tau, and its errors."""

import math
from copy import deepcopy

import pytest
import torch
from covering import each_once
from probe_checks import assert_same, assert_same_masks, bits_of, snapshot
from probe_models import CASES, cnn, entropy, llama, mlp
from torch import nn

from prunus import PerRow, prune
from prunus.oneshot import Probe
from prunus.oneshot.calibration import Calibration
from prunus.oneshot.options import Method
from prunus.oneshot.probe.engine import Engine
from prunus.oneshot.prune import prune_to
from prunus.oneshot.scoring import Scores

SCHEDULES = ["joint", "sequential", "block"]


@pytest.mark.parametrize(("case", "schedule"), each_once(CASES, SCHEDULES, one_of=2))
def test_the_model_keeps_mode_statistics_flags_and_every_weight_that_is_not_pruned(case, schedule):
    case = CASES[case](torch.float32)
    case.model.train()
    list(case.model.modules())[-1].eval()
    next(p for p in case.model.parameters() if p.ndim == 1).requires_grad_(False)
    first = next(iter(case.model.parameters()))
    first.grad = torch.ones_like(first)
    before, dense = snapshot(case.model), deepcopy(dict(case.model.named_parameters()))
    options = {"score": "wanda", "probe": Probe(0.05, schedule=schedule), "loss": case.loss}
    result = prune(case.model, case.batches, 0.4, **options)
    assert_same(before, snapshot(case.model), weights_too=False)
    for name, parameter in case.model.named_parameters():
        keep = result.masks[name] if name in result.masks else torch.ones_like(parameter, dtype=torch.bool)
        assert torch.equal(bits_of(parameter[keep]), bits_of(dense[name][keep])), name
        assert not parameter[~keep].any() and not parameter[~keep].signbit().any()
    result.undo_()
    assert_same(before, snapshot(case.model))


@pytest.mark.parametrize(("schedule", "at"), each_once(SCHEDULES, [0.02, 0.3, 0.6, 0.95]))
def test_after_an_exception_the_model_is_as_before(schedule, at):
    case, calls, last = cnn(torch.float32), [], math.inf
    case.model.train()
    before = snapshot(case.model)

    def loss(output, target):
        calls.append(1)
        if len(calls) >= last:
            raise KeyboardInterrupt
        return entropy(output, target)

    options = {"score": "wanda", "probe": Probe(10.0, schedule=schedule), "loss": loss}
    prune(deepcopy(case.model), case.batches, 0.5, **options)
    last = len(calls) + max(1, round(at * len(calls)))
    with pytest.raises(KeyboardInterrupt):
        prune(case.model, case.batches, 0.5, **options)
    assert_same(before, snapshot(case.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dtype"), [*zip(SCHEDULES, [torch.bfloat16, torch.float16, torch.bfloat16], strict=True)], ids=str
)
def test_half_precision_models_are_probed_without_rounding_a_kept_weight(schedule, dtype):
    case = llama(dtype, num_layers=2)
    case.model.model.layers[0].mlp.up_proj.weight.data[0, :4] = torch.tensor([-0.0, 6e-8, -6e-8, 1e-30])
    dense = deepcopy(dict(case.model.named_parameters()))
    result = prune(case.model, case.batches, 0.5, select=PerRow(), probe=Probe(0.05, schedule=schedule))
    for name, mask in result.masks.items():
        parameter = case.model.get_parameter(name)
        assert parameter.dtype == dtype
        assert torch.equal(bits_of(parameter[mask]), bits_of(dense[name][mask]))
    assert 0 < result.sparsity < 0.5


@pytest.mark.parametrize(("limit", "score"), [(1, "magnitude"), (4, "fisher")])
def test_out_of_memory_halves_the_batch_and_changes_nothing(limit, score, monkeypatch):
    """The memory runs out at the end of a pass, when some of it has been recorded already."""
    case, options = llama(num_layers=2), {"score": score, "probe": Probe(0.05, schedule="block")}
    expected = prune(deepcopy(case.model), case.batches, 0.5, **options)
    add_chunk, refused = Engine._add_chunk, []

    def crowded(self, found, start, chunk, variants, statistic):
        add_chunk(self, found, start, chunk, variants, statistic)
        if chunk.size * len(variants) > limit:
            refused.append(chunk.size)
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "_add_chunk", crowded)
    assert_same_masks(expected, prune(case.model, case.batches, 0.5, **options, batch_size=64))
    assert refused


def test_a_level_that_was_taken_back_leaves_nothing_that_the_next_one_reads():
    """Outputs of blocks were stored with the first level's weights; the next level starts behind them."""
    case = llama(num_layers=2)
    expected = prune(deepcopy(case.model), case.batches, 0.6, score="wanda", probe=Probe(0.05))
    calibration = Calibration(case.model, case.batches)
    scores = Scores(calibration, Method("wanda", PerRow()))
    with calibration.open():
        prune_to(scores, 0.5, Probe(0.05, order="forward")).undo_()
        scores.changed()
        second = prune_to(scores, 0.6, Probe(0.05))
    assert all(torch.equal(second.packed[name], mask) for name, mask in expected.level.packed.items())


def test_tensors_pairs_and_dicts_of_the_same_samples_are_the_same():
    tokens = torch.randint(0, 31, (5, 8))
    kinds = [
        [tokens],
        [tokens[:2], tokens[2:]],
        [(tokens, tokens)],
        [{"input_ids": tokens}],
        [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}],
        ({"input_ids": row[None]} for row in tokens),
    ]
    options = {"score": "wanda", "probe": Probe(0.05)}
    first, *others = (prune(llama(num_layers=1).model, batches, 0.5, **options) for batches in kinds)
    for result in others:
        assert_same_masks(first, result)


def test_a_sample_counts_by_its_own_mean_however_long_its_neighbours_are():
    """Padding a sample changes nothing, and neither does company."""
    tokens, mask = torch.randint(0, 31, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    together = [{"input_ids": tokens, "attention_mask": mask}]
    apart = [{"input_ids": tokens[:1]}, {"input_ids": tokens[1:, :5]}]
    assert_same_masks(*(prune(llama(num_layers=2).model, x, 0.5, probe=Probe(0.05)) for x in (together, apart)))


@pytest.mark.slow
def test_a_wrapped_model_is_pruned_inside():
    case = mlp()
    wrapped = nn.DataParallel(case.model)  # moves the model to a GPU where there is one
    inner = deepcopy(case.model)
    prune(torch.compile(wrapped), case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    prune(inner, case.batches, 0.5, probe=Probe(0.05), loss=case.loss)
    assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), case.model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("probe", [None, Probe(0.05)])
def test_a_model_that_has_run_compiled_is_pruned_by_its_inputs(probe):
    torch._dynamo.reset()
    case = cnn()
    options = {"score": "wanda", "probe": probe, "loss": case.loss}
    expected = prune(deepcopy(case.model), case.batches, 0.5, **options)
    case.model.compile(backend="eager")
    case.model.requires_grad_(False)
    with torch.no_grad():
        for size in (1, 2, 4):
            case.model.eval()(case.batches[0][0][:size])
    case.model.requires_grad_(True)
    assert_same_masks(expected, prune(case.model, case.batches, 0.5, **options))


def test_every_weight_is_a_step_of_the_progress_and_passes_time_and_memory_are_counted():
    case, said = mlp(), []
    options = {"probe": Probe(), "loss": case.loss, "progress": lambda *what: said.append(what)}
    result = prune(case.model, case.batches, 0.5, **options)
    done = [what for what in said if what[2].startswith("probed ")]
    assert done == [(1, 3, "probed 4.weight"), (2, 3, "probed 2.weight"), (3, 3, "probed 0.weight")]
    assert result.cost.passes == 2 * 3 * 8 + 4 and result.seconds > 0 and result.cost.peak_bytes > 0
    assert f"{result.sparsity:.4%}" in repr(result) and len(repr(result)) < 120 and "tensor" not in repr(result)
