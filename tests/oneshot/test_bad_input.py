"""What cannot be read is refused with one line before any work, and the model is left alone."""

from types import SimpleNamespace

import pytest
import torch
from probe_checks import assert_same, snapshot
from probe_models import entropy, llama, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from prunus import NofM, PerLayer, PerRow, Repair, prune, search
from prunus.oneshot import Limit, Probe
from prunus.oneshot.samples import samples_of

X, Y, IDS = torch.randn(20, 9), torch.randint(0, 4, (20,)), torch.randint(0, 31, (4, 9))
DATA = TensorDataset(X, Y)
VECTORS = [{"inputs_embeds": torch.randn(4, 9, 16), "attention_mask": torch.ones(4, 9, dtype=torch.long)}]


class Tokens(nn.Module):
    """A model of tokens that is not Hugging Face's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(31, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 31))

    def forward(self, ids):
        _, length = ids.shape
        return self.layers(self.embedding(ids) + length)


class Plain(Dataset):
    """Samples whose labels are numbers of Python."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], int(Y[i])


class Batches(Plain):
    """A dataset whose items are batches."""

    def __getitem__(self, i):
        if i == 3:
            raise IndexError
        return X, Y


class Flat(nn.Module):
    """One token a sample, (N,), and a config that is not Hugging Face's."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=31)
        self.layers = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 8), nn.Linear(8, 31))

    def forward(self, ids):
        return self.layers(ids)


MODELS = {"mlp": lambda: mlp(torch.float32).model, "llama": lambda: llama(torch.float32, num_layers=2).model}
MODELS |= {"tokens": Tokens}
PROBE = {"probe": Probe(), "loss": entropy}
PARTS = r"looks like an attention mask.*'attention_mask': mask\}, or one with 'labels'"
CASES = {
    "a dataset": ("mlp", DATA, {}, r"got TensorDataset, a dataset of single samples; pass DataLoader\("),
    "a part of a dataset": ("mlp", Subset(DATA, [1, 2]), {}, r"got Subset.* pass DataLoader\("),
    "a dataset without labels": ("mlp", TensorDataset(X), {}, r"if the dataset holds single samples, give DataLoader"),
    "a dataset of labels (1,)": ("mlp", TensorDataset(X, X[:, :1]), {}, r"single samples, give DataLoader\("),
    "a dataset with plain labels": ("mlp", Plain(), {}, r"got Plain, a dataset of single samples; pass DataLoader\("),
    "a mask as the target": ("llama", [(IDS, IDS > 7)], {}, PARTS),
    "a mask of ones": ("llama", [(IDS, torch.ones_like(IDS))], {}, PARTS),
    "a mask in floats": ("llama", [(IDS.int(), (IDS > 7).float())], {}, PARTS),
    "a mask of bytes": ("llama", [(IDS, (IDS > 7).byte())], {}, PARTS),
    "lists": ("llama", [{"input_ids": [1, 2, 3]}], {}, "without a tensor; convert lists to tensors"),
    "one sample of tokens": ("llama", [IDS[0]], {}, r"\(sample, token\), got int64 \(9,\); give ids\[None\]"),
    "one sample by name": ("llama", [{"input_ids": IDS[0]}], {}, r"\(sample, token\), got int64 \(9,\); give ids\["),
    "one sample, another's model": ("tokens", [IDS[0]], {}, r"Tokens fails .* int64 \(1,\).*give ids\[None\]"),
    "tokens that are not whole": ("llama", [IDS.float()], {}, r"whole numbers .* got float32 \(4, 9\); give ids\.long"),
    "the same by name": ("llama", [{"input_ids": IDS.double()}], {}, r"got float64 \(4, 9\); give ids\.long\(\)"),
    "a token too large": ("llama", [IDS, IDS.clone().fill_(31)], {}, "token 31, but the model's vocabulary has 31"),
    "a token below zero": ("llama", [IDS.clone().fill_(-1)], {}, "token -1, but the model's vocabulary has 31"),
    "double precision": ("mlp", [X.double()], {}, r"float64 \(1, 9\).* computes in torch\.float32: convert"),
    "half precision": ("mlp", [(X.half(), Y)], {}, r"float16 \(1, 9\).* computes in torch\.float32: convert"),
    "whole numbers": ("mlp", [X.long()], {}, r"int64 \(1, 9\).* does not read tokens: give inputs in torch\.float32"),
    "another width": ("mlp", [X[:, 1:]], {}, r"Sequential fails on the first sample, float32 \(1, 8\): .*give batches"),
    "input norms": ("mlp", [X.double()], {"score": "wanda", "repair": None}, "computes in torch.float32"),
    "a probe without labels": ("mlp", [X], PROBE, r"no target but the input, .* pairs"),
    "fisher without labels": ("mlp", [X], {"score": "fisher", "loss": entropy}, r"no target but the input, .* pairs"),
    "labels of another kind": ("mlp", [(X, X)], {"score": "fisher", "loss": entropy}, r"it got the target float32 \(1"),
    "allocation without labels": ("mlp", [X], {"select": PerLayer("fisher"), "loss": entropy}, r"no target but the"),
    "vectors, fisher": ("llama", VECTORS, {"score": "fisher"}, "returned no loss; give labels"),
    "vectors, a probe": ("llama", VECTORS, {"probe": Probe()}, "returned no loss; give labels"),
    "no loss": ("mlp", [(X, Y)], {"probe": Probe()}, "no loss of its own"),
    "a loss that is no number": ("mlp", [(X, Y)], PROBE | {"loss": lambda output, _: output}, "one number"),
    "a number for the batches": ("mlp", 0.8, {}, "iterable of batches, got 0.8; .*sparsity=0.5"),
    "a path for the batches": ("mlp", "calib.u16", {}, "iterable of batches, got 'calib.u16'"),
    "one batch": ("mlp", X, {}, "put it into a list"),
    "a repair without batches": ("mlp", (), {"repair": Repair()}, "a repair needs calibration samples"),
    "no batches": ("mlp", [], {}, "batches is empty; leave it out to prune by magnitude"),
    "a view without batches": ("mlp", {}.values(), {}, "batches is empty; leave it out to prune by magnitude"),
    "an empty iterator": ("mlp", iter([]), {}, "no calibration samples"),
    "an empty batch": ("mlp", [X[:0]], {}, "without rows"),
    "a batch without tensors": ("mlp", [5], {}, "without a tensor"),
    "three parts": ("mlp", [(1, 2, 3)], {}, "3 parts"),
    "all weights": ("mlp", [X], {"sparsity": 1.0}, r"\[0, 1\)"),
    "fewer than none": ("mlp", [X], PROBE | {"sparsity": -0.1}, r"\[0, 1\)"),
    "percent": ("mlp", [X], {"sparsity": 50}, r"such as 0\.5, got 50"),
    "percent in words": ("mlp", [X], {"sparsity": "50%"}, r"a number in \[0, 1\), such as 0\.5, got '50%'"),
    "a scope by name": ("mlp", [X], {"select": "row"}, r"PerRow\(\), got 'row'"),
    "the class of a selector": ("mlp", [X], {"select": PerRow}, r"a selector, PerRow\(\), got the class itself"),
    "2:4 of another sparsity": ("llama", [IDS], {"sparsity": 0.3, "select": NofM(2, 4)},
                                "2:4 is a sparsity of 0.5, but 0.3 .*give prune.. sparsity=0.5,"),
    "a score of training": ("mlp", [X], {"score": "bitter7"}, "reads exp_avg_sq, .*optimizer"),
    "an unknown score": ("mlp", [X], {"score": "wandas"}, "must be magnitude, wanda, fisher.* got .wandas."),
    "no moments": ("llama", [IDS], {"select": PerLayer("moments")}, "reads Adam's second moments"),
    "a repair that is none": ("mlp", [X], {"repair": True}, "repair must be Repair"),
    "an unknown pattern": ("mlp", [X], {"exclude": "nowhere"}, "nowhere"),
    "passes of no sample": ("mlp", [X], {"batch_size": 0}, "at least 1"),
    "passes of half a sample": ("mlp", [X], {"batch_size": 2.5}, "at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_done_is_one_line_before_any_work_and_the_model_is_left_alone(name):
    kind, batches, options, said = CASES[name]
    torch.manual_seed(0)
    model, steps = MODELS[kind](), []
    before = snapshot(model)
    with pytest.raises(ValueError, match=said) as error:
        prune(model, batches, progress=lambda done, *_: steps.append(done), **{"sparsity": 0.5} | options)
    assert "\n" not in str(error.value) and not any(steps)
    assert_same(before, snapshot(model))


def test_arguments_in_another_order_are_refused():
    with pytest.raises(ValueError, match="first argument must be a model, the second batches; got list"):
        prune([X], MODELS["mlp"](), sparsity=0.5)


def test_what_a_model_can_read_after_all_is_not_refused():
    assert prune(MODELS["mlp"](), DataLoader(DATA, batch_size=4), 0.5).sparsity == 0.5
    assert prune(MODELS["mlp"](), Batches(), 0.5).sparsity == 0.5
    assert prune(MODELS["llama"](), VECTORS, 0.5).sparsity == 0.5
    assert prune(MODELS["tokens"](), [IDS], 0.5).num_pruned
    assert prune(Flat(), [IDS[0]], 0.5).num_pruned
    wide = nn.Sequential(nn.Flatten(), *MODELS["mlp"]())
    wide.register_forward_pre_hook(lambda _, args: args[0].float())  # a model may convert what it reads
    assert prune(wide, [X.double()], 0.5).sparsity == 0.5


PAIRS = {
    "labels that are left out": (IDS, torch.tensor([-100, 0, 1]).repeat(4, 3)),
    "an image and its mask": (IDS.byte(), (IDS > 7).byte()),
    "an image of integers": (IDS.view(2, 2, 9), (IDS > 7).view(2, 2, 9)),
    "bits": (IDS % 2, 1 - IDS % 2),
    "other tokens": (IDS, IDS),
    "features": (IDS.float(), (IDS > 7).float()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_targets_that_are_no_attention_mask_are_a_pair(name):
    assert len(samples_of([PAIRS[name]])) == len(PAIRS[name][0])


@pytest.mark.parametrize("options", [{}, {"repair": None}, PROBE], ids=["repair", "masks", "probe"])
def test_weights_without_values_are_refused(options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(9, 14), nn.BatchNorm1d(14), nn.Linear(14, 4))
    said = r"^0\.weight is on the meta device and has no values; load [^\n]*$"
    for call in (
        lambda: prune(model, [(X, Y)], 0.5, **options),
        lambda: prune(model, sparsity=0.5),
        lambda: search(model, [(X, Y)], lambda _: 1.0, Limit(0.1, better="lower"), **options),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    model[0] = nn.Linear(9, 14)
    with pytest.raises(ValueError, match=r"^[12]\.weight is on the meta device"):
        prune(model, [(X, Y)], 0.5, **options)


def test_memory_that_runs_out_on_the_first_sample_stays_that_error():
    model = MODELS["mlp"]()

    def crowded(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(crowded)
    with pytest.raises(torch.OutOfMemoryError):
        prune(model, [X], 0.5)


@pytest.mark.parametrize("labels", [True, False])
def test_pixels_are_given_to_a_vision_model_by_their_own_name(labels):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    model, pixels = transformers.ViTForImageClassification(config), torch.randn(4, 3, 8, 8)
    if labels:
        assert prune(model, [(pixels, torch.tensor([0, 1, 1, 0]))], 0.5, score="fisher").sparsity == 0.5
    else:
        with pytest.raises(ValueError, match="returned no loss; give labels"):
            prune(model, [pixels], 0.5, score="fisher")
