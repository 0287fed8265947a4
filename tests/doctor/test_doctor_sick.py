"""A model made sick in one way has that finding, at that place, and no other."""

import json

import pytest
import torch
from patients import (
    folder,
    found,
    healthy,
    kinds,
    layer,
    prune_globally_,
    prune_groups_,
    prune_layers_,
    prune_rows_,
    weights_of,
)
from safetensors.torch import save_file

from prunus.doctor import examine

UP = "model.layers.1.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
PRUNE = {"global": prune_globally_, "layer": prune_layers_, "row": prune_rows_, "2:4": prune_groups_}


@pytest.fixture
def sick(tmp_path):
    """Examine pruned tensors after a change to them."""

    def made(change, how=prune_rows_, config=None, shards=1, **asked):
        tensors = how(healthy()) if how else healthy()
        change(tensors)
        return examine(folder(tmp_path / "model", tensors, config, shards), **asked)

    return made


def nothing(tensors):
    pass


def one_zero(name):
    """A change that adds one zero where there is none."""

    def change(tensors):
        flat = tensors[name].view(-1)
        flat[flat.nonzero()[0]] = 0

    return change


def one_back(name):
    """A change that brings one zero back."""

    def change(tensors):
        flat = tensors[name].view(-1)
        flat[(flat == 0).nonzero()[0]] = 1

    return change


@pytest.mark.parametrize("pattern", PRUNE)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_healthy_model_has_no_finding(sick, pattern, shards):
    report = sick(nothing, PRUNE[pattern], shards=shards, sparsity=0.5, pattern=pattern, strict=True)
    assert report.findings == [] and report.is_healthy
    assert report.num_zeros == report.num_prunable // 2
    assert sick(nothing, PRUNE[pattern], shards=shards, sparsity=0.5).is_healthy  # whatever pattern it is of


@pytest.mark.parametrize("pattern", ["global", "layer"])
@pytest.mark.parametrize(
    ("change", "kind", "word"), [(one_zero, "too-sparse", "1 more"), (one_back, "too-dense", "1 fewer")]
)
def test_one_weight_too_many_or_too_few_is_found(sick, pattern, change, kind, word):
    finding = found(sick(change(UP), PRUNE[pattern], sparsity=0.5, pattern=pattern), kind)
    assert word in finding.what
    assert finding.where == (UP if pattern == "layer" else "all weights")
    assert kinds(sick(change(UP), PRUNE[pattern], sparsity=0.5)) == {kind}


def test_counts_are_rounded_as_python_does(tmp_path):
    tensors = {"a.weight": torch.ones(1, 5)}
    tensors["a.weight"][0, :2] = 0  # round(0.5 * 5) is 2
    save_file(tensors, tmp_path / "a.safetensors")
    for pattern in ("global", "layer", "row", None):
        assert examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern).is_healthy
    assert kinds(examine(tmp_path / "a.safetensors", sparsity=0.6)) == {"too-dense"}
    assert kinds(examine(tmp_path / "a.safetensors", sparsity=0.55, pattern="row")) == {"rows"}  # round(2.75) is 3


def test_a_model_pruned_by_layer_with_another_total_is_what_was_asked(tmp_path):
    tensors = {name: torch.ones(1, 3) for name in ("a.weight", "b.weight", "c.weight")}
    for weight in tensors.values():
        weight[0, 0] = 0  # round(0.4 * 3) = 1 each, but round(0.4 * 9) = 4
    save_file(tensors, tmp_path / "a.safetensors")
    assert examine(tmp_path / "a.safetensors", sparsity=0.4).is_healthy
    assert kinds(examine(tmp_path / "a.safetensors", sparsity=0.4, pattern="global")) == {"too-dense"}


def test_a_zero_in_the_wrong_row_is_found(sick):
    def move(tensors):
        one_back(UP)(tensors)
        row = tensors[UP][7]
        row[row.nonzero()[0]] = 0

    finding = found(sick(move, sparsity=0.5, pattern="row"), "rows")
    assert finding.where == UP and "2 of 40 rows" in finding.what and "7 to 9" in finding.what
    assert sick(move, sparsity=0.5, pattern="layer").is_healthy


def test_a_crowded_group_is_found(sick):
    finding = found(sick(one_back(UP), prune_groups_, pattern="2:4"), "groups")
    assert finding.where == UP and "1 of 160 groups" in finding.what
    assert sick(nothing, lambda tensors: prune_groups_(tensors, 1, 4), pattern="2:4").is_healthy  # a live zero is legal
    assert kinds(sick(one_zero(UP), prune_groups_, pattern="2:4", sparsity=0.5)) == {"too-sparse"}


def test_rows_that_m_does_not_divide_are_found(sick):
    report = sick(nothing, prune_rows_, pattern="3:7")
    assert kinds(report) == {"groups"} and "cannot be split" in report.findings[0].what


def test_dead_rows_and_columns_are_warnings_and_findings_if_strict(sick):
    def kill(tensors):
        tensors[UP][3] = 0
        tensors[DOWN][:, 5] = 0

    mild = sick(kill)
    assert mild.is_healthy and mild.verdict.startswith("healthy with 2 warnings (dead-columns, dead-rows): ")
    report = sick(kill, strict=True)
    assert kinds(report) == {"dead-rows", "dead-columns"} and report.warnings == []
    assert mild.warnings == report.findings
    assert found(report, "dead-rows").where == UP and "rows 3 of 40" in found(report, "dead-rows").what
    assert found(report, "dead-columns").where == DOWN and "columns 5 of 40" in found(report, "dead-columns").what
    assert layer(report, UP).num_dead_rows == 1 and layer(report, DOWN).num_dead_columns == 1
    calm = sick(kill, strict=True, allow=["dead-rows", "dead-columns"])
    assert calm.is_healthy and not calm.warnings and sum("allowed" in note for note in calm.notes) == 2


def test_removed_rows_are_a_pattern_and_no_fault(sick):
    def cut(tensors):
        tensors[QUERY][4:8] = 0

    report = sick(cut, how=None)
    assert report.is_healthy
    assert layer(report, QUERY).pattern == "rows" and layer(report, QUERY).notes == ("1 whole heads",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite_are_found(sick, name, value):
    def spoil(tensors):
        flat = tensors[name].view(-1)
        flat[flat.nonzero()[2]] = value

    report = sick(spoil)
    assert kinds(report) == {"not-finite"} and found(report, "not-finite").where == name
    json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_weights_that_came_back_are_found_and_live_zeros_are_not_faults(sick, tmp_path):
    clean = prune_rows_(healthy())
    save_file({name: clean[name] != 0 for name in weights_of(clean)}, tmp_path / "masks.safetensors")
    masks = tmp_path / "masks.safetensors"
    report = sick(one_back(UP), masks=masks, sparsity=0.5, pattern="row")
    assert kinds(report) == {"came-back"} and found(report, "came-back").where == UP
    assert layer(report, UP).num_came_back == 1 and layer(report, DOWN).num_came_back == 0

    report = sick(one_zero(UP), masks=masks, sparsity=0.5, pattern="row")
    assert report.is_healthy
    assert layer(report, UP).num_live_zeros == 1 and layer(report, UP).notes == ("1 live zeros",)


def test_nan_in_a_pruned_place_came_back(sick, tmp_path):
    clean = prune_rows_(healthy())
    save_file({name: clean[name] != 0 for name in weights_of(clean)}, tmp_path / "masks.safetensors")

    def spoil(tensors):
        tensors[UP].view(-1)[(tensors[UP].view(-1) == 0).nonzero()[0]] = float("nan")

    assert kinds(sick(spoil, masks=tmp_path / "masks.safetensors")) == {"came-back", "not-finite"}


def test_masks_that_fit_no_tensor_are_found(sick, tmp_path):
    clean = prune_rows_(healthy())
    masks = {name: clean[name] != 0 for name in weights_of(clean)}
    masks[UP] = masks[UP][1:].clone()
    masks["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2, dtype=torch.bool)
    save_file(masks, tmp_path / "masks.safetensors")
    report = sick(nothing, masks=tmp_path / "masks.safetensors")
    assert {(f.kind, f.where) for f in report.findings} == {
        ("bad-mask", UP),
        ("bad-mask", "model.layers.9.mlp.up_proj.weight"),
    }


def test_a_pruned_weight_that_has_no_mask_is_found(sick, tmp_path):
    clean = prune_rows_(healthy())
    masks = {name: clean[name] != 0 for name in weights_of(clean) if name != UP}
    save_file(masks, tmp_path / "masks.safetensors")
    report = sick(nothing, masks=tmp_path / "masks.safetensors")
    assert kinds(report) == {"excluded"} and "without a mask" in report.findings[0].what


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("same", [True, False])
def test_ties_that_came_apart_are_found(sick, said, same):
    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][0, 0] += 0 if same else 1

    report = sick(untie, config={"tie_word_embeddings": said})
    assert kinds(report) == (set() if same or not said else {"untied"})
    assert any("lm_head.weight" in note for note in report.notes) == (said is not False and (same or said is None))


def test_a_head_is_tied_to_the_tokens_and_not_to_the_positions(sick):
    def add(tensors):
        tensors["model.embed_positions.weight"] = torch.randn(32, 16)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert sick(add).is_healthy


def test_a_tied_head_of_another_shape_is_found(sick):
    def resize(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1].clone()

    assert found(sick(resize), "untied").where == "lm_head.weight"


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_what_should_be_dense_and_is_not_is_found(sick, name):
    def empty(tensors):
        tensors.setdefault("lm_head.weight", torch.randn(32, 16))
        tensors[name].view(-1)[::2] = 0

    report = sick(empty, config={"tie_word_embeddings": False})
    assert {(f.kind, f.where) for f in report.findings} == {("excluded", name)}


def test_a_layer_excluded_by_the_user_must_be_dense(sick):
    report = sick(nothing, exclude="*layers.1.mlp*")
    assert {f.where for f in report.findings} == {UP, DOWN} and kinds(report) == {"excluded"}
    assert layer(report, UP).role == "excluded"


def test_zeros_with_a_reason_are_no_fault(sick):
    def change(tensors):
        tensors["model.embed_tokens.weight"][20:] = 0  # tokens that never occur
        tensors["model.layers.0.self_attn.q_proj.bias"].zero_()  # never trained
        tensors["model.norm.weight"][3] = 0

    assert sick(change).is_healthy


def test_what_is_included_is_a_weight(sick):
    def empty(tensors):
        tensors["model.embed_tokens.weight"].view(-1)[::2] = 0

    assert "excluded" in kinds(sick(empty))
    report = sick(empty, include="model.embed_tokens")
    assert layer(report, "model.embed_tokens.weight").is_prunable and report.is_healthy


@pytest.mark.parametrize("shards", [1, 3])
def test_a_tensor_that_other_layers_have_is_missed(sick, shards):
    report = sick(lambda tensors: tensors.pop(QUERY), shards=shards)
    assert {(f.kind, f.where) for f in report.findings} == {("missing", QUERY)}


def test_missing_layers_are_missed(sick):
    def drop(layer):
        return lambda tensors: [tensors.pop(name) for name in list(tensors) if f"layers.{layer}." in name]

    for number in range(3):
        assert "says 3 blocks, and 2 are stored" in found(sick(drop(number)), "missing").what
    tall = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(4, 4) for i in (5, 6)}
    report = sick(lambda tensors: tensors.update(tall))
    assert any(f.where == "model.layers.3" and "[3, 4]" in f.what for f in report.findings)


def test_a_block_of_another_kind_misses_nothing(sick):
    def hybrid(tensors):
        for name in list(tensors):
            if "layers.1.self_attn" in name:
                tensors[name.replace("self_attn", "mamba")] = tensors.pop(name)

    assert sick(hybrid).is_healthy
