"""The demo: two trainings, what is made of the dense model, a table, text, a page without a script, what to do next."""

import contextlib
import io
import re
import shlex

import numpy as np
import pytest
from small_gpt import fewer_weights
from study_command import stamps

from prunus.cli import demo as demo_command
from prunus.cli import main
from prunus.doctor import examine
from prunus.files.json_file import read_json, write_json
from prunus.lab.trainer import Training

pytestmark = pytest.mark.usefixtures("few_weights")
NAMES = ["dense", "sparse", "magnitude", "repaired", "recovered", "in 4 bits", "shrunk", "shrunk, recovered"]


@pytest.fixture(scope="module", autouse=True)
def small_data():
    text = (b"def f(self):\n    return 1\n" * 200, b"def g(self):\n    return 2\n" * 30)
    parts = tuple(np.frombuffer(part, "uint8") for part in text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("prunus.lab.data.datasets.read_stdlib", lambda: parts)
        patched.setattr("prunus.cli.demo.LENGTH", 20)
        patched.setattr("prunus.cli.demo.WIDTH", 16)
        yield


def demo(out, *options) -> str:
    """What it says on standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
        main(["demo", "--steps", "20", *options, "--out", str(out)])
    return said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_data):
    pytest.importorskip("transformers", reason="needs pip install prunus[hf]")
    out = tmp_path_factory.mktemp("demo") / "demo"
    with fewer_weights():
        return out, demo(out)


@pytest.mark.slow
def test_it_ends_with_a_table_a_line_and_commands_that_work(finished, capsys):
    out, said = finished
    rows = read_json(out / "demo.json")["rows"]
    assert [row["name"] for row in rows] == NAMES
    size = {row["name"]: row["num_bytes"] for row in rows}
    assert size["in 4 bits"] < size["repaired"] == size["recovered"] < size["shrunk"] < size["dense"]
    shares = {row["name"]: row["perplexity"] / rows[0]["perplexity"] - 1 for row in rows}
    line = next(line for line in said.splitlines() if line.startswith("80 % zeros after training"))
    for name, words in {"magnitude": "by magnitude alone", "repaired": "with repair", "recovered": "recovered"}.items():
        assert float(re.search(rf"([+-][\d.]+)% {words}", line)[1]) == pytest.approx(100 * shares[name], abs=0.051)
    assert line.endswith(f"the file has {size['in 4 bits'] / size['dense']:.0%} of the bytes.")
    commands = [line.strip() for line in said.splitlines() if line.startswith("  prunus ")]
    assert len(commands) == 3
    main(shlex.split(commands[0])[1:])
    main(["eval", str(out / "small"), "--eval-windows", "2"])
    assert "perplexity" in capsys.readouterr().out and not examine(out / "small").findings


@pytest.mark.slow
def test_its_page_is_small_has_no_script_and_says_what_the_table_says(finished):
    out, _ = finished
    page = (out / "report.html").read_text()
    assert len(page) < 100_000 and "<script" not in page and "script-src &#39;none&#39;" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    for row in read_json(out / "demo.json")["rows"]:
        assert row["name"] in page and f"{row['num_bytes'] / 1e6:.2f} MB" in page
    main(["report", str(out)])
    assert (out / "report.html").read_text() == page


@pytest.mark.slow
def test_the_words_of_a_hostile_demo_stay_words(finished, tmp_path):
    values = read_json(finished[0] / "demo.json")
    values["rows"][1] |= {"name": "<img src=x onerror=alert(1)>", "done": "</td><script>"}
    values |= {"texts": {"<b>": "</pre><script>"}, "prompt": "<i>"}
    write_json(tmp_path / "demo.json", values)
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "<img" not in page and "<script" not in page and "<b></h3>" not in page and "<i>" not in page
    write_json(tmp_path / "demo.json", values | {"rows": []})
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])


@pytest.mark.slow
def test_again_it_trains_nothing_and_other_options_are_refused(finished, monkeypatch, capsys):
    out, _ = finished
    before = {path: stamp for path, stamp in stamps(out).items() if "dense/" in str(path) or "sparse/" in str(path)}
    monkeypatch.setattr(Training, "train_step", lambda training: pytest.fail("nothing is left to train"))
    monkeypatch.setattr(demo_command, "_can_recover", lambda: False)
    again = demo(out)
    assert {path: stamps(out)[path] for path in before} == before
    assert "it needs pip install 'prunus[hf]'" in again and "recovered" not in again.split("What they write")[0]
    with pytest.raises(SystemExit):
        demo(out, "--seed", "1")


@pytest.mark.parametrize("options", [("--steps", "0"), ("--sparsity", "1.5")], ids=str)
def test_options_without_sense_are_refused_in_one_line(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop, contextlib.chdir(tmp_path):
        main(["demo", *options])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and not (tmp_path / "runs").exists()
