"""Models that do not call their layers in the ordinary way get their per-sample gradients too, never wrong ones."""

from copy import deepcopy

import probe_odd as odd
import pytest
import torch
from covering import each_once
from probe_checks import findings
from probe_models import Case, entropy, own_loss, pair_loss
from probe_odd import MODELS, TIME, WIDTH
from probe_reference import probe_reference
from torch import nn

from prunus import Global, prune
from prunus.eligible import eligible
from prunus.oneshot import Probe


def case_of(kind):
    torch.manual_seed(3)
    model = kind().double()
    batches = [(torch.randn(n, TIME, WIDTH).double(), torch.randint(0, 3, (n,))) for n in (3, TIME, 1)]
    return Case(model, batches, entropy, pair_loss, None)


def assert_as_reference(case, schedule, order="reverse", tau=0.02, blocks=None):
    fast, slow = deepcopy(case.model), deepcopy(case.model)
    settings = {"score": "magnitude", "select": Global(), "sparsity": 0.5, "schedule": schedule, "order": order}
    expected = probe_reference(slow, case.loss_of, case.batches, settings | {"tau": tau}, blocks)
    result = prune(fast, case.batches, 0.5, probe=Probe(tau, order, schedule), loss=case.loss)
    assert all(torch.equal(result.masks[name], mask) for name, mask in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(fast.parameters(), slow.parameters(), strict=True))
    assert any(layer.num_pruned < layer.num_candidates for layer in result.layers)


@pytest.mark.parametrize(
    ("kind", "order"),
    each_once(MODELS, [("joint", "reverse"), ("sequential", "reverse"), ("sequential", "forward")], one_of=3),
)
def test_an_odd_model_is_probed_as_one_sample_at_a_time_would_be(kind, order):
    assert_as_reference(case_of(kind), *order)


def test_what_is_run_alone_is_reduced_with_its_block_in_the_passes_of_the_others():
    case = case_of(odd.Encoder)
    names = [weight.name for weight in eligible(case.model).weights]
    blocks = {}
    for name in names:
        number = next((part for part in name.split(".") if part.isdigit()), name)
        blocks.setdefault(number, []).append(name)
    assert any("out_proj" in name for name in names) and max(map(len, blocks.values())) > 1
    assert_as_reference(case, "block", blocks=list(blocks.values()))


SLOW = {
    odd.Attention: {"mix.out_proj.weight"},
    odd.TimeFirst: {"mid.weight"},
    odd.Flat: {"mid.weight"},
    odd.Routed: {f"experts.{i}.weight" for i in range(3)},
    odd.Reversed: {"mid.weight"},
    odd.Twice: set(),
    odd.Tied: set(),
    odd.Functional: {"mid.weight"},
    odd.FunctionalEarly: {"blocks.2.weight"},
    odd.Skips: set(),
    odd.BatchStatistics: {"first.weight", "mid.weight", "head.weight"},
    odd.Subclass: {"mid.weight"},
    odd.Keyword: set(),
    odd.Unused: {"spare.weight"},
    odd.Solid: {"up.weight", "cube.weight"},
}
CHAINED = dict.fromkeys([odd.FunctionalEarly, odd.Encoder, odd.Tied], True)
CHAINED |= dict.fromkeys([odd.Skips, odd.FaintSkips, odd.SharedBlock, odd.Routed], False)


@pytest.mark.parametrize("kind", {**SLOW, **CHAINED})
def test_only_what_must_be_is_run_alone_and_blocks_are_skipped_only_where_the_last_alone_is_read(kind):
    case = case_of(kind)
    found, names = findings(case.model, case.batches, case.loss)
    assert names - found.quick == SLOW.get(kind, names - found.quick)
    assert found.chained == CHAINED.get(kind, found.chained)


def test_conv1d_of_a_gpt2_with_tied_head_is_rebuilt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).double()
    case = Case(model, [torch.randint(0, 29, (3, 8))], None, own_loss, None)
    found, names = findings(model, case.batches)
    assert found.quick == names and found.chained and found.form == "next token" and len(names) == 8
    assert_as_reference(case, "sequential", tau=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("num_labels", [1, 3], ids=["regression", "classes"])
def test_a_classifier_of_hugging_face_is_probed_by_its_own_loss(num_labels):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=29, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=num_labels,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).double()
    labels = torch.randn(4).double() if num_labels == 1 else torch.tensor([0, 2, 1, 0])
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"input_ids": torch.randint(0, 29, (4, 7)), "attention_mask": mask, "labels": labels}
    case = Case(model, [batch], None, own_loss, None)
    found, names = findings(model, case.batches)
    assert found.batched and found.quick == names and found.chained
    assert_as_reference(case, "sequential", tau=0.0005)


class Overwritten(nn.Module):
    """A layer's input is changed after the layer has read it: the gradient of its weight can no longer be had."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.a(x)
        out = self.b(hidden)
        hidden.mul_(3)
        return out


def test_an_input_that_was_overwritten_is_an_error_and_never_a_wrong_gradient():
    model, batch = Overwritten(), (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    with pytest.raises(RuntimeError, match="inplace"):
        prune(model, [batch], 0.5, probe=Probe(0.05), loss=nn.functional.cross_entropy)
