"""Programming problems in the form of HumanEval, and the program in a model's answer.

A problem (Chen et al. 2021, https://arxiv.org/abs/2107.03374) is a line of JSON: the prompt, a Python file up to the
docstring of the function ``entry_point``, and a test, which defines ``check(candidate)``.
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..files.json_file import strict_json
from ..files.one_line import in_one_line
from .tokens import read_bytes

ASK = "Complete this Python function. Answer with the whole function in one Python code block.\n\n```python\n{}\n```"
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
NORMAL_95 = 1.959963984540054  # 97.5 % of a normal distribution lie below


@dataclass(frozen=True)
class Problem:
    task_id: str
    prompt: str
    entry_point: str
    test: str

    @property
    def defines(self) -> re.Pattern[str]:
        """Finds the line that begins the function."""
        return re.compile(rf"^(?:async )?def {re.escape(self.entry_point)}\b", re.MULTILINE)

    def program(self, answer: str) -> list[str]:
        """Parts of the program to run: what the answer says, and the test.

        It is the first block of code that defines the function, else the first one, else all of the answer. What the
        prompt has above the function, its imports and helpers, is put in front; and the whole prompt where the answer
        does not define the function, but goes on with it.
        """
        blocks = FENCE.findall(answer) or [answer]
        code = next((block for block in blocks if self.defines.search(block)), blocks[0])
        parts = [self.prompt + code]
        if self.defines.search(code):
            begin = [*self.defines.finditer(self.prompt)][-1].start()
            parts = [self.prompt[:begin], code]
        return [*parts, self.test, f"check({self.entry_point})"]


def read_problems(path: Path) -> list[Problem]:
    """The problems in a file of JSON lines, packed or not; ValueError names the line that is not one."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --problems takes problems in HumanEval's form, .jsonl or .jsonl.gz")
    problems: dict[str, Problem] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if line.strip():
            try:
                problem = _problem(strict_json(line))
                if problem.task_id in problems:
                    raise ValueError(f"an earlier line has the task_id {problem.task_id!r} too")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            problems[problem.task_id] = problem
    if not problems:
        raise ValueError(f"{path} has no problems; each line should be a JSON object with task_id, prompt, ...")
    return list(problems.values())


def _problem(values: Any) -> Problem:
    names = [field.name for field in fields(Problem)]
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object with {', '.join(names)}, got {str(values)[:40]!r}")
    for name in names:
        if not isinstance(values.get(name), str) or not values[name]:
            raise ValueError(f"expected a text as {name!r}, got {str(values.get(name, 'nothing'))[:40]!r}")
    problem = Problem(**{name: values[name] for name in names})
    if not problem.entry_point.isidentifier() or not problem.defines.search(problem.prompt):
        raise ValueError(f"expected a prompt that defines its entry_point, {problem.entry_point[:40]!r}")
    if not re.search(r"^def check\(", problem.test, re.MULTILINE):
        raise ValueError("expected a test that defines check(candidate)")
    return problem


def chat_prompt(tokenizer: Any, problem: Problem) -> list[int]:
    """Tokens that ask a chat model for the function; the tokenizer has a chat template."""
    messages = [{"role": "user", "content": ASK.format(problem.prompt.strip())}]
    with in_one_line("the tokenizer's chat template does not take a question"):  # it is a program from a file
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def wilson(num: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a proportion of ``num`` in ``total`` (https://www.jstor.org/stable/2276774)."""
    share, z2 = num / total, NORMAL_95**2
    middle = share + z2 / (2 * total)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, (middle - half) / (1 + z2 / total)), min(1.0, (middle + half) / (1 + z2 / total))
