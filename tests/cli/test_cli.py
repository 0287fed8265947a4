"""The command line: help without torch, bad input in one line with exit code 2 and nothing written."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from prunus.cli import COMMANDS, _parse, main
from prunus.cli.help import GROUPS, PAGES
from prunus.cli.study_work import Lines
from prunus.files.lock import lock_folder
from prunus.lab.models import MODELS, build
from prunus.lab.run import ModelName, Run, ScoreName
from prunus.score import SCORES

pytestmark = pytest.mark.usefixtures("few_weights")
FAST = "--model gpt2-tiny --context 8 --batch 2 --steps 6 --every 2 --eval-size 2 --warmup 1".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_bytes(bytes(range(32, 127)) * 40)
    return path


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on stderr of a call that is refused."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    return said.err


HELP = """
import contextlib, io, json, sys
from prunus.cli import COMMANDS, main
shown = {}
for args in ([], ["--help"], *([name, "--help"] for name in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(args)
        except SystemExit as stop:
            assert not stop.code, args
    assert not {"torch", "transformers"} & set(sys.modules), args
    shown[" ".join(args)] = out.getvalue()
print(json.dumps(shown))
"""


def test_help_shows_itself_without_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert len(shown) == 2 + len(COMMANDS)
    for args, text in shown.items():
        name = args.removesuffix("--help").strip()
        assert text.startswith(f"example: prunus {name}" if name else "usage: prunus"), args


def test_the_overview_fits_a_screen_and_has_the_sentences_in_one_column(capsys):
    main([])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 24 and max(map(len, shown)) <= 80
    lines = [line for line in shown if line.startswith("  ")]
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert len({line.index(text) for line, text in zip(lines, COMMANDS.values(), strict=True)}) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_one_that_can_be_parsed(name):
    assert set(PAGES) == set(COMMANDS) and len(PAGES[name][0]) <= 70
    command, *args = shlex.split(PAGES[name][0])[1:]
    assert command == name
    _parse(import_module(f"prunus.cli.{name}").Command, name, args)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_the_guide_that_help_names_shows_the_command(name):
    page = Path(__file__).parents[2] / "docs" / f"{PAGES[name][1]}.md"
    assert name == "demo" or f"prunus {name}" in page.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("(") or "  (default" in line] == []


def test_every_option_of_train_is_shown_with_its_default(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for name, default in [("--steps", "1000"), ("--score", "bitter7"), ("--schedule", "linear"), ("--resume", "False")]:
        assert name in shown and f"(default: {default})" in shown


def test_the_names_in_help_are_those_of_the_tables():
    assert set(get_args(ScoreName)) == {"none", *SCORES}
    assert set(get_args(ModelName)) == set(MODELS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stepz", "4"], "--steps"),
        (["--steps", "many"], "--steps takes a whole number, got 'many'"),
        (["--every", "2.5"], "--every takes a whole number, got '2.5'"),
        (["--begin", "soon"], "--begin takes a number, got 'soon'"),
        (["--sparsity", "50%"], "--sparsity takes a number, got '50%'; 50% is 0.5"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--sparsity", "1.0"], "[0, 1)"),
        (["--sparsity", "-0.1"], "[0, 1)"),
        (["--begin", "5", "--end", "4"], "begin before it ends"),
        (["--begin", "0.5", "--end", "0.5"], "begin before it ends"),
        (["--end", "7"], "would not reach its sparsity in the run of 6 steps"),
        (["--score", "bitter10"], "bitter10"),
        (["--exclude", "nowhere.*"], "nowhere.*"),
        (["--include", "*.bias"], "dimension"),
        (["--spam"], "adamwprune"),
        (["--score", "magnitude", "--eps", "1e-8"], "eps"),
        (["--model", "lenet5"], "lenet5"),
        (["--budget-scale", "0"], "budget_scale"),
        (["--budget-scale", "inf"], "budget_scale"),
        (["--seed", str(10**20)], "at most 63 bits"),
        (["--clip", "-1"], "clip must be a number of at least 0"),  # would turn every gradient round
        (["--weight-decay", "nan"], "weight_decay must be"),
        (["--lr", "inf"], "lr must be"),
        (["--eval-size", "-3"], "eval_size must be"),
        (["--save-every", "-1"], "save_every must be"),
        (["--warmup", "-4"], "warmup must be"),
        (["--warmup", "1.5"], "warmup must be a whole number of steps, or a fraction of the run"),
        (["--eps", "-1"], "eps must be"),
        (["--beta2", "1.5"], "beta2 must lie in [0, 1)"),
        (["--optimizer", "sgd"], "bitter7 reads Adam's moments, which sgd does not keep; pass --score magnitude"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(options, said, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert said in refused(capsys, "train", *FAST, "--data", text, "--out", out, *options)
    assert not out.exists()


def test_missing_data_and_unknown_commands_are_refused(tmp_path, capsys):
    assert "nowhere.bin" in refused(capsys, "train", "--data", tmp_path / "nowhere.bin", "--out", tmp_path / "run")
    assert refused(capsys, "trian") == "prunus: there is no command 'trian'; did you mean train?\n"
    assert "the commands are demo, report, " in refused(capsys, "xyz")
    assert "there is no file or folder" in refused(capsys, "eval", tmp_path / "nowhere.pt")
    assert "there is no file or folder" in refused(capsys, "eval", tmp_path / "nowhere", "--text", tmp_path / "text")
    assert "no config.json" in refused(capsys, "eval", tmp_path)
    (tmp_path / "a.safetensors").touch()
    assert "give its folder" in refused(capsys, "eval", tmp_path / "a.safetensors", "--text", tmp_path / "text")
    assert "at least 0" in refused(capsys, "eval", tmp_path / "nowhere.pt", "--eval-windows", "-3")
    assert "run.json" in refused(capsys, "train", "--resume", "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("command", "name"), [("eval", "PATH"), ("export", "SOURCE"), ("prune", "MODEL"), ("shrink", "MODEL")]
)
def test_an_argument_that_is_missing_is_named(command, name, capsys):
    line = refused(capsys, command)
    assert f"{name} is missing" in line and ".venv" not in line


def test_a_folder_in_use_is_not_overwritten(text, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    assert "--resume" in refused(capsys, "train", *FAST, "--data", text, "--out", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_folder_that_another_process_trains_in_is_left_alone(text, tmp_path, capsys):
    options = (*FAST, "--data", text, "--out", tmp_path / "run")
    with lock_folder(tmp_path / "run"):
        assert "another process is working" in refused(capsys, "train", *options)
    main([str(option) for option in ("train", *options)])
    capsys.readouterr()
    with lock_folder(tmp_path / "run"):
        assert "another process is working" in refused(capsys, "train", "--resume", "--out", tmp_path / "run")


def test_of_two_trainings_that_begin_at_once_the_later_is_refused(text, tmp_path, capsys, monkeypatch):
    def built(*args):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text("the other's")
        return build(*args)

    monkeypatch.setattr("prunus.lab.trainer.build", built)
    assert "not empty" in refused(capsys, "train", *FAST, "--data", text, "--out", tmp_path / "run")
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["the other's"]


@pytest.mark.parametrize(
    "options",
    [
        ["--score", "none"],
        ["--optimizer", "adamwprune", "--spam"],
        ["--allocate", "depth", "--budget-scale", "1.5"],
        ["--score", "magnitude", "--optimizer", "sgd", "--schedule", "one_shot", "--begin", "3"],
        ["--allocate", "2:4", "--schedule", "constant"],
        ["--score", "movement", "--accumulate", "2", "--schedule", "cubic"],
        pytest.param(["--score", "movement", "--precision", "bfloat16"], marks=pytest.mark.slow),  # slow on a CPU
        ["--score", "wanda", "--allocate", "row", "--schedule", "zhu_gupta"],
    ],
    ids=str,
)
def test_train_reaches_the_sparsity_and_eval_agrees(options, text, tmp_path, capsys):
    out = tmp_path / "run"
    main(["train", *FAST, "--data", str(text), "--out", str(out), *options])
    assert "prunable weights are zero" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert result["sparsity"] == (0.0 if "none" in options else 0.5)
    assert result["steps"] == (9 if "1.5" in options else 6)
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sparsity"] == result["sparsity"] and last["eval"]["loss"] == result["loss"]

    main(["eval", str(out), "--every-layer"])
    said = capsys.readouterr().out
    assert f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.3f}" in said
    assert " held-out windows, the first (--eval-windows 0 takes" in said and f"{result['sparsity']:.4%} of" in said


def test_figures_of_images_have_no_perplexity(tmp_path, capsys):
    small = "--model lenet5 --data digits --batch 2 --steps 4 --every 1 --eval-size 2 --warmup 1".split()
    main(["train", *small, "--out", str(tmp_path / "run")])
    main(["eval", str(tmp_path / "run")])
    trained, evaluated = capsys.readouterr().out.splitlines()
    assert "accuracy" in trained and "perplexity" not in trained + evaluated
    figures = [line.partition("loss")[2].partition(" on ")[0] for line in (trained, evaluated)]
    assert figures[0] == figures[1] and "on 2 of " in evaluated and " held-out images" in evaluated


def test_help_has_the_usual_options_first_and_every_option_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for name, groups in GROUPS.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        boxes = {
            title: [option.replace("-", "_") for option in re.findall(r"^  --([\w-]+)", box, flags=re.MULTILINE)]
            for title, box in re.findall(r"^ (\w+) options\n -+\n((?:  .*\n)*)", shown, flags=re.MULTILINE)
        }
        assert [*boxes].index("usual") == 0 and boxes["usual"] == groups["usual"].split() and len(boxes["usual"]) == 10
        every = [option for options in boxes.values() for option in options]
        named = {one for names in groups.values() for one in names.replace("field", "set").split()}
        assert len(every) == len(set(every)) and named <= {*every}
        assert "more" not in boxes or name not in ("train", "study")


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_an_exported_run_is_evaluated_as_its_checkpoint_is(form, text, tmp_path, capsys):
    main(["train", *FAST, "--data", str(text), "--out", str(tmp_path / "run")])
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "small"), "--form", form])
    capsys.readouterr()
    said = []
    for folder in ("run", "small"):
        main(["eval", str(tmp_path / folder), "--eval-windows", "2", "--every-layer"])
        said.append(capsys.readouterr().out)
    assert said[0].replace("run/checkpoint.pt: ", "") == said[1].replace("small: ", "")
    assert "--length is for" in refused(capsys, "eval", tmp_path / "small", "--length", 8)
    path = tmp_path / "small" / "run.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert "run.json does not describe a model: it does not match its checksum" in refused(capsys, "eval", path.parent)
    path.write_text("{}")
    assert "run.json does not describe" in refused(capsys, "eval", tmp_path / "small")


LEAVE = """
import contextlib, os, sys
from prunus.cli import main
kept = [os.dup(1), os.dup(2)]
for args in (["--help"], ["--version"], ["train", "--help"], ["doctor", sys.argv[1]], ["doctor", sys.argv[1], "--json"],
             ["export", sys.argv[1], "--out", sys.argv[2]]):
    reader, writer = os.pipe()
    os.close(reader)  # nobody reads
    os.dup2(writer, 1)
    os.close(writer)
    try:
        main(args)
    except SystemExit as stop:
        code = stop.code
    os.write(kept[0], f"{code} ".encode())
    os.dup2(kept[1], 2)
"""


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    save_file({"a.weight": torch.full((4, 4), torch.nan)}, tmp_path / "a.safetensors")
    args = [tmp_path / "a.safetensors", tmp_path / "out.safetensors"]
    done = subprocess.run([sys.executable, "-c", LEAVE, *args], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout.split()) == ("", ["141"] * 6)


def test_long_commands_report_what_is_done_from_the_start_to_the_end(text, tmp_path, monkeypatch):
    calls: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def recorded(progress, title):
        yield None if progress is False else lambda done, total, name: calls[title].append((done, total))

    monkeypatch.setattr("prunus.oneshot.progress.progress_line", recorded)
    for title, command in {
        "bitter7": ["train", *FAST, "--data", text, "--out", tmp_path / "run"],
        "evaluate": ["eval", tmp_path / "run", "--eval-windows", "0"],
        "export": ["export", tmp_path / "run", "--out", tmp_path / "small", "--check"],
    }.items():
        calls[title] = []
        main([str(part) for part in command])
        shares = [done / total for done, total in calls[title]]
        assert len(shares) > 4 and shares == sorted(shares) and shares[0] < 0.3 and shares[-1] > 0.8, title


@pytest.mark.parametrize("prefix", ["", "[0] "])
def test_workers_of_a_study_say_how_far_they_are(prefix, capsys):
    with Lines(prefix).running("a-run", Run(steps=4)) as report:
        for step in range(1, 5):
            report(step, {"loss": 2.0, "sparsity": 0.5} | ({"eval": {"loss": 2.0}} if step % 2 == 0 else {}))
    said = [line for line in capsys.readouterr().err.splitlines() if "step" in line]
    assert [line.partition(",")[0] for line in said] == [f"{prefix}a-run: step 2/4", f"{prefix}a-run: step 4/4"]


@pytest.mark.parametrize("take", [lambda self: torch.empty(1 << 55), lambda self: bytearray(1 << 55)])
def test_too_little_memory_is_one_line_with_what_goes_on(take, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(import_module("prunus.cli.prune"), "run", take)
    line = refused(capsys, "prune", tmp_path, "--out", tmp_path / "out")
    assert "too little memory" in line and f"continues: prunus prune {tmp_path}" in line
    monkeypatch.setattr(import_module("prunus.cli.eval"), "run", take)
    assert "continues" not in refused(capsys, "eval", tmp_path)


def test_a_fault_of_the_program_is_no_lack_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("prunus.cli.eval"), "run", lambda self: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        main(["eval", str(tmp_path)])
