"""The study of programs: arms from real folders, stopped and continued, its table; and the text that it learns from."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
import torch
from causal_models import causal_model
from chat_models import chat_tokenizer, save, write_problems
from torch import nn

from benchmarks import bits_study, programs_figures, programs_study, programs_text
from benchmarks.__main__ import main
from benchmarks.programs_study import ARMS, MEASURES
from benchmarks.programs_text import Problems, words_of
from benchmarks.repair_study import sparsegpt
from prunus import PerLayer, prune
from prunus.cli import answering
from prunus.trained.problems import wilson

pytest.importorskip("accelerate")
RIGHT = "```python\ndef f{0}():\n    return {0}\n```"


@pytest.fixture
def chat_model(tmp_path):
    """A folder with a tiny random Llama that can be asked, two problems, and tokens."""
    save(causal_model(vocab_size=257, max_position_embeddings=512, eos_token_id=0), tmp_path / "model")
    chat_tokenizer(tmp_path / "model")
    write_problems(tmp_path / "problems.jsonl", 2)
    draw = np.random.default_rng(0)
    for name in ("learn", "choose", "python", "prose"):
        draw.integers(1, 257, 800).astype("<u4").tofile(tmp_path / f"{name}.u32")
    return tmp_path


@pytest.fixture
def study(chat_model):
    places = {"model": "model", "work": "work", "problems": "problems.jsonl", "results": "results"}
    places |= {"tokens": "learn.u32", "train-tokens": "learn.u32", "held-out-tokens": "choose.u32"}
    places |= {"eval-tokens": "python.u32", "prose-tokens": "prose.u32"}
    files = [part for name, file in places.items() for part in (f"--{name}", str(chat_model / file))]
    sizes = ["--length", "16", "--windows", "4", "--eval-windows", "4", "--steps", "2", "--batch", "2", "--lr", "1e-3"]
    sizes += ["--max-new-tokens", "8", "--speed-tokens", "10", "--dtype", "bfloat16", "--name", "tiny"]
    return ["programs-study", *files, *sizes]


@pytest.fixture
def answered(monkeypatch):
    """Problems that were asked; the model solves the first one alone."""
    asked = []

    def answer(self, prompts):
        numbers = [int(self.tokenizer.decode(prompt).split("def f")[1].split("(")[0]) for prompt in prompts]
        asked.extend(numbers)
        return [RIGHT.replace("{0}", str(number)) if not number else "no idea" for number in numbers]

    monkeypatch.setattr(answering.Chat, "__call__", answer)
    return asked


def refused(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_arms_are_made_from_folders_and_every_figure_is_in_the_record(study, records, chat_model):
    arms = ["dense", "4", "sparsegpt", "recover", "shrink"]
    main([*study, "--run-code", "--arms", *arms, "--measures", *MEASURES[:-1]])
    rows = {(row["way"], row["level"]): row for row in records()}
    assert set(rows) == {(arm, measure) for arm in arms for measure in MEASURES[:-1]}
    assert {row["steps"] for (arm, _), row in rows.items() if arm != "recover"} == {0}
    assert rows["recover", "bytes"]["steps"] == 2 and rows["dense", "python"]["value"] > 1
    zeros = {arm: rows[arm, "bytes"]["zeros"] for arm in arms}
    assert zeros["sparsegpt"] == zeros["recover"] > 0 == zeros["dense"] == zeros["4"]
    sizes = {arm: rows[arm, "bytes"]["value"] for arm in arms}
    assert max(sizes, key=sizes.get) == "dense"
    assert sizes["dense"] == (chat_model / "work" / "dense_seed0" / "sparse.safetensors").stat().st_size
    first = rows["dense", "pass@1"]
    assert len(first["answers"]) == 2 and first["solved"] + sum(first["failures"].values()) == first["problems"] == 2
    assert len({rows[arm, "python"]["value"] for arm in arms}) == len(arms)


@pytest.mark.slow
def test_all_arms(study, records, capsys):
    main([*study, "--run-code", "--measures", "pass@1", "python", "prose", "bytes"])
    missing = {"8-torchao", "4-torchao"} if "left out" in capsys.readouterr().out else set()
    assert {row["way"] for row in records()} == set(ARMS) - missing - {"repair-80"}


def test_a_killed_study_asks_and_makes_nothing_twice(study, records, chat_model, answered, monkeypatch, capsys):
    measures = ["--measures", "pass@1", "bytes", "--answer-batch", "1"]
    command = [*study, "--run-code", "--arms", "dense", "recover", *measures]
    add, num = answering.Answers.add, 0

    def killed(self, *answer):
        nonlocal num
        num += 1
        add(self, *answer)
        if num == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(answering.Answers, "add", killed)
    with pytest.raises(SystemExit) as stop:
        main(command)
    before = records()
    assert stop.value.code == 130 and answered == [0, 1, 0] and [row["way"] for row in before] == ["dense", "dense"]
    monkeypatch.setattr(programs_study.MadeArm, "_make", None)  # all folders are there
    main(command)
    rows = records()
    assert answered == [0, 1, 0, 1] and rows[:2] == before and len(rows) == 4
    assert [row["value"] for row in rows if row["level"] == "pass@1"] == [0.5, 0.5]
    main(command)
    assert len(answered) == 4 and records() == rows
    again = [part if part != str(chat_model / "results") else str(chat_model / "others") for part in command]
    assert "give another --work" in refused(capsys, [*again, "--length", "8"])


def test_other_packages_quantise_in_memory(study, records, monkeypatch, answered):
    def theirs(model, batches, form):
        assert form.bits == 8
        model.lm_head.weight.data.mul_(2)
        return model

    monkeypatch.setitem(bits_study.PEERS, "torchao", theirs)
    monkeypatch.setattr(programs_study, "find_spec", lambda name: True)
    main([*study, "--run-code", "--arms", "dense", "8-torchao", "8"])
    rows = {(row["way"], row["level"]): row for row in records()}
    assert rows["8-torchao", "python"]["value"] != rows["dense", "python"]["value"]
    assert rows["8-torchao", "bytes"]["value"] == rows["8", "bytes"]["value"] < rows["dense", "bytes"]["value"]
    assert "decoder 1" not in rows["8-torchao", "speed"]["tokens_s"]


def test_what_cannot_be_measured_is_refused_before_anything_is_made(study, chat_model, capsys):
    assert "add --run-code" in refused(capsys, study)
    at = study.index("--prose-tokens")
    assert "--prose-tokens" in refused(capsys, [*study[:at], *study[at + 2 :], "--run-code"])
    (chat_model / "problems.jsonl").write_text('{"task_id": "a"}\n')
    assert "line 1: expected a text as 'prompt'" in refused(capsys, [*study, "--run-code"])
    write_problems(chat_model / "problems.jsonl", 2)
    chat_tokenizer(chat_model / "model", None)
    (chat_model / "model" / "chat_template.jinja").unlink(missing_ok=True)
    assert "without chat template" in refused(capsys, [*study, "--run-code"])
    assert not (chat_model / "work").exists() and not (chat_model / "results").exists()


# The table


def write_programs(write_record, values, name, **settings):
    known = {"weights": programs_figures.MODEL, "about": "", "length": 16, "held_out": 4, "samples": 4, "dtype": "f"}
    rows = [
        {"seed": seed, "way": arm, "level": measure, "steps": 0, "value": value, "problems": 164}
        | {"failures": {"NameError": 3}, "memory": 2e6, "tokens_s": {"generate 1": 30.0}}
        for (arm, measure, seed), value in values.items()
    ]
    write_record("programs", known | {"num_problems": 0, "max_new_tokens": 8} | settings, rows, name=name)


def lines_of(folder):
    table = programs_figures.parts(folder)["table"]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.count(" | ") > 2]
    return {arm: cells for arm, *cells in lines}


def test_the_table_says_what_was_not_measured(tmp_path):
    lines = lines_of(tmp_path)
    goals = [arm for arm in ARMS.values() if arm.goal is not None]
    assert all(lines[arm.title][0] == "**not measured**" for arm in goals) and len(lines) == 2 + len(goals)


def test_records_become_one_table_with_intervals_goals_and_outcomes(tmp_path, write_record):
    write_programs(write_record, {("dense", "pass@1", 0): 0.5, ("repair", "pass@1", 0): 0.1}, "a")
    more = {("repair", "pass@1", 0): 0.4, ("repair", "pass@1", 1): 0.3, ("repair", "bytes", 0): 3e6}
    write_programs(write_record, more | {("recover", "pass@1", 0): 0.49, ("repair", "speed", 0): 1.0}, "b")
    lines = lines_of(tmp_path)
    low, high = wilson(82, 164)
    assert lines["dense"][:2] == [f"0.500 ({low:.3f} to {high:.3f})", "1.00"]
    repaired = lines[ARMS["repair"].title]
    assert repaired[0].startswith("0.350 (") and repaired[0].endswith("draws 0.400, 0.300)")
    assert repaired[1:4] == ["0.70", "0.75", "**missed by 0.05**"] and repaired[6:9] == ["3", "2", "30"]
    assert lines[ARMS["recover"].title][1:4] == ["0.98", "0.93", "met"]
    assert lines[ARMS["control"].title][0] == "**not measured**"
    write_programs(write_record, {("dense", "prose", 0): 9.0}, "c", length=8)
    with pytest.raises(ValueError, match="differ in length: 16 and 8"):
        programs_figures.parts(tmp_path)


# SparseGPT


def test_sparsegpt_is_exact_and_between_magnitude_and_repair():
    torch.manual_seed(0)
    x = torch.randn(2048, 160) @ torch.randn(160, 160)
    model = nn.Sequential(nn.Linear(160, 24), nn.ReLU(), nn.Linear(24, 7))
    with torch.no_grad():
        dense, errors = model[0](x), {}
    ways = {
        "magnitude": lambda: prune(model, [x], 0.6, score="magnitude", select=PerLayer(), repair=None, progress=False),
        "sparsegpt": lambda: sparsegpt(model, [x], 0.6),
        "repair": lambda: prune(model, [x], 0.6, progress=False),
    }
    for name, way in ways.items():
        result = way()
        assert all(
            int((layer.weight == 0).sum()) == round(0.6 * layer.weight.numel()) for layer in (model[0], model[2])
        )
        with torch.no_grad():
            errors[name] = float((model[0](x) - dense).square().sum())
        result.undo_()
    assert errors["repair"] < errors["sparsegpt"] < errors["magnitude"]


# The text

DOCSTRING = "Return how many of the given birds are larger than every bird before them in the row, from left to right."
SOLUTION = """    best, num = None, 0
    for bird in birds:
        if best is None or bird > best:
            best, num = bird, num + 1
    return num
"""
PROMPT = f'from typing import List\n\n\ndef count_birds(birds: List[int]) -> int:\n    """{DOCSTRING}"""\n'
TEST = "def check(candidate):\n    assert candidate([3, 1, 4, 1, 5, 9, 2, 6]) == 4\n    assert candidate([]) == 0\n"


@pytest.fixture
def problems(tmp_path):
    row = {"task_id": "own/0", "prompt": PROMPT, "entry_point": "count_birds", "test": TEST}
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(row | {"canonical_solution": SOLUTION}) + "\n").encode()))
    return path


@pytest.mark.parametrize(
    ("text", "is_in"),
    {
        PROMPT: True,
        PROMPT.replace("count_birds", "larger_ones"): True,  # another name
        f"# {DOCSTRING}".upper(): True,
        DOCSTRING.replace(" ", "\n    #  "): True,  # other white space
        f"x = 1\n{SOLUTION}".replace("    ", "\t"): True,
        TEST.replace("candidate", "candidate "): True,
        " ".join(DOCSTRING.split()[:12]): False,  # fewer words than a span
        DOCSTRING.replace("every", "each"): False,
        "": False,
        "def count_birds(flock):\n    return len(flock)\n": False,
    }.items(),
)
def test_a_problem_is_found_under_other_names_and_spaces(problems, text, is_in):
    assert Problems(problems).are_in(words_of(text)) == is_in


def test_a_short_solution_is_found_as_a_whole(tmp_path):
    prompt = 'def truncate(number: float) -> float:\n    """Return the rest."""\n'
    row = {"task_id": "own/0", "prompt": prompt, "entry_point": "truncate", "test": "def check(candidate):\n    pass\n"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"canonical_solution": "    return number % 1.0\n"}) + "\n")
    problems = Problems(tmp_path / "a.jsonl")
    assert problems.are_in(words_of("def cut( number:float ) -> float:\n\treturn number%1.0"))
    assert not problems.are_in(words_of("def cut(value: float) -> float:\n    return number % 1.0"))


@pytest.fixture
def sources(tmp_path):
    """Packages: one to hold back, others with nasty files."""
    folder = tmp_path / "sources"
    files = {"held/__init__.py": "held = 'back'\n" * 9, "other/copy.py": "held =  'back'\n" * 9}
    files |= {f"other/{i}.py": f"value_{i} = {i}\n" * 20 for i in range(60)} | {"alone.py": "alone = True\n"}
    files |= {"other/solved.py": f"import os\n{PROMPT.replace('count_birds', 'mine')}{SOLUTION}", "other/empty.py": ""}
    files |= {"site-packages/third.py": "third = 3\n", "other/notes.txt": "text\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "other" / "latin.py").write_bytes("name = 'Jos\xe9'\n".encode("latin-1"))
    (folder / "other" / "binary.py").write_bytes(b"x = 1\n\0\0\0")
    (folder / "other" / "link.py").symlink_to(folder / "alone.py")
    return folder


@pytest.fixture
def text(chat_model, problems, sources):
    (chat_model / "prose.txt").write_text("It was a dark night.\n" * 20)
    files = {"model": "model", "out": "text", "problems": problems.name, "prose": "prose.txt", "sources": "sources"}
    options = [part for name, file in files.items() for part in (f"--{name}", str(chat_model / file))]
    return ["programs-text", *options, "--held-back", "held", "--tokens", "20000", "--batch", "3", "--most", "40"]


def decoded(path):
    """The tokenizer of the tests has a token for each byte, and 0 ends a document."""
    ids = np.fromfile(path, "<u4")
    tokenizer = chat_tokenizer(path.parent / "tokenizer")
    return [tokenizer.decode(part[part > 0].tolist()) for part in np.split(ids, np.flatnonzero(ids == 0))][:-1]


def test_text_has_no_problem_no_copy_and_nothing_that_is_held_back(text, chat_model):
    main([*text, "--written", "0.05"])
    about = json.loads((chat_model / "text" / "text.json").read_text())
    assert about["dropped"] == {
        "documents with a part of a problem": 1, "copies": 1, "empty files": 1, "files that are not UTF-8": 1,
        "files that are not text": 1,
    }  # fmt: skip
    learn, choose = (decoded(chat_model / "text" / f"{name}.u32") for name in ("learn", "choose"))
    documents = Counter([*learn, *choose])
    assert sum("value_" in one for one in documents) == 60 and len(choose) == 2
    everything = " ".join(documents)
    assert "alone" in everything and not any(word in everything for word in ("held", "birds", "third", "notes"))
    assert decoded(chat_model / "text" / "python.u32") == ["held = 'back'\n" * 9]
    assert "dark night" in decoded(chat_model / "text" / "prose.u32")[0]
    written = [json.loads(line) for line in (chat_model / "text" / "written.jsonl").read_text().splitlines()]
    assert about["written_tokens"] >= 1000 and len({row["asked"] for row in written}) == len(written)
    assert sum(one.startswith(("Write", "Explain")) for one in documents) == len(written)


def test_a_killed_writer_goes_on_with_the_same_text(text, chat_model, monkeypatch):
    main([*text, "--written", "0.03"])
    whole = {path.name: path.read_bytes() for path in (chat_model / "text").iterdir() if path.is_file()}
    kept = whole["written.jsonl"].splitlines(keepends=True)
    (chat_model / "text" / "written.jsonl").write_bytes(b"".join(kept[:3]) + kept[3][:20])
    write, firsts = programs_text.written_by, []
    monkeypatch.setattr(programs_text, "written_by", lambda *args: firsts.append(args[-1]) or write(*args))
    main([*text, "--written", "0.03"])
    assert firsts[0] == 3 and {name: (chat_model / "text" / name).read_bytes() for name in whole} == whole


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sources", "{}/nothing"], "nothing has no Python source"),
        (["--held-back", "held", "missing"], "no source folder has the package missing"),
        (["--written", "1"], "--written is a share"),
        (["--prose", "{}/none.txt"], "none.txt"),
        (["--problems", "{}/none.jsonl"], "there is no file"),
    ],
)
def test_text_that_cannot_be_made_is_refused_in_one_line(text, chat_model, options, said, capsys):
    (chat_model / "nothing").mkdir()
    assert said in refused(capsys, [*text, *(option.format(chat_model) for option in options)])
    assert not list(chat_model.glob("text/*"))
