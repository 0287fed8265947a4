"""``prunus doctor``: exit codes, the table, the JSON, real checkpoints and real folders."""

import json
import os
from pathlib import Path

import pytest
import torch
from patients import folder, healthy, places, prune_rows_
from safetensors.torch import load_file

from prunus.cli import main
from prunus.doctor import examine
from prunus.files.torch_file import write_torch_file

pytestmark = pytest.mark.usefixtures("few_weights")
FAST = "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --warmup 1".split()
STORIES = [Path(os.environ.get("PRUNUS_DATA", "nowhere"), "models", name) for name in ("stories260K", "stories15M")]


@pytest.fixture
def model(tmp_path):
    def made(change=lambda tensors: None, **more):
        tensors = prune_rows_(healthy())
        change(tensors)
        return folder(tmp_path / "model", tensors, **more)

    return made


@pytest.fixture
def doctor(capsys):
    """Exit code, standard output and standard error of a call."""

    def called(*args):
        code = 0
        try:
            main(["doctor", *map(str, args)])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return called


def spoil(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][2, 3] = float("nan")


def test_exit_codes_say_healthy_sick_and_unreadable(model, doctor, tmp_path):
    code, out, err = doctor(model(), "--sparsity", "0.5", "--pattern", "row")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "healthy: 50.0000% of 5,376 prunable weights are zero (row-uniform)"
    code, out, err = doctor(model(spoil))
    assert (code, err) == (1, "") and out.splitlines()[-1].startswith("not healthy: 1 finding (not-finite)")
    path = model(lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3].zero_())
    assert doctor(path)[0] == 0 and doctor(path, "--strict")[0] == 1
    assert "dead-rows" in doctor(path)[1] and "rows 3 of 40" in doctor(path)[1]
    code, out, err = doctor(tmp_path / "nowhere")
    assert (code, out) == (2, "") and len(err.strip().splitlines()) == 1 and "nowhere" in err


@pytest.mark.parametrize(
    "options", ["--pattern 2:3:4", "--sparsity 2", "--allow all", "--sparse", "--only nowhere", "--masks MODEL"]
)
def test_mistakes_are_one_line_and_exit_code_2(model, doctor, options):
    path = model()
    code, out, err = doctor(path, *options.replace("MODEL", str(path / "model.safetensors")).split())
    assert (code, out) == (2, "") and len(err.strip().splitlines()) == 1


def test_json_is_one_object_and_nothing_else(model, doctor):
    for change, expected in ((lambda tensors: None, 0), (spoil, 1)):
        code, out, _ = doctor(model(change), "--json", "--sparsity", "0.5")
        said = json.loads(out, parse_constant=pytest.fail)
        assert code == expected and said["healthy"] == (code == 0)
        assert said["pattern"] and len(said["layers"]) == 20 and said["asked"] == {"sparsity": 0.5}
        assert [set(finding) for finding in said["findings"]] == [{"kind", "where", "what", "todo"}] * code
        assert said["verdict"] == examine(said["path"], sparsity=0.5).verdict


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
def test_the_table_is_readable_at_every_width_and_into_a_pipe(model, doctor, monkeypatch, width):
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    code, out, err = doctor(model(spoil))
    *lines, verdict = out.splitlines()
    assert (code, err) == (1, "") and verdict.startswith("not healthy: 1 finding")
    assert all(len(line.rstrip()) <= (width or 240) for line in lines)
    assert "model.layers.2.self_attn.o_proj" in "".join(line.strip() for line in lines).replace(" ", "")
    assert out.count("row-uniform") >= 12 and "50.00%" in out and "not-finite" in out
    if width is None:  # a layer is a line
        assert sum(line.startswith("model.") and "row-uniform" in line for line in lines) == 12


def test_many_findings_are_cut_short_but_not_in_json(doctor, tmp_path):
    torch.save({f"a{i}.weight": torch.full((4, 4), float("nan")) for i in range(50)}, tmp_path / "a.pt")
    code, out, _ = doctor(tmp_path / "a.pt")
    assert code == 1 and "and 10 more" in out
    assert len(json.loads(doctor(tmp_path / "a.pt", "--json")[1])["findings"]) == 50


# --- runs of prunus train ---


@pytest.fixture
def run(tmp_path, capsys):
    def made(*options):
        data = tmp_path / "data.txt"
        data.write_bytes(bytes(range(32, 127)) * 40)
        main(["train", *FAST, "--data", str(data), "--out", str(tmp_path / "run"), *options])
        capsys.readouterr()
        return tmp_path / "run"

    return made


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("--score none", ""),
        ("--optimizer adamwprune", "--sparsity 0.5 --pattern global"),
        ("--allocate uniform --sparsity 0.3 --exclude blocks.0.*", "--sparsity 0.3 --pattern layer"),
        ("--allocate depth", "--sparsity 0.5"),
        ("--allocate 2:4 --schedule constant", "--pattern 2:4"),
        ("--allocate row --score magnitude --schedule one_shot --begin 3", "--sparsity 0.5 --pattern row"),
    ],
)
def test_a_finished_run_is_healthy_and_what_was_asked(run, doctor, options, asked):
    code, out, _ = doctor(run(*options.split()), *asked.split(), "--json")
    said = json.loads(out)
    assert code == 0, said["findings"]
    if asked:
        assert said["digest"] == json.loads((Path(said["path"]).parent / "result.json").read_text())["digest"]


def test_a_checkpoint_or_a_result_that_was_changed_is_sick(run, doctor):
    path = run("--score", "magnitude")
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"digest": "0" * 64}))
    code, out, _ = doctor(path)
    assert code == 1 and "result.json" in out
    (path / "result.json").unlink()
    state, name = torch.load(path / "checkpoint.pt", weights_only=True), "blocks.0.mlp.up.weight"
    state["model"][name].add_(1e-3)
    state["model"]["head.weight"] = state["model"]["head.weight"] + 1
    write_torch_file(path / "checkpoint.pt", state)  # with checksums that fit
    assert places(examine(path)) == {("came-back", name), ("untied", "head.weight")}


# --- real folders ---


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.name)
def test_real_models_are_dense_until_they_are_pruned_as_asked(path, doctor, tmp_path):
    if not path.is_dir():
        pytest.skip("PRUNUS_DATA names no folder with models")
    code, out, _ = doctor(path, "--json")
    said = json.loads(out)
    assert (code, said["pattern"], said["num_zeros"]) == (0, "dense", 0)
    code, out, _ = doctor(path, "--sparsity", "0.5")
    assert code == 1 and "too-dense" in out
    for pattern, name in {"row": "row-uniform", "2:4": "2:4"}.items():
        tensors = load_file(path / "model.safetensors")
        for weight in (tensors[name] for name in tensors if name.endswith("proj.weight")):
            rows = weight if pattern == "row" else weight.view(-1, 4)
            rows.scatter_(1, rows.abs().argsort(1)[:, : rows.shape[1] // 2], 0.0)
        made = folder(tmp_path / "model", tensors, json.loads((path / "config.json").read_text()))
        report = examine(made, sparsity=0.5, pattern=pattern)
        assert report.is_healthy and report.pattern == name
