"""A run's numbers depend on the run and the machine, not on what its process did with oneDNN before."""

from dataclasses import replace

import pytest
import torch

from prunus.cli.eval import evaluated
from prunus.files.json_file import read_json, write_json
from prunus.lab import arithmetic
from prunus.lab.checkpoint import load_checkpoint
from prunus.lab.run import Run
from prunus.lab.trainer import train

RUN = Run(
    device="cpu", model="lenet5", data="digits", steps=6, begin=2, end=5, every=1, batch=16, eval_every=3, eval_size=32
)
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture(autouse=True)
def _onednn():
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before


def trained(folder, onednn, **options):
    """Loss, digest and bits of the weights of a run whose process had oneDNN on or off before."""
    torch.backends.mkldnn.enabled = onednn
    result = train(replace(RUN, out=folder), **options)
    assert torch.backends.mkldnn.enabled == onednn  # as it was before
    weights = load_checkpoint(folder / "checkpoint.pt")["model"]
    return result.loss, result.digest, torch.cat([w.flatten() for w in weights.values()])


def same(left, right):
    return left[:2] == right[:2] and torch.equal(left[2], right[2])


@needs_onednn
def test_the_model_of_these_tests_rounds_otherwise_without_onednn(tmp_path, monkeypatch):
    on = trained(tmp_path / "on", True)
    monkeypatch.setattr(arithmetic, "can_use_onednn", lambda run: False)
    assert not torch.equal(on[2], trained(tmp_path / "off", True)[2])


@needs_onednn
def test_a_run_in_a_process_that_lost_onednn_equals_one_in_a_process_that_has_it(tmp_path):
    assert same(trained(tmp_path / "on", True), trained(tmp_path / "lost", False))


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("recorded", [True, False])
def test_a_resumed_run_goes_on_as_run_json_says(tmp_path, monkeypatch, recorded):
    with monkeypatch.context() as patch:
        patch.setattr(arithmetic, "can_use_onednn", lambda run: recorded)
        unbroken = trained(tmp_path / "unbroken", True)

        class Killed(Exception):
            pass

        def kill(training):
            if training.step == 4:
                raise Killed

        with pytest.raises(Killed):
            train(replace(RUN, out=tmp_path / "run", save_every=3), after_step=kill)
    assert read_json(tmp_path / "run" / "run.json")["environment"]["onednn"] is recorded
    torch.backends.mkldnn.enabled = not recorded
    result = train(Run(out=tmp_path / "run", resume=True))
    weights = load_checkpoint(tmp_path / "run" / "checkpoint.pt")["model"]
    assert same(unbroken, (result.loss, result.digest, torch.cat([w.flatten() for w in weights.values()])))


def test_a_run_begun_with_onednn_says_so_where_there_is_none(tmp_path, monkeypatch):
    trained(tmp_path / "run", True)
    described = read_json(tmp_path / "run" / "run.json")
    described["environment"]["onednn"] = True
    write_json(tmp_path / "run" / "run.json", described)
    monkeypatch.setattr(arithmetic, "can_use_onednn", lambda run: False)
    with pytest.warns(UserWarning, match="started with oneDNN, which is off here") as said:
        train(Run(out=tmp_path / "run", resume=True))
    assert len(said) == 1 and "\n" not in str(said[0].message)


@needs_onednn
def test_a_process_in_which_onednn_flips_says_so_once_and_switches_it_back(tmp_path):
    def flip(training):
        if training.step == 3:
            torch.backends.mkldnn.enabled = False

    with pytest.warns(UserWarning, match="oneDNN was switched off in this process") as said:
        trained(tmp_path / "run", True, after_step=flip)
    assert len(said) == 1


def test_bfloat16_uses_onednn_only_where_the_cpu_has_it(monkeypatch):
    has_it = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert arithmetic.can_use_onednn(replace(RUN, precision="bfloat16")) == has_it
    assert arithmetic.can_use_onednn(RUN) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not arithmetic.can_use_onednn(RUN)


@needs_onednn
def test_eval_gives_the_number_of_train_whatever_the_process_did(tmp_path):
    loss = trained(tmp_path / "run", True)[0]
    torch.backends.mkldnn.enabled = False
    assert evaluated(tmp_path / "run")[1].loss == loss
