"""The demo: a study with one line of progress for the whole, a table, text, a page and what to do next."""

import contextlib
import io
import re
import shlex

import numpy as np
import pytest
from small_gpt import fewer_weights
from study_command import stamps

from prunus.cli import main
from prunus.files.json_file import read_json
from prunus.lab.trainer import Training

pytestmark = pytest.mark.usefixtures("few_weights")
SMALL = ("--steps", "20", "--seeds", "1")


@pytest.fixture(scope="module", autouse=True)
def small_data():
    text = (b"def f(self):\n    return 1\n" * 200, b"def g(self):\n    return 2\n" * 30)
    parts = tuple(np.frombuffer(part, "uint8") for part in text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prunus.lab.data.datasets.read_stdlib", lambda: parts)
        patched.setattr("prunus.cli.demo.EVERY", 0.0)
        patched.setattr("prunus.cli.demo.LENGTH", 20)
        yield


def demo(out) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as progress:
        main(["demo", *SMALL, "--out", str(out)])
    return said.getvalue().splitlines(), progress.getvalue().splitlines()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_data):
    out = tmp_path_factory.mktemp("demo") / "demo"
    with fewer_weights():
        return out, *demo(out)


@pytest.mark.slow
def test_it_ends_with_table_text_page_and_commands_that_work(finished):
    out, said, _ = finished
    assert any("4 of 4 runs" in line for line in said)
    assert any(line.startswith("random at 50.0%: one seed: no interval") for line in said)
    assert any(re.search(r"┃ dense +┃ bitter7 +┃", line) for line in said)
    rows = {row["arm"]: row["mean"] for row in read_json(out / "study_result.json")["rows"]}
    for arm in ("random", "magnitude", "bitter7"):
        more = rows[arm] - rows["dense"]
        line = f"{arm} at 50.0%, {more / rows['dense']:+.1%} against dense: one seed: no interval ({more:+.2f})"
        assert line in said or line.replace(f"{more:+.2f}", f"{more:+.3f}") in said
    assert sum("def __init__(self" in line for line in said) == 2 and not any("\\x" in line for line in said)
    finding = next(line for line in said if line.startswith("At 50 % sparsity")).rstrip(".")
    assert finding.replace(" %", "\u00a0%") in (out / "report.html").read_text()
    assert any(f"open {out / 'report.html'} in a browser" in line for line in said)
    assert any(
        re.fullmatch(r"In a file bitter7 takes [\d,]+ bytes, dense [\d,]+: -?\d+% less\.", line) for line in said
    )
    commands = [line.strip() for line in said if line.startswith("  prunus ")]
    assert len(commands) == 3
    main(shlex.split(commands[0])[1:])
    assert (out / "small" / "run.json").is_file()


@pytest.mark.slow
def test_outside_a_terminal_it_says_how_far_the_whole_is(finished):
    lines = finished[2]
    shares = [int(line.partition("%")[0]) for line in lines]
    assert shares == sorted(shares) and shares[-1] == 100
    assert lines[-1].lstrip().startswith("100%  bitter7, seed 0: step 20 of 20, about 0 s left")
    assert len(lines) == 20 + 3 * 13  # the first 7 of 20 steps are shared


@pytest.mark.slow
def test_again_it_trains_nothing(finished, monkeypatch):
    out, said, _ = finished
    before = stamps(out)
    monkeypatch.setattr(Training, "train_step", lambda training: pytest.fail("nothing is left to train"))
    assert len(demo(out)[0]) == len(said) and stamps(out) == before


@pytest.mark.parametrize("options", [("--steps", "0"), ("--seeds", "0"), ("--sparsity", "1.5")], ids=str)
def test_options_without_sense_are_refused_in_one_line(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop, contextlib.chdir(tmp_path):
        main(["demo", *options])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and not (tmp_path / "runs").exists()
