"""``prunus doctor``: exit codes, the table, the JSON, real checkpoints and real folders."""

import json
import os
from pathlib import Path

import pytest
import torch
from patients import folder, healthy, prune_rows_
from safetensors import safe_open
from small_gpt import fewer_weights

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
    code, out, err = doctor(tmp_path / "nowhere")
    assert (code, out) == (2, "") and len(err.strip().splitlines()) == 1 and "nowhere" in err


@pytest.mark.parametrize("options", [["--pattern", "2:3:4"], ["--sparsity", "2"], ["--allow", "all"], ["--sparse"]])
def test_mistakes_are_one_line_and_exit_code_2(model, doctor, options):
    code, out, err = doctor(model(), *options)
    assert (code, out) == (2, "") and len(err.strip().splitlines()) == 1


def test_json_is_one_object_and_nothing_else(model, doctor):
    for change, expected in ((lambda tensors: None, 0), (spoil, 1)):
        code, out, _ = doctor(model(change), "--json", "--sparsity", "0.5")
        said = json.loads(out, parse_constant=pytest.fail)
        assert code == expected and said["healthy"] == (code == 0)
        assert said["pattern"] and len(said["layers"]) == 20 and said["asked"] == {"sparsity": 0.5}
        assert [set(finding) for finding in said["findings"]] == [{"kind", "where", "what", "todo"}] * code
        assert said["verdict"] == examine(said["path"], sparsity=0.5).verdict


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_is_readable_at_every_width(model, doctor, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = doctor(model(spoil))
    *lines, verdict = out.splitlines()
    assert all(len(line.rstrip()) <= width for line in lines) and verdict.startswith("not healthy: 1 finding")
    together = "".join(line.strip() for line in out.splitlines())
    assert "model.layers.2.self_attn.o_proj" in together.replace(" ", "")
    assert out.count("row-uniform") >= 12 and "50.00%" in out and "not-finite" in out


def test_into_a_pipe_a_layer_is_a_line(model, doctor, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, err = doctor(model(spoil))
    assert code == 1 and err == ""
    lines = [line for line in out.splitlines() if line.startswith("model.") and "row-uniform" in line]
    assert len(lines) == 12 and all("50.00%" in line or "49." in line for line in lines)


def test_dead_rows_are_warnings_and_end_with_1_only_if_strict(model, doctor):
    def kill(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][3] = 0

    path = model(kill)
    code, mild, _ = doctor(path)
    assert (
        code == 0 and "rows 3 of 40" in mild and mild.splitlines()[-1].startswith("healthy with 1 warning (dead-rows)")
    )
    code, out, _ = doctor(path, "--strict")
    assert code == 1 and "rows 3 of 40" in out and "not healthy: 1 finding (dead-rows)" in out
    told = json.loads(doctor(path, "--json")[1])
    assert (told["healthy"], told["findings"], [one["kind"] for one in told["warnings"]]) == (True, [], ["dead-rows"])


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
    "options",
    [
        ["--score", "none"],
        ["--optimizer", "adamwprune"],
        ["--allocate", "uniform", "--sparsity", "0.3", "--exclude", "blocks.0.*"],
        ["--allocate", "depth"],
        ["--allocate", "2:4", "--schedule", "constant"],
        ["--allocate", "row", "--score", "magnitude", "--schedule", "one_shot", "--begin", "3"],
        ["--score", "magnitude", "--begin", "1", "--end", "5", "--sparsity", "0.9"],
        ["--score", "magnitude", "--schedule", "cubic", "--budget-scale", "1.5", "--begin", "0.2", "--end", "1.0"],
    ],
    ids=str,
)
def test_a_finished_run_is_healthy_and_says_itself_what_was_asked(run, doctor, options):
    code, out, _ = doctor(run(*options), "--json")
    said = json.loads(out)
    assert code == 0, said["findings"]
    if "none" not in options:
        assert said["asked"]["sparsity"] in (0.3, 0.5, 0.9)
        assert said["digest"] == json.loads((Path(said["path"]).parent / "result.json").read_text())["digest"]


@pytest.fixture(scope="module", params=["linear", "zhu_gupta", "one_shot"])
def scheduled(request, tmp_path_factory):
    """A schedule, and the folder of a run by it."""
    path = tmp_path_factory.mktemp("scheduled")
    (path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    options = ["--score", "magnitude", "--schedule", request.param, "--begin", "2", "--end", "5"]
    with fewer_weights():
        main(["train", *FAST, "--data", str(path / "data.txt"), "--out", str(path / "run"), *options])
    return request.param, path / "run"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4))])
def test_a_run_on_its_way_is_held_to_its_schedule(scheduled, step):
    from prunus.lab.run import Run
    from prunus.lab.trainer import Training

    schedule, path = scheduled
    values = json.loads((path / "run.json").read_text())
    training = Training(Run.from_json(values.get("run", values)))
    for _ in range(step):
        training.train_step()
    state = training.state() | {"format": "prunus-checkpoint-1"}
    torch.save(state, path / "middle.pt")
    report = examine(path / "middle.pt")
    assert report.is_healthy, report.findings
    asked = report.asked.get("sparsity", 0.0)
    if asked:
        name = next(iter(state["pruner"]["masks"]))
        state["pruner"]["masks"][name].zero_()
        torch.save(state, path / "middle.pt")
        worse = {finding.kind for finding in examine(path / "middle.pt").findings}
        assert "came-back" in worse and "too-sparse" in worse
    last = step if schedule == "one_shot" or step == 5 else step // 2 * 2  # the last event
    assert asked == pytest.approx(training.pruner.schedule(last))


def test_a_checkpoint_that_was_changed_is_sick(run, doctor):
    path = run("--score", "magnitude") / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    name = "blocks.0.mlp.up.weight"
    state["model"][name].add_(1e-3)
    state["model"]["head.weight"] = state["model"]["head.weight"] + 1
    write_torch_file(path, state)  # with checksums that fit
    said = json.loads(doctor(path, "--json")[1])
    assert {finding["kind"] for finding in said["findings"]} == {"came-back", "untied"}
    assert {finding["where"] for finding in said["findings"]} == {name, "head.weight"}


def test_a_result_with_another_digest_is_sick(run, doctor):
    path = run("--score", "magnitude")
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"digest": "0" * 64}))
    code, out, _ = doctor(path)
    assert code == 1 and "result.json" in out


# --- real folders ---


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.name)
def test_real_models_are_healthy_and_dense(path, doctor):
    if not path.is_dir():
        pytest.skip("PRUNUS_DATA names no folder with models")
    code, out, _ = doctor(path, "--json")
    said = json.loads(out)
    assert (code, said["pattern"], said["num_zeros"]) == (0, "dense", 0)
    code, out, _ = doctor(path, "--sparsity", "0.5")
    assert code == 1 and "too-dense" in out


@pytest.mark.parametrize("pattern", ["row", "2:4"])
def test_a_real_model_that_was_pruned_is_what_was_asked(pattern, doctor, tmp_path):
    path = STORIES[0]
    if not path.is_dir():
        pytest.skip("PRUNUS_DATA names no folder with models")
    with safe_open(str(path / "model.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            rows = weight if pattern == "row" else weight.view(-1, 4)
            rows.scatter_(1, rows.abs().argsort(1)[:, : rows.shape[1] // 2], 0.0)
    made = folder(tmp_path / "model", tensors, json.loads((path / "config.json").read_text()))
    code, out, _ = doctor(made, "--pattern", pattern, "--sparsity", "0.5", "--json")
    assert code == 0, json.loads(out)["findings"]
    assert json.loads(out)["pattern"] == {"row": "row-uniform"}.get(pattern, pattern)


def test_weights_are_not_taken_for_masks(model, doctor):
    path = model()
    code, _, said = doctor(path, "--masks", path / "model.safetensors")
    assert code == 2
    assert "is no mask" in said
