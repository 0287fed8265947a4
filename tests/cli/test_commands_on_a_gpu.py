"""Commands with ``--device cuda``: folders that are read block by block give what they give on the CPU."""

import json

import pytest
from test_prune_command import FAST, data_of, folder, run

__all__ = ["folder"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "--sparsity", 0.5],
        ["prune", "--no-repair", "--score", "magnitude"],
        ["prune", "--bits", 4],
        ["prune", "--recover", 400],
        ["shrink", "--size", 0.7],
        ["shrink", "--layers", 1],
        ["shrink", "--size", 0.7, "--recover", 400],
    ],
    ids=lambda parts: " ".join(map(str, parts)),
)
def test_figures_are_those_of_the_cpu(command, folder):
    name, *options = command
    rows = {}
    for device in ("cpu", "cuda"):
        out = folder / device
        run(name, folder / "model", *FAST, *data_of(folder), *options, "--device", device, "--out", out)
        rows[device] = json.loads((out / "result.json").read_text())["rows"]
    assert rows["cpu"].keys() == rows["cuda"].keys()
    for row, figures in rows["cpu"].items():
        assert rows["cuda"][row]["sparsity"] == figures["sparsity"]
        assert rows["cuda"][row]["perplexity"] == pytest.approx(figures["perplexity"], rel=0.05)


def test_a_folder_is_evaluated_as_on_the_cpu(folder, capsys):
    run("prune", folder / "model", *FAST, *data_of(folder), "--out", folder / "out")
    said = []
    for device in ("cpu", "cuda"):
        capsys.readouterr()
        run("eval", folder / "out", "--tokens", folder / "valid.u16", *FAST[2:], "--device", device)
        said.append(float(capsys.readouterr().out.partition("perplexity ")[2].split(",")[0]))
    assert said[1] == pytest.approx(said[0], rel=0.01)
