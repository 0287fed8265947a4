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
    places,
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
EMBEDDING = "model.embed_tokens.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"
PRUNE = {"global": prune_globally_, "layer": prune_layers_, "row": prune_rows_, "2:4": prune_groups_}


@pytest.fixture
def sick(tmp_path):
    """Examine pruned tensors after a change to them."""

    def made(change=lambda tensors: None, how=prune_rows_, config=None, shards=1, **asked):
        tensors = how(healthy()) if how else healthy()
        change(tensors)
        return examine(folder(tmp_path / "model", tensors, config, shards), **asked)

    return made


@pytest.fixture
def masks(tmp_path):
    """The masks of the pruned tensors after a change to them, as a file."""

    def made(change=lambda masks: None):
        clean = prune_rows_(healthy())
        masks = {name: clean[name] != 0 for name in weights_of(clean)}
        change(masks)
        save_file(masks, tmp_path / "masks.safetensors")
        return tmp_path / "masks.safetensors"

    return made


def set_first(name, value, where=lambda flat: flat == 0):
    """A change of the first element that is zero, or that another rule finds."""

    def change(tensors):
        flat = tensors[name].view(-1)
        flat[where(flat).nonzero()[0]] = value

    return change


def one_zero(name):
    return set_first(name, 0, lambda flat: flat != 0)


def one_back(name):
    return set_first(name, 1)


def half_of(name):
    """A change that zeroes every second element, of a head that is added where it is not there."""

    def change(tensors):
        tensors.setdefault("lm_head.weight", torch.randn(32, 16))
        tensors[name].view(-1)[::2] = 0

    return change


@pytest.mark.parametrize("pattern", PRUNE)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_healthy_model_has_no_finding(sick, pattern, shards):
    report = sick(how=PRUNE[pattern], shards=shards, sparsity=0.5, pattern=pattern, strict=True)
    assert report.findings == [] and report.is_healthy
    assert report.num_zeros == report.num_prunable // 2
    assert sick(how=PRUNE[pattern], shards=shards, sparsity=0.5).is_healthy  # whatever pattern it is of


@pytest.mark.parametrize("pattern", ["global", "layer"])
@pytest.mark.parametrize(
    ("change", "kind", "word"), [(one_zero, "too-sparse", "1 more"), (one_back, "too-dense", "1 fewer")]
)
def test_one_weight_too_many_or_too_few_is_found(sick, pattern, change, kind, word):
    finding = found(sick(change(UP), PRUNE[pattern], sparsity=0.5, pattern=pattern), kind)
    assert word in finding.what
    assert finding.where == (UP if pattern == "layer" else "all weights")
    assert kinds(sick(change(UP), PRUNE[pattern], sparsity=0.5)) == {kind}


def test_counts_are_rounded_as_python_does_in_the_whole_the_layer_or_the_row(tmp_path):
    path, row = tmp_path / "a.safetensors", torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0]])
    save_file({"a.weight": row}, path)  # round(0.5 * 5) is 2
    for pattern in ("global", "layer", "row", None):
        assert examine(path, sparsity=0.5, pattern=pattern).is_healthy
    assert kinds(examine(path, sparsity=0.6)) == {"too-dense"}
    assert kinds(examine(path, sparsity=0.55, pattern="row")) == {"rows"}  # round(2.75) is 3
    save_file({f"{i}.weight": torch.tensor([[0.0, 1.0, 1.0]]) for i in range(3)}, path)
    assert examine(path, sparsity=0.4).is_healthy  # round(0.4 * 3) = 1 each, but round(0.4 * 9) = 4
    assert kinds(examine(path, sparsity=0.4, pattern="global")) == {"too-dense"}


@pytest.mark.parametrize("pattern", [None, "global", "layer"])
def test_weights_that_were_left_dense_are_named_with_the_option_that_leaves_them_out(pattern, tmp_path):
    tensors = {f"{i}.weight": torch.ones(4, 4) for i in range(3)} | {"attention.in_proj_weight": torch.ones(12, 4)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert "--exclude" not in str(examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern).findings)
    for i in range(3):
        tensors[f"{i}.weight"][:, :2] = 0
    save_file(tensors, tmp_path / "a.safetensors")
    (finding,) = examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern).findings
    assert finding.kind == "too-dense"
    assert "attention.in_proj_weight" in str(finding) and "--exclude" in finding.todo and "0.weight" not in finding.todo
    for option in ({"exclude": "*in_proj*"}, {"only": "?.weight"}):
        assert examine(tmp_path / "a.safetensors", sparsity=0.5, pattern=pattern, **option).is_healthy


def test_a_zero_in_the_wrong_row_is_found(sick):
    def move(tensors):
        one_back(UP)(tensors)
        row = tensors[UP][7]
        row[row.nonzero()[0]] = 0

    finding = found(sick(move, sparsity=0.5, pattern="row"), "rows")
    assert finding.where == UP and "2 of 40 rows" in finding.what and "7 to 9" in finding.what
    assert sick(move, sparsity=0.5, pattern="layer").is_healthy


def test_crowded_groups_and_rows_that_m_does_not_divide_are_found(sick):
    finding = found(sick(one_back(UP), prune_groups_, pattern="2:4"), "groups")
    assert finding.where == UP and "1 of 160 groups" in finding.what
    assert sick(how=lambda tensors: prune_groups_(tensors, 1, 4), pattern="2:4").is_healthy  # a live zero is legal
    assert kinds(sick(one_zero(UP), prune_groups_, pattern="2:4", sparsity=0.5)) == {"too-sparse"}
    report = sick(pattern="3:7")
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
    report = sick(lambda tensors: tensors[QUERY][4:8].zero_(), how=None)
    assert report.is_healthy and layer(report, QUERY).pattern == "rows"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", EMBEDDING])
def test_values_that_are_not_finite_are_found(sick, masks, name, value):
    report = sick(set_first(name, value, lambda flat: flat != 0))
    assert places(report) == {("not-finite", name)}
    json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert kinds(sick(set_first(UP, value), masks=masks())) == {"came-back", "not-finite"}


def test_weights_that_came_back_are_found_and_live_zeros_are_not_faults(sick, masks):
    asked = {"masks": masks(), "sparsity": 0.5, "pattern": "row"}
    report = sick(one_back(UP), **asked)
    assert places(report) == {("came-back", UP)}
    assert layer(report, UP).num_came_back == 1 and layer(report, DOWN).num_came_back == 0
    report = sick(one_zero(UP), **asked)
    assert report.is_healthy
    assert layer(report, UP).num_live_zeros == 1 and layer(report, UP).notes == ("1 live zeros",)


def test_masks_that_fit_no_tensor_and_pruned_weights_without_a_mask_are_found(sick, masks):
    def spoil(masks):
        masks[UP] = masks[UP][1:].clone()
        masks["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2, dtype=torch.bool)
        masks.pop(DOWN)

    report = sick(masks=masks(spoil))
    bad = {("bad-mask", UP), ("bad-mask", "model.layers.9.mlp.up_proj.weight")}
    assert places(report) == {*bad, ("excluded", DOWN)} and "without a mask" in found(report, "excluded").what


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("number", range(3))
def test_blocks_that_config_json_counts_and_the_file_lacks_are_found(sick, key, number):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(f"model.layers.{number}.")]:
            del tensors[name]

    config = {"num_hidden_layers": None, key: 3}
    assert sick(config=config).is_healthy
    report = sick(drop, config=config)
    assert places(report) == {("missing", "model.layers")}
    assert "says 3 blocks, and 2 are stored" in found(report, "missing").what


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("change", ["none", "value", "shape"])
def test_ties_that_came_apart_are_found(sick, said, change):
    def untie(tensors):
        tensors["model.embed_positions.weight"] = torch.randn(32, 16)  # to which no head is tied
        tensors["lm_head.weight"] = tensors[EMBEDDING][: 31 if change == "shape" else 32].clone()
        tensors["lm_head.weight"][0, 0] += change == "value"

    report = sick(untie, config={"tie_word_embeddings": said})
    is_same = change == "none"
    assert places(report) == (set() if is_same or not said else {("untied", "lm_head.weight")})
    assert any("lm_head.weight" in note for note in report.notes) == (said is not False and (is_same or said is None))


@pytest.mark.parametrize("name", [EMBEDDING, "lm_head.weight", "model.norm.weight", BIAS])
def test_what_should_be_dense_and_is_not_is_found(sick, name):
    assert places(sick(half_of(name), config={"tie_word_embeddings": False})) == {("excluded", name)}


def test_zeros_with_a_reason_are_no_fault(sick):
    def change(tensors):
        tensors[EMBEDDING][20:] = 0  # tokens that never occur
        tensors[BIAS].zero_()  # never trained
        tensors["model.norm.weight"][3] = 0

    assert sick(change).is_healthy


def test_include_adds_only_restricts_and_exclude_wins(sick):
    options = {"change": half_of(EMBEDDING), "config": {"tie_word_embeddings": False}}
    report = sick(**options, include="model.embed_tokens")
    assert layer(report, EMBEDDING).is_prunable and report.is_healthy
    report = sick(exclude="*layers.1.mlp*")
    assert places(report) == {("excluded", UP), ("excluded", DOWN)} and layer(report, UP).role == "excluded"
    report = sick(**options, include="model.embed_tokens", exclude="*q_proj", only=["*embed_tokens", UP, QUERY])
    assert {one.name for one in report.layers if one.is_prunable} == {EMBEDDING, UP}
    assert layer(report, QUERY).role == "excluded" and layer(report, DOWN).role == "not named by only"
    assert "--only" in next(finding.todo for finding in report.findings if finding.where == DOWN)
    assert layer(sick(only="*embed_tokens"), EMBEDDING).role == "embedding"  # which only does not add
