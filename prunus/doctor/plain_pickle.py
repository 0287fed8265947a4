"""A pickle as plain data, with nothing in it executed or imported.

``torch.distributed.checkpoint`` describes its files in a pickle. Here its opcodes are read as a
description: a class becomes its name, an object the name with its arguments and state.
"""

import pickletools
from dataclasses import dataclass, field
from typing import Any

MARK = object()
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LIMIT = 50_000_000  # opcodes: a file that says more is not a description


@dataclass
class Thing:
    """An object that was not made: the class's name, the arguments, the state."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)


def plain(data: bytes) -> Any:
    """The value that a pickle describes; a ValueError for what is not one, or uses what is not known here."""
    stack: list[Any] = []
    memo: list[Any] = []
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return stack.pop()
            if number > LIMIT:
                raise ValueError("it is too long")
            _take(opcode.name, argument, stack, memo)
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a whole pickle: {error}") from error
    raise ValueError("it does not end")


def _take(name: str, argument: Any, stack: list[Any], memo: list[Any]) -> None:
    """One opcode's effect on the stack."""
    if name in ("PROTO", "FRAME"):
        return
    if name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name.startswith(("BININT", "LONG", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES")):
        stack.append(argument)
    elif name == "MARK":
        stack.append(MARK)
    elif name == "MEMOIZE":
        memo.append(stack[-1])
    elif name == "POP":
        stack.pop()
    elif name.startswith("EMPTY_"):
        stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}[name]())
    elif name.startswith("TUPLE"):
        stack.append(tuple(_marked(stack) if name == "TUPLE" else _last(stack, int(name[-1]))))
    elif name in ("APPEND", "APPENDS", "ADDITEMS"):
        items = _last(stack, 1) if name == "APPEND" else _marked(stack)
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _last(stack, 2) if name == "SETITEM" else _marked(stack)
        stack[-1].update({_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)})
    elif name == "STACK_GLOBAL":
        module, kind = _last(stack, 2)
        stack.append(Thing(f"{module}.{kind}"))
    elif name in ("REDUCE", "NEWOBJ"):
        thing, args = _last(stack, 2)
        stack.append(Thing(thing.name, tuple(args)))
    elif name == "BUILD":
        (state,) = _last(stack, 1)
        stack[-1].state = state
    else:
        raise ValueError(f"it uses {name}, which a checkpoint's description does not need")


def _last(stack: list[Any], number: int) -> list[Any]:
    taken = stack[-number:]
    if len(taken) < number or any(value is MARK for value in taken):
        raise IndexError("it takes more than it put")
    del stack[-number:]
    return taken


def _marked(stack: list[Any]) -> list[Any]:
    at = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is MARK), None)
    if at is None:
        raise IndexError("it has no mark")
    taken = stack[at + 1 :]
    del stack[at:]
    return taken


def _key(key: Any) -> Any:
    """Things cannot be keys of a dict by value; their identity serves."""
    return _Key(key) if isinstance(key, Thing) else key


@dataclass(frozen=True, eq=False)
class _Key:
    thing: Thing
