"""Descriptions of ``torch.distributed.checkpoint`` as any release of Python writes them, and as nobody should."""

import copyreg
import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENUM
from torch.distributed.checkpoint.metadata import Metadata

# how a member of an enum is pickled: by its value, or as early releases of Python 3.11 do
FORMS = {
    "by value": lambda member: (ENUM, (member.value,)),
    "by name": lambda member: (getattr, (ENUM, member.name)),
}


def written(value: Any, form: str) -> bytes:
    """``value`` pickled, with members of the enum in one of ``FORMS``."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 4)
    pickler.dispatch_table = {**copyreg.dispatch_table, ENUM: FORMS[form]}
    pickler.dump(value)
    return file.getvalue()


def rewrite(folder: Path, form: str) -> None:
    path = folder / ".metadata"
    path.write_bytes(written(pickle.loads(path.read_bytes()), form))


def alone(code: bytes) -> bytes:
    return b"\x80\x04" + code + b"."


def before(code: bytes, description: bytes) -> bytes:
    """A description that is whole, but makes a value by ``code`` and drops it first."""
    return description[:2] + code + b"0" + description[2:]


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"tR"


GETATTR = named("builtins", "getattr")
KIND = named(ENUM.__module__, ENUM.__name__)
OTHER = named(Metadata.__module__, Metadata.__name__)
LAST = text("TORCH_CHANNELS_LAST")
MEMBER = called(GETATTR, KIND, LAST)
MEMBER_BY_VALUE = called(KIND, b"K\x01")
PATH = called(named("pathlib", "PosixPath"), text("executed"))

CALLS = {
    "of another class": called(GETATTR, OTHER, LAST),
    "of another class's method": called(GETATTR, OTHER, text("__init__")),
    "of a function": called(GETATTR, named("torch.serialization", "_get_layout"), text("__globals__")),
    "of itself": called(GETATTR, GETATTR, text("__self__")),
    "of an object": called(GETATTR, PATH, text("touch")),
    "of an object, called": called(called(GETATTR, PATH, text("touch"))),
    "of a member": called(GETATTR, MEMBER, LAST),
    "of a member by value": called(GETATTR, MEMBER_BY_VALUE, LAST),
    "of a text": called(GETATTR, text("a"), text("upper")),
    "of nothing": called(GETATTR, b"N", LAST),
    "a dunder": called(GETATTR, KIND, text("__class__")),
    "a table": called(GETATTR, KIND, text("__members__")),
    "a method": called(GETATTR, KIND, text("mro")),
    "a private name": called(GETATTR, KIND, text("_member_map_")),
    "a dotted name": called(GETATTR, KIND, text("TORCH_CHANNELS_LAST.value")),
    "no member": called(GETATTR, KIND, text("TORCH_CHANNELS_FIRST")),
    "an empty name": called(GETATTR, KIND, text("")),
    "a number": called(GETATTR, KIND, b"K\x01"),
    "bytes": called(GETATTR, KIND, b"C\x13TORCH_CHANNELS_LAST"),
    "a list": called(GETATTR, KIND, b"]"),
    "a class for a name": called(GETATTR, KIND, KIND),
    "a default": called(GETATTR, KIND, LAST, b"N"),
    "no name": called(GETATTR, KIND),
    "no arguments": called(GETATTR),
    "arguments in a list": GETATTR + b"](" + KIND + LAST + b"eR",
    "an object made": GETATTR + KIND + LAST + b"\x86\x81",
    "a member called": called(MEMBER),
    "a member called with a name": called(MEMBER, KIND, LAST),
    "a member by value called": called(MEMBER_BY_VALUE),
}
CHANGED = b"}" + text("_value_") + b"K\x02s"
SET = b"N}" + text("touched") + b"K\x02s\x86"  # the state of slots: set by setattr
PLACES = {
    "in a list": b"]" + GETATTR + b"a",
    "in a longer list": b"](" + b"K\x01" + GETATTR + b"e",
    "in a tuple": GETATTR + b"\x85",
    "in a longer tuple": b"(" + GETATTR + b"NNNt",
    "in a set": b"\x8f(" + GETATTR + b"\x90",
    "a value": b"}" + text("a") + GETATTR + b"s",
    "a key": b"}" + GETATTR + b"Ns",
    "an argument": called(named("pathlib", "PosixPath"), GETATTR),
    "a state": OTHER + b")\x81" + GETATTR + b"b",
    "from the memo": GETATTR + b"\x940]h\x00a",
    "changed": GETATTR + CHANGED + b"b",
    "set": GETATTR + SET + b"b",
    "a member changed": MEMBER + CHANGED + b"b",
    "a member set": MEMBER + SET + b"b",
    "a member by value changed": MEMBER_BY_VALUE + CHANGED + b"b",
    "the enum set": KIND + SET + b"b",
    "a class set": OTHER + SET + b"b",
}
HOSTILE = CALLS | PLACES
