"""Text from files is shown, never obeyed: no escape sequence, line break, direction mark or markup of theirs acts."""

import ast
import json
import logging
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from report_folders import make_recovery, make_run, make_study, stopped
from safetensors.torch import save_file
from torch import nn

import prunus.cli.doctor
from prunus.cli import main
from prunus.cli.console import Terminal, escaped, print_traceback

EVIL = "x\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eab\u2066\nhealthy: forged[red]y[/red]:smile:"
SHOWN = r"x\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eab\u2066\nhealthy: forged[red]y[/red]:smile:"
FILE = EVIL.replace("/", "")  # what a file may be called
OWN = re.compile(r"\x1b\[([0-9;]*m|\?25[lh]|2K|1A)|\r(?=\x1b\[2K)")  # colours, and how bars and charts are redrawn


@pytest.fixture(params=["pipe", "terminal"])
def says(request, capsys, monkeypatch):
    """Standard output and standard error of a call together, after a check that nothing in them acts."""
    monkeypatch.setenv("COLUMNS", "300")
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")

    def called(*args, code=0):
        try:
            main([str(arg) for arg in args])
            assert code == 0
        except SystemExit as stop:
            assert (stop.code or 0) == code
        out, err = capsys.readouterr()
        if code == 2:
            assert out == "" and err.count("\n") == 1
        lines = OWN.sub("", out + err).split("\n")
        assert [line for line in lines if not line.isprintable() or line.startswith("healthy: forged")] == []
        return "\n".join(lines)

    return called


def test_text_is_escaped_and_plain_text_is_not():
    assert escaped(EVIL) == SHOWN and escaped(SHOWN) == SHOWN
    assert escaped("Größe 模型 \u2800⣀▁ café") == "Größe 模型 \u2800⣀▁ café"
    assert escaped("\ud800\x7f\t\x00") == r"\ud800\x7f\t\x00"
    for written in (
        "می\u200cخواهم",
        "ක්\u200dෂ",
        "👩\u200d💻",
        "10\u00a0%",
        "模型\u3000甲",
        "ភាសា\u200bខ្មែរ",
        "Zu\u00adcker",
    ):
        assert escaped(written) == written
    for acting in ("\u202e", "\u2066", "\u200e", "\u200f", "\u061c", "\u2028", "\x85", "\x9b", "\ufeff", "\U000e0041"):
        assert escaped(f"a{acting}b") == f"a{acting.encode('unicode_escape').decode()}b"


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_names_of_tensors(says, tmp_path, form):
    path = tmp_path / f"a.{form}"
    tensors = {f"{EVIL}.weight": torch.full((4, 4), float("nan")), f"{EVIL}.bias": torch.ones(4)}
    torch.save(tensors, path) if form == "pt" else save_file(tensors, path)
    assert says("doctor", path, code=1).count(SHOWN) == 2  # in the table and in the finding
    assert "[red]y[/red]:smile:.weight in" in says("doctor", path, "--masks", path, code=2)
    told = json.loads(says("doctor", path, "--json", code=1))
    assert told["findings"][0]["where"] == f"{EVIL}.weight"


def test_names_of_tensors_in_a_narrow_terminal(says, tmp_path, monkeypatch):
    torch.save({f"{EVIL}.weight": torch.ones(4, 4)}, tmp_path / "a.pt")
    monkeypatch.setenv("COLUMNS", "60")
    assert SHOWN in says("doctor", tmp_path / "a.pt").replace("\n", "")


def test_names_of_files_and_what_json_says(says, tmp_path):
    folder = tmp_path / FILE
    folder.mkdir()
    error = says("doctor", folder, code=2)
    assert r"x\x1b[2J" in error and "[red]" in error
    save_file({"a.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    says("doctor", folder)
    says("export", folder, "--out", tmp_path / f"small {FILE}")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": EVIL}}))
    assert "[red]" in says("doctor", folder, code=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EVIL: FILE}}))
    says("doctor", folder, code=2)
    says("eval", folder, code=2)


def test_names_of_weights_that_are_pruned(says, tmp_path, monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(FILE.replace(".", ""), nn.Linear(4, 4))

        def forward(self, x):
            return next(self.children())(x)

    def made():
        return {"model": Model(), "batches": [torch.randn(2, 4)], "evaluate": lambda model: 1.0, "metric": EVIL}

    monkeypatch.setitem(sys.modules, "toy_models", types.ModuleType("toy_models"))
    sys.modules["toy_models"].made = made
    said = says("prune", "toy_models:made", "--score", "magnitude", "--out", tmp_path / "out")
    assert r"x\x1b[2J" in said and SHOWN in said


def test_options_of_a_run_in_a_checkpoint(says, tmp_path):
    torch.save({"format": EVIL, "model": {}, "run": {"model": EVIL, EVIL: EVIL}, "step": 1}, tmp_path / "checkpoint.pt")
    for command in (["eval"], ["export", "--out", tmp_path / "out"], ["train", "--resume", "--out"]):
        says(command[0], tmp_path, *command[1:], *[tmp_path] * (command[0] == "train"), code=2)


def test_names_and_failures_of_runs(says, tmp_path):
    run = stopped(make_run(tmp_path / FILE), 0.5, EVIL)
    says("report", run)
    study = make_study(tmp_path / "study", ["dense", "magnitude", f"b{EVIL}".replace("/", "")], (0.5,), 2)
    result = json.loads((study / "study_result.json").read_text())
    failed = {"arm": EVIL, "sparsity": 0.5, "seed": 0, "message": EVIL}
    (study / "study_result.json").write_text(json.dumps(result | {"failed": [failed]}))
    says("report", study)
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(described | {"run": {"steps": EVIL}}))
    says("report", run, code=2)


def test_what_a_recovery_says(says, tmp_path):
    words = {"lr_reason": EVIL, "notes": [EVIL], "settings": {EVIL: EVIL}}
    says("report", make_recovery(tmp_path / FILE, **words))
    says("report", make_recovery(tmp_path / "damaged", seconds=EVIL), code=2)


def test_arms_of_a_study(says, tmp_path):
    (tmp_path / "data.txt").write_bytes(bytes(range(32, 127)) * 40)
    base, quoted = tmp_path / "base.toml", json.dumps(EVIL)
    base.write_text(f'data = "{tmp_path / "data.txt"}"\nsteps = 4\n[[arm]]\nname = {quoted}\nscore = "bitter3"\n')
    options = ("study", "--base", base, "--dry-run", "--out", tmp_path / FILE)
    assert SHOWN in says(*options)
    assert "[red]" in says(*options, "--arm", f"{EVIL} score=bitter3", code=2)


def test_logs_and_warnings_of_libraries_and_tracebacks(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(command):
        assert EVIL not in warnings.formatwarning(EVIL, UserWarning, "file.py", 1)
        logging.getLogger("somewhere").warning("\x1b[1mREPORT\x1b[0m\nkey: %s", EVIL)
        logging.getLogger("somewhere").warning("100 %", *())

    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(prunus.cli.doctor, "run", run)
    monkeypatch.setattr(logging.getLogger("somewhere"), "handlers", [handler])
    before = logging.getLogRecordFactory(), warnings.formatwarning
    main(["doctor", "x"])
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before
    log = capsys.readouterr().err
    assert log.startswith("REPORT\nkey: x\\x1b[2J") and log.endswith("\n100 %\n")
    print_traceback(None, RuntimeError(EVIL), None)
    assert all(line.isprintable() for line in (log + capsys.readouterr().err).split("\n"))
    assert sys.excepthook is print_traceback


@pytest.mark.parametrize("width", [20, 80])
def test_whatever_is_drawn_is_escaped(width):
    from rich.panel import Panel
    from rich.text import Text

    terminal = Terminal(width=width)
    with terminal.capture() as shown:
        terminal.print(Panel(Text(EVIL.replace("\n", "")), title=EVIL), EVIL)
    assert all(line.isprintable() for line in shown.get().split("\n"))


def test_every_command_prints_through_the_console():
    for path in sorted(Path(prunus.cli.__file__).parent.glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        imported = {
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == "console"
            for alias in node.names
        }
        if path.name not in ("console.py", "__init__.py"):
            assert "Console" not in calls, f"{path.name}: take Terminal of prunus.cli.console"
            assert "print" not in calls - imported, f"{path.name}: import print from prunus.cli.console"
