"""Problems are read as HumanEval writes them, and the program of an answer is what a reader would run."""

import gzip
import json

import pytest

from prunus.trained.problems import chat_prompt, read_problems, wilson

PROMPT = 'import math\n\n\ndef root(x):\n    return math.sqrt(x)\n\n\ndef twice(x):\n    """Two roots."""\n'
TEST = "def check(candidate):\n    assert candidate(4) == 4\n    assert root(4) == 2\n"
ROW = {"task_id": "a/0", "prompt": PROMPT, "entry_point": "twice", "test": TEST}


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def passes(parts):
    names = {}
    try:
        for part in parts:
            exec(part, names)
    except Exception:
        return False
    return True


@pytest.fixture
def problem(tmp_path):
    return read_problems(written(tmp_path / "problems.jsonl", ROW | {"canonical_solution": "more is allowed"}))[0]


def test_a_packed_file_holds_the_same_problems(tmp_path, problem):
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress((tmp_path / "problems.jsonl").read_bytes()))
    assert read_problems(tmp_path / "packed.jsonl.gz") == [problem]


BODY = "    return 2 * root(x)\n"
WHOLE = "def twice(x):\n" + BODY


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}```",
        f"Sure! Here it is:\n\n```python\n{WHOLE}```\n\nIt takes the `root` twice.",
        f"```\n{WHOLE}```",
        f"```python\n{WHOLE}",  # cut at the token limit
        f"```python\nprint(twice(4))\n```\nwith\n```python\n{WHOLE}```",
        f"```python\n{PROMPT}{BODY}```",
        f"```python\nfrom __future__ import annotations\n{WHOLE}```",
        f"  ```python\n{WHOLE}  ```",
        f"```python\n{BODY}```",
        WHOLE,
        BODY,
        f"```python\n{WHOLE}\n\ndef check(candidate):\n    assert False\n```",
        f"```python\n{WHOLE}\nif __name__ == '__main__':\n    input()\n```",
    ],
)
def test_a_right_answer_passes_however_it_is_written(answer, problem):
    assert passes(problem.program(answer))


@pytest.mark.parametrize(
    "answer",
    ["", "    pass\n", "I do not know.", "```python\n```", "```python\ndef other(x):\n    return 2 * root(x)\n```"],
)
def test_an_answer_without_the_function_fails(answer, problem):
    assert not passes(problem.program(answer))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("{", "its JSON is damaged"),
        ("[]", "expected a JSON object with task_id, prompt, entry_point, test"),
        (ROW | {"task_id": 3}, "expected a text as 'task_id', got '3'"),
        (
            {name: ROW[name] for name in ("task_id", "prompt", "test")},
            "expected a text as 'entry_point', got 'nothing'",
        ),
        (ROW | {"entry_point": "thrice"}, "expected a prompt that defines its entry_point, 'thrice'"),
        (ROW | {"entry_point": "x); import os; (x"}, "expected a prompt that defines its entry_point"),
        (ROW | {"test": "assert twice(4) == 4"}, r"expected a test that defines check\(candidate\)"),
        (ROW, "an earlier line has the task_id 'a/0' too"),
    ],
)
def test_a_line_of_another_form_is_named(row, match, tmp_path):
    path = written(tmp_path / "problems.jsonl", ROW, "", row)
    with pytest.raises(ValueError, match=rf"problems.jsonl, line 3: {match}"):
        read_problems(path)


def test_a_file_without_problems_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_problems(tmp_path)
    with pytest.raises(ValueError, match="has no problems"):
        read_problems(written(tmp_path / "empty.jsonl", ""))
    (tmp_path / "damaged.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode())[:-9])
    with pytest.raises(ValueError, match=r"not a complete \.gz file"):
        read_problems(tmp_path / "damaged.jsonl.gz")


def test_a_template_that_fails_is_one_line(problem):
    class Refuses:
        def apply_chat_template(self, *args, **options):
            raise RuntimeError("roles must\nalternate")

    with pytest.raises(ValueError, match="chat template does not take a question: roles must alternate"):
        chat_prompt(Refuses(), problem)


def test_the_interval_is_wilsons():
    assert [round(edge, 3) for edge in wilson(116, 164)] == [0.634, 0.772]
    assert [round(edge, 4) for edge in wilson(0, 164)] == [0, 0.0229]


@pytest.mark.parametrize("total", [1, 2, 20, 164])
def test_the_interval_holds_the_proportion_and_is_symmetric(total):
    for num in range(total + 1):
        low, high = wilson(num, total)
        assert 0 <= low <= num / total <= high <= 1 and high - low < 1
        assert wilson(total - num, total) == pytest.approx((1 - high, 1 - low))
