"""A setting has the same identity whenever it is made again, and another one where anything differs."""

import functools
import math
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from prunus import Repair
from prunus.oneshot import Probe
from prunus.oneshot.identity import identity


@dataclass(frozen=True)
class Holder:
    value: object


class Thing:
    def __init__(self, value=None):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def with_state(value):
    torch.manual_seed(value)
    return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))


def paired(value):
    """Two objects that hold each other."""
    first = Thing(value)
    first.other = Thing(first)
    return first


def listed(value):
    """A list that holds itself."""
    found = [value]
    found.append(found)
    return found


def recursive(value):
    def function(x):
        return function(x - 1) if x else value

    return function


def array(value):
    found = np.zeros(5000)
    found[2500] = value
    return found


LAMBDAS = [lambda x: x + 1, lambda x: x + 2, lambda x: x.real, lambda x: x.imag, lambda x: [y for y in x if y > 1], lambda x: [y for y in x if y > 2]]  # fmt: skip  # noqa: E501
MAKERS = {
    "a number": lambda i: i,
    "a text": str,
    "a probe": lambda i: Probe(1.0 + i),
    "a repair": lambda i: Repair(damping=0.01 * (i + 1)),
    "a loss": lambda i: nn.CrossEntropyLoss(label_smoothing=i / 4),
    "a loss with weights": lambda i: nn.CrossEntropyLoss(weight=torch.tensor([1.0, i])),
    "a loss in a dataclass": lambda i: Holder(nn.CrossEntropyLoss(label_smoothing=i / 4)),
    "a model": with_state,
    "a part of a model": lambda i: nn.Sequential(nn.Dropout(i / 4)),
    "an array": array,
    "an array in a dataclass": lambda i: Holder(array(i)),
    "an array of objects": lambda i: np.array([Thing(i), None], dtype=object),
    "a tensor": lambda i: torch.from_numpy(array(i)),
    "a tensor's dtype": lambda i: torch.zeros(2, dtype=[torch.float32, torch.int32, torch.bfloat16][i]),
    "functions of one line": lambda i: LAMBDAS[i],
    "attributes of one line": lambda i: LAMBDAS[2 + i % 2] if i < 2 else None,
    "nested code of one line": lambda i: LAMBDAS[4 + i % 2] if i < 2 else None,
    "a partial": lambda i: functools.partial(sorted, reverse=i),
    "a default": lambda i: lambda x, y=i: x + y,
    "a closure": lambda i: lambda x: x + i,
    "a method": lambda i: Thing(i).__init__,
    "an object": Thing,
    "an object with slots": Slotted,
    "objects that hold each other": paired,
    "a list that holds itself": listed,
    "a function that calls itself": recursive,
    "a builtin": lambda i: [math.sqrt, math.exp, torch.relu][i],
    "a path": lambda i: Path(str(i)),
    "a set": lambda i: {"a", "b", f"c{i}"},
    "a scalar": lambda i: np.float64(i),
    "a generator": lambda i: torch.Generator().manual_seed(i),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_setting_is_known_again_and_no_other_is_taken_for_it(name):
    found, again = ([identity(MAKERS[name](i)) for i in range(3)] for _ in range(2))
    assert found == again and len(set(found)) == 3
    assert not any("\n" in text or "0x" in text for text in found)


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (i for i in range(3)), torch.zeros(2, device="meta"), torch.eye(2).to_sparse()],
    ids=type,
)
def test_what_cannot_be_known_again_is_refused_with_one_line(value):
    deep = value
    for _ in range(3):
        deep = Thing(deep)
    for each in (value, Holder(value), deep, lambda: value):
        with pytest.raises(ValueError, match=r"^a resumed run could not recognise \S+ [^\n]*; leave out state$"):
            identity(each)


def test_what_is_nested_too_deeply_is_refused_with_one_line():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^list is nested too deeply [^\n]*$"):
        identity(deep)
