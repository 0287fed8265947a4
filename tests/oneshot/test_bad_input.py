"""What cannot be read is refused with one line before any work, and the model is left alone."""

from types import SimpleNamespace

import pytest
import torch
from probe_checks import assert_same, snapshot
from probe_models import entropy, llama, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from prunus import PerLayer, Repair, prune, search
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
PARTS = r"looks like an attention mask.*'attention_mask': mask.*'labels': labels"
CASES = {
    "a dataset": ("mlp", DATA, {}, r"got TensorDataset, a dataset of single samples; give DataLoader\("),
    "a part of a dataset": ("mlp", Subset(DATA, [1, 2]), {}, r"got Subset.* give DataLoader\("),
    "a dataset without labels": (
        "mlp",
        TensorDataset(X),
        {},
        r"if the dataset holds single samples, give DataLoader\(",
    ),
    "a dataset of labels (1,)": ("mlp", TensorDataset(X, X[:, :1]), {}, r"single samples, give DataLoader\("),
    "a dataset with plain labels": ("mlp", Plain(), {}, r"got Plain, a dataset of single samples; give DataLoader\("),
    "a mask as the target": ("llama", [(IDS, IDS > 7)], {}, PARTS),
    "a mask in floats": ("llama", [(IDS.int(), (IDS > 7).float())], {}, PARTS),
    "a mask of bytes": ("llama", [(IDS, (IDS > 7).byte())], {}, PARTS),
    "lists": ("llama", [{"input_ids": [1, 2, 3]}], {}, "without a tensor; make tensors of lists"),
    "one sample of tokens": ("llama", [IDS[0]], {}, r"\(sample, token\), got int64 \(9,\); give ids\[None\]"),
    "one sample by name": ("llama", [{"input_ids": IDS[0]}], {}, r"\(sample, token\), got int64 \(9,\); give ids\["),
    "one sample, another's model": ("tokens", [IDS[0]], {}, r"Tokens fails .* int64 \(1,\).*give ids\[None\]"),
    "tokens that are not whole": ("llama", [IDS.float()], {}, r"whole numbers .* got float32 \(4, 9\); give ids\.long"),
    "the same by name": ("llama", [{"input_ids": IDS.double()}], {}, r"got float64 \(4, 9\); give ids\.long\(\)"),
    "double precision": ("mlp", [X.double()], {}, r"float64 \(1, 9\).* computes in torch\.float32: convert"),
    "half precision": ("mlp", [(X.half(), Y)], {}, r"float16 \(1, 9\).* computes in torch\.float32: convert"),
    "whole numbers": ("mlp", [X.long()], {}, r"int64 \(1, 9\).* reads no tokens: give inputs in torch\.float32"),
    "another width": ("mlp", [X[:, 1:]], {}, r"Sequential fails on the first sample, float32 \(1, 8\): .*give batches"),
    "input norms": ("mlp", [X.double()], {"score": "wanda", "repair": None}, "computes in torch.float32"),
    "a probe without labels": ("mlp", [X], {"probe": Probe(), "loss": entropy}, r"no target but the input, .* pairs"),
    "fisher without labels": ("mlp", [X], {"score": "fisher", "loss": entropy}, r"no target but the input, .* pairs"),
    "labels of another kind": ("mlp", [(X, X)], {"score": "fisher", "loss": entropy}, r"it got the target float32 \(1"),
    "allocation without labels": ("mlp", [X], {"select": PerLayer("fisher"), "loss": entropy}, r"no target but the"),
    "vectors, fisher": ("llama", VECTORS, {"score": "fisher"}, "returned no loss; give labels"),
    "vectors, a probe": ("llama", VECTORS, {"probe": Probe()}, "returned no loss; give labels"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_cannot_read_is_one_line_before_any_work(name):
    kind, batches, options, said = CASES[name]
    torch.manual_seed(0)
    model, steps = MODELS[kind](), []
    before = snapshot(model)
    with pytest.raises(ValueError, match=said) as error:
        prune(model, batches, 0.5, progress=lambda done, *_: steps.append(done), **options)
    assert "\n" not in str(error.value) and not any(steps)
    assert_same(before, snapshot(model))


def test_what_a_model_can_read_after_all_is_not_refused():
    assert prune(MODELS["mlp"](), DataLoader(DATA, batch_size=4), 0.5).sparsity == 0.5
    assert prune(MODELS["llama"](), VECTORS, 0.5).sparsity == 0.5
    assert prune(MODELS["tokens"](), [IDS], 0.5).num_pruned
    wide = nn.Sequential(nn.Flatten(), *MODELS["mlp"]())
    wide.register_forward_pre_hook(lambda _, args: args[0].float())  # a model may convert what it reads
    assert prune(wide, [X.double()], 0.5).sparsity == 0.5


def test_a_dataset_of_batches_and_single_tokens_are_read():
    assert prune(MODELS["mlp"](), Batches(), 0.5).sparsity == 0.5
    assert prune(Flat(), [IDS[0]], 0.5).num_pruned


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


@pytest.mark.parametrize(
    "options", [{}, {"repair": Repair()}, {"probe": Probe(), "loss": entropy}], ids=["masks", "repair", "probe"]
)
def test_weights_without_values_are_refused(options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(9, 14), nn.BatchNorm1d(14), nn.Linear(14, 4))
    said = r"^0\.weight is on the meta device, where it has no values; load [^\n]*$"
    with pytest.raises(ValueError, match=said):
        prune(model, [(X, Y)], 0.5, **options)
    with pytest.raises(ValueError, match=said):
        prune(model, sparsity=0.5)
    with pytest.raises(ValueError, match=said):
        search(model, [(X, Y)], lambda _: 1.0, Limit(0.1, better="lower"), **options)
    model[0] = nn.Linear(9, 14)
    with pytest.raises(ValueError, match=r"^1\.weight is on the meta device|^2\.weight is on the meta device"):
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
