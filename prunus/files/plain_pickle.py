"""A pickle as plain data, with nothing in it executed or imported.

``torch.distributed.checkpoint`` describes its files in a pickle. Here its opcodes are read as a
description: a class becomes its name, an object the name with its arguments and state. Names are
called and objects given a state; what would call an object or change a name is refused.
"""

import pickletools
from dataclasses import dataclass, field
from typing import Any, Literal

MARK = object()
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LIMIT = 50_000_000  # opcodes: metadata have fewer
LONGEST_NAME = 400
GETATTR = "builtins.getattr"
ENUMS = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT": 0,
        "TORCH_CHANNELS_LAST": 1,
        "TORCH_PRESERVE_FORMAT": 2,
    },
}


@dataclass(repr=False)
class PlainObject:
    """What a pickle says of an object, which is not made: the class's name, the arguments, the state."""

    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    role: Literal["name", "object", "member"] = "name"  # a member of an enum is neither called nor changed

    def __repr__(self) -> str:
        return f"<{self.name[:80]}>"  # what is inside may be shared many times over, and would never end


def read_pickle(data: bytes) -> Any:
    """The value that a pickle describes; a ValueError for what is not one, or uses what is not known here."""
    stack: list[Any] = []
    memo: list[Any] = []
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return _last(stack, 1)[0]
            if number > LIMIT:
                raise ValueError("it is too long")
            _apply(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it is not a complete pickle: {str(error)[:80]}") from error
    raise ValueError("it has no end")


def _apply(name: str, argument: Any, stack: list[Any], memo: list[Any]) -> None:
    """One opcode's effect on the stack."""
    if name in ("PROTO", "FRAME"):
        return
    if name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in CONSTANTS:
        stack.append(CONSTANTS[name])
    elif name.startswith(("BININT", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES")):
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
        if not isinstance(module, str) or not isinstance(kind, str) or len(module) + len(kind) > LONGEST_NAME:
            raise ValueError("it refers to something that is not a class")
        stack.append(PlainObject(f"{module}.{kind}"))
    elif name == "REDUCE":
        (args,) = _last(stack, 1)
        value = stack.pop()
        stack.append(_member(args) if value.name == GETATTR else _made(value, args))
    elif name == "NEWOBJ":
        stack.append(_made(*_last(stack, 2)))
    elif name == "BUILD":
        stack.append(_with_state(*_last(stack, 2)))
    else:
        raise _refusal(f"uses {name}")


def _made(value: PlainObject, args: Any) -> PlainObject:
    if value.role != "name":
        raise _refusal(f"calls an object of {value.name}")
    if not isinstance(args, tuple):
        raise TypeError("arguments are not a tuple")
    return PlainObject(value.name, args, role="member" if value.name in ENUMS else "object")


def _member(args: Any) -> PlainObject:
    """``enum(value)`` for ``getattr(enum, name)``, as which early releases of Python 3.11 pickle an enum's member."""
    match args:
        case tuple((PlainObject() as enum, str(name))) if name in ENUMS.get(enum.name, ()):
            return _made(enum, (ENUMS[enum.name][name],))
    raise _refusal(f"names {GETATTR}")


def _with_state(value: PlainObject, state: Any) -> PlainObject:
    if value.role != "object":
        raise _refusal(f"changes {value.name}")
    value.state = state  # in place: the memo holds it too
    return value


def _refusal(deed: str) -> ValueError:
    return ValueError(f"it {deed}, which a checkpoint's description does not need")


def _last(stack: list[Any], number: int) -> list[Any]:
    taken = stack[-number:]
    if len(taken) < number or any(value is MARK for value in taken):
        raise IndexError("it takes more values than it has stored")
    del stack[-number:]
    return _without_getattr(taken)


def _marked(stack: list[Any]) -> list[Any]:
    at = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is MARK), None)
    if at is None:
        raise IndexError("it has no mark")
    taken = stack[at + 1 :]
    del stack[at:]
    return _without_getattr(taken)


def _without_getattr(taken: list[Any]) -> list[Any]:
    """``taken``; ``getattr`` among it is refused, since REDUCE alone may take it, to name an enum's member."""
    if any(isinstance(value, PlainObject) and value.name == GETATTR for value in taken):
        raise _refusal(f"names {GETATTR}")
    return taken


def _key(key: Any) -> Any:
    """PlainObjects cannot be keys of a dict by value; their identity serves. Nested keys would take forever to hash."""
    if not isinstance(key, PlainObject | str | int | None):
        raise _refusal(f"has a {type(key).__name__} as a key")
    return _Key(key) if isinstance(key, PlainObject) else key


@dataclass(frozen=True, eq=False)
class _Key:
    value: PlainObject
