"""Held-out quality does not depend on how many samples share a pass, and a pass has a bounded number of logits."""

import pytest
import torch
from families import build, inputs, tokens
from torch.nn import functional as F

from prunus.oneshot import progress
from prunus.trained import quality
from prunus.trained.quality import metric_of, token_quality


@pytest.mark.parametrize("most", [1, 3 * 12 * 64, 1 << 24])
def test_quality_is_that_of_all_windows_and_logits_are_bounded(most, monkeypatch):
    model, windows = build("llama"), tokens(20)
    sizes = []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    monkeypatch.setattr(quality, "MOST_LOGITS", {"cpu": most})
    found = token_quality(model, windows)
    assert max(sizes) <= max(most, 12 * 64) and sum(sizes) == windows.numel() * 64
    with torch.no_grad():
        logits, targets = model(windows).logits[:, :-1], windows[:, 1:]
    assert found.loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-5)
    assert found.accuracy == pytest.approx((logits.argmax(-1) == targets).float().mean().item())


@pytest.mark.parametrize("name", ["llama", "bert classifier", "t5"])
def test_metrics_of_named_arrays_do_not_depend_on_it(name, monkeypatch):
    found = []
    for most in (1, 1 << 24):
        monkeypatch.setattr(quality, "MOST_LOGITS", {"cpu": most})
        model = build(name)
        found.append(metric_of(model, inputs(name))[1](model))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_vectors_without_labels_are_one_line():
    model = build("llama")
    vectors = {"inputs_embeds": torch.randn(3, 5, model.config.hidden_size)}
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM has no loss on inputs_embeds; give labels too$"):
        metric_of(model, vectors)[1](model)


def test_a_long_evaluation_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", {"bar": 0.0, "lines": 0.0})
    token_quality(build("llama"), tokens(80))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 9 and all(line.startswith("evaluate: ") for line in lines)
