"""Folders have a card: what was done, how to load it, the same each time; nothing of the source is lost."""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_export_models import llama

from prunus import load_model, save_model
from prunus.cli import main
from prunus.export.card import MARK, CardFacts, hub_name, write_card

transformers = pytest.importorskip("transformers", reason="needs pip install prunus[hf]")

SOURCE_README = (
    "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\ntags:\n- theirs\npipeline_tag: text-generation\n---\n# Mine\n"
)


def front_matter(folder):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])


def card(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def code_of(folder):
    """The Python that the card says to load the folder with."""
    return card(folder).split("```python\n")[1].split("```")[0]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    llama().save_pretrained(folder)
    (folder / "README.md").write_text(SOURCE_README)
    (folder / "LICENSE").write_text("theirs")
    (folder / "NOTICE").write_text("theirs too")
    (folder / "tokenizer.json").write_text("{}")
    np.random.default_rng(0).integers(0, 64, 400).astype("<u2").tofile(tmp_path / "tokens.u16")
    return folder


def prune(source, out, *options):
    tokens, few = source.parent / "tokens.u16", "--samples 4 --length 12 --eval-windows 6".split()
    data = ["--tokens", tokens, "--eval-tokens", tokens]
    main([str(arg) for arg in ["prune", source, "--out", out, *data, *few, *options]])


def assert_nothing_of_the_source_is_lost(folder, source):
    assert (folder / "SOURCE_README.md").read_text() == SOURCE_README
    for name in ("LICENSE", "NOTICE", "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    found = front_matter(folder)
    assert found["license"] == "apache-2.0" and found["language"] == ["en", "de"]
    assert found["pipeline_tag"] == "text-generation" and found["tags"] == ["prunus", "pruned", "sparse"]
    assert card(folder).count(MARK) == 1


def test_a_pruned_folder_and_what_is_exported_from_it_have_cards(source, tmp_path, monkeypatch):
    out, small = tmp_path / "out", tmp_path / "small"
    prune(source, out)
    assert_nothing_of_the_source_is_lost(out, source)
    result = json.loads((out / "result.json").read_text())
    text = card(out)
    assert all(f"{row['perplexity']:.4f}" in text for row in result["rows"].values())
    total, share = sum(layer["num_weights"] for layer in result["layers"]), result["rows"]["repaired"]["sparsity"]
    assert f"{share:.2%} of the {total:,} prunable weights of source are zero" in text and "solved for" in text
    assert hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest() in text
    assert "![Sparsity of each layer](layers.svg)" in text and (out / "layers.svg").is_file()
    assert front_matter(out)["library_name"] == "transformers"
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(code_of(out), scope)
    assert type(scope["model"]).__name__ == "LlamaForCausalLM"

    main(["export", "out", "--out", "small", "--check"])
    assert_nothing_of_the_source_is_lost(small, source)
    assert front_matter(small)["library_name"] == "prunus" and "prunable weights of source are zero" in card(small)
    assert (
        card(small).split("## Load it")[0].replace("# small", "# out").splitlines()[12:]
        == (text.split("## Load it")[0].splitlines()[12:])
    )
    exec(code_of(small), scope)
    assert type(scope["model"]).__name__ == "LlamaForCausalLM"


def test_the_same_command_writes_the_same_card(source, tmp_path):
    for place in ("one", "two"):
        prune(source, tmp_path / place / "out", "--no-repair")
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / place / "out").iterdir()} for place in ("one", "two"))
    first.pop("result.json"), second.pop("result.json")  # which has the time it took
    assert first == second and "README.md" in first


def test_a_model_that_is_saved_keeps_the_files_of_the_folder_it_was_loaded_from(source, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    save_model(model, tmp_path / "small")
    assert_nothing_of_the_source_is_lost(tmp_path / "small", source)
    assert "of source are zero" in card(tmp_path / "small") and "## Quality" not in card(tmp_path / "small")
    save_model(load_model(tmp_path / "small"), tmp_path / "again", source=tmp_path / "small")
    assert_nothing_of_the_source_is_lost(tmp_path / "again", source)


def test_what_is_known_of_the_hub_is_the_base_model(tmp_path):
    with pytest.warns(UserWarning, match="Linear is not one"):
        save_model(torch.nn.Linear(4, 4), tmp_path / "nowhere")
    assert "load_sparse as load" in card(tmp_path / "nowhere")
    assert not {"base_model", "library_name"} & front_matter(tmp_path / "nowhere").keys()
    model = llama()
    model.name_or_path = "someone/their-model"
    save_model(model, tmp_path / "small")
    assert front_matter(tmp_path / "small")["base_model"] == "someone/their-model"
    main(["export", str(tmp_path / "small"), "--out", str(tmp_path / "back"), "--form", "dense"])
    assert front_matter(tmp_path / "back")["base_model"] == "someone/their-model"
    cache = tmp_path / "models--someone--a-model" / "snapshots" / "0123"
    cache.mkdir(parents=True)
    assert hub_name(str(cache)) == "someone/a-model" and hub_name(str(tmp_path)) is None
    assert hub_name("../someone") is None and hub_name("") is None


def test_text_from_outside_stays_text_and_damaged_figures_are_left_out(tmp_path):
    evil = "x\n# forged <script>|```*"
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\n---\n{evil}")
    layers = [{"name": evil, "num_weights": 4, "num_pruned": 2, "sparsity": 0.5}]
    rows = {evil: {"sparsity": "much", evil: None}}
    facts = CardFacts(evil, layers, evil, rows, {"score": evil, "model": evil})
    write_card(tmp_path, facts)
    text = card(tmp_path)
    outside = re.sub(r"```.*?```|(?<!\\)`[^`]*`", "", text, flags=re.DOTALL)
    assert text.count("```") == 2
    assert "\n# forged" not in text and "<script>" not in outside and "forged \\<script\\>" in outside
    assert front_matter(tmp_path)["license"] == "mit"
    write_card(tmp_path, facts)
    assert card(tmp_path) == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "SOURCE_README.md", "layers.svg"]


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"layers": 3, "rows": [], "settings": 1}', '{"layers": [{"name": []}]}']
)
def test_a_result_of_another_kind_beside_the_weights_is_no_obstacle(content, source, tmp_path):
    (source / "result.json").write_text(content)
    main(["export", str(source), "--out", str(tmp_path / "small")])
    assert "weights in the matrices of source are zero" in card(tmp_path / "small")


class Hub:
    """What the tests have in place of ``huggingface_hub.HfApi``."""

    calls: ClassVar[list] = []
    error: Exception | None = None
    fails_at = ""

    def _call(self, name, *args):
        if self.fails_at == name:
            raise type(self).error
        self.calls.append((name, *args))

    def whoami(self):
        self._call("whoami")
        return {"name": "me", "orgs": [{"name": "ours"}]}

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        self._call("create", repo, private)
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self._call("upload", repo_id, Path(folder_path))
        assert (Path(folder_path) / "README.md").is_file()


@pytest.fixture
def hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    kind = type("FakeHub", (Hub,), {"calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", kind)
    return kind


def refused(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    shown = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    return shown[-1]


def test_a_folder_is_pushed_when_it_is_complete(hub, source, tmp_path, capsys):
    main(["export", str(source), "--out", str(tmp_path / "small"), "--push", "me/small", "--private"])
    assert hub.calls == [("whoami",), ("create", "me/small", True), ("upload", "me/small", tmp_path / "small")]
    assert "pushed to https://huggingface.co/me/small" in capsys.readouterr().out
    assert 'load_model(snapshot_download("me/small"))' in code_of(tmp_path / "small")
    hub.calls.clear()
    main(["export", str(tmp_path / "small"), "--push", "ours/small"])  # as it is
    assert hub.calls == [("whoami",), ("create", "ours/small", False), ("upload", "ours/small", tmp_path / "small")]
    hub.calls.clear()
    prune(source, tmp_path / "out", "--no-repair", "--push", "me/out", "--plot", tmp_path / "chart.svg")
    assert [call[0] for call in hub.calls] == ["whoami", "create", "upload"]
    assert (tmp_path / "chart.svg").read_text() == (tmp_path / "out" / "layers.svg").read_text()
    assert "push" not in json.loads((tmp_path / "out" / "result.json").read_text())["settings"]


@pytest.mark.parametrize("repo", ["name", "a/b/c", "a/b c", "a--b/c", "../x", "https://huggingface.co/a/b"])
def test_what_is_no_name_on_the_hub_is_refused(repo, hub, source, tmp_path, capsys):
    assert "such as user/model" in refused(capsys, "export", source, "--out", tmp_path / "small", "--push", repo)
    assert not hub.calls and not (tmp_path / "small").exists()


def test_who_may_not_push_hears_it_before_any_work(hub, source, tmp_path, capsys, monkeypatch):
    command = ["export", source, "--out", tmp_path / "small", "--push"]
    assert "not a member of others; use --push me/x" in refused(capsys, *command, "others/x")
    hub.fails_at, hub.error = "whoami", type("LocalTokenNotFoundError", (OSError,), {})("no\ntoken")
    assert "hf auth login" in refused(capsys, *command, "me/x")
    hub.error = RuntimeError("no route to host")
    assert "no route to host" in refused(capsys, *command, "me/x")
    options = ["--tokens", source.parent / "tokens.u16", "--out", tmp_path / "small", "--push", "me/x"]
    assert "no route to host" in refused(capsys, "prune", source, *options)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refused(capsys, *command, "me/x")
    assert not (tmp_path / "small").exists() and not hub.calls[1:]


def test_a_push_that_fails_leaves_the_folder_and_says_how_to_go_on(hub, source, tmp_path, capsys):
    hub.fails_at, hub.error = "upload", RuntimeError("quota")
    said = refused(capsys, "export", source, "--out", tmp_path / "small", "--push", "me/x")
    assert "quota" in said and f"prunus export {tmp_path / 'small'} --push me/x" in said
    assert load_model(tmp_path / "small") is not None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--push", "me/x", "--form", "dense"], "leave off --form"),
        (["--out", "x.safetensors", "--push", "me/x"], "uploads a folder"),
        (["--private"], "nothing reads --private"),
        (["--advise", "--push", "me/x"], "--advise measures and writes nothing"),
    ],
    ids=str,
)
def test_options_of_a_push_that_make_no_sense_are_refused(args, said, hub, source, capsys):
    assert said in refused(capsys, "export", source, *args) and not hub.calls


def test_a_chart_that_cannot_be_written_is_refused_before_any_work(source, tmp_path, capsys):
    options = ["--tokens", source.parent / "tokens.u16", "--out", tmp_path / "out"]
    assert ".svg or .png" in refused(capsys, "prune", source, *options, "--plot", tmp_path / "chart.pdf")
    assert "its folder does not exist" in refused(
        capsys, "prune", source, *options, "--plot", tmp_path / "no" / "a.svg"
    )
    assert not (tmp_path / "out").exists()
