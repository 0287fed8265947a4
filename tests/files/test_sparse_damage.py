"""A damaged, interrupted or hostile file is refused with a reason: never a wrong tensor, a crash or much memory."""

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from every_encoding import grids, tensors
from safetensors.torch import save_file

from prunus import load_sparse, save_sparse
from prunus.files import writer


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_file_or_nothing_that_looks_whole(tmp_path):
    run = [sys.executable, str(Path(__file__).with_name("sparse_killing.py")), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    left = json.loads(done.stdout)
    for name, before in (("file", "old"), ("files", "refused"), ("folder", "nothing")):
        assert set(left[name]) == {before, "new"} and left[name][-1] == "new"
        assert left[name] == sorted(left[name], key=lambda state: state == "new")
        assert left[name].count(before) >= 4
    assert set(left["any time"]) <= {"old", "new"} and len(left["any time"]) > 3


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_sparse(tensors(), tmp_path / "a.safetensors", grids=grids())
    return tmp_path / "a.safetensors"


def parse(path: Path) -> tuple[dict, bytes]:
    """The header of a file, and its data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def edited(path: Path, change: Callable[[dict, bytearray], None], mend: bool = False) -> None:
    """Change a file's header and data; with ``mend``, ``change`` gets the description, whose checksum is mended."""
    header, rest = parse(path)
    data, meta = bytearray(rest), header["__metadata__"]
    if mend:
        description = json.loads(meta["prunus"])
        change(description, data)
        meta["prunus"] = json.dumps(description)
        meta["prunus_crc32"] = f"{zlib.crc32(meta['prunus'].encode()):08x}"
    else:
        change(header, data)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data)


def crc_of(*parts: bytes) -> str:
    return f"{zlib.crc32(b''.join(struct.pack('<I', zlib.crc32(part)) for part in parts)):08x}"


HEADERS = {
    "negative shape": (lambda h, _: h["bias"].update(shape=[-9]), "whole numbers of at least 0"),
    "fraction": (lambda h, _: h["bias"].update(shape=[9.0]), "whole numbers of at least 0"),
    "absurd shape": (lambda h, _: h["none"].update(shape=[0, 2**61, 2**61]), "too large"),
    "other size": (lambda h, _: h["bias"].update(shape=[8]), "does not fit its place"),
    "unknown type": (lambda h, _: h["bias"].update(dtype="F3"), "unknown type"),
    "overlap": (lambda h, _: h["bias"].update(data_offsets=[0, 36]), "overlap or leave a gap"),
    "behind the end": (lambda h, _: h["bias"].update(data_offsets=[2**40, 2**40 + 36]), "overlap or leave a gap"),
    "longer": (lambda _, data: data.extend(b"1234"), "but the file has"),
    "shorter": (lambda _, data: data.__delitem__(slice(-3, None)), "but the file has"),
    "no mark": (lambda h, _: h["__metadata__"].pop("prunus"), "checksum"),
    "other mark": (lambda h, _: h["__metadata__"].update(format="pt"), "checksum"),
    "no entry": (lambda h, data: (h.pop("b.values"), h.pop("b.indices")), "overlap or leave a gap"),
    "renamed entry": (lambda h, _: h.update(other=h.pop("bias")), "'bias' is missing"),
    "exchanged": (lambda h, _: _exchange(h, "a.values", "a.bits"), "not what bitmask requires"),
    "metadata": (lambda h, _: h["__metadata__"].update(x=[1]), "mapping of strings"),
}


def _exchange(header: dict, first: str, second: str) -> None:
    header[first], header[second] = header[second], header[first]


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_contradicts_itself_is_refused(case, small):
    change, said = HEADERS[case]
    edited(small, change)
    with pytest.raises(ValueError, match=said) as error:
        load_sparse(small)
    assert str(small) in str(error.value) and "\n" not in str(error.value)


DESCRIPTIONS = {
    "newer": (lambda d, _: d.update(version=3), "not of version 1 or 2.*a newer prunus may read it"),
    "older": (lambda d, _: d.update(version=1), "holds codes, which version 1 of the format"),
    "no bits": (lambda d, _: d["tensors"]["d"].pop("bits"), "codes also need bits, group and outputs"),
    "bits of a mask": (lambda d, _: d["tensors"]["a"].update(bits=4), "must have dtype, shape, encoding and crc32"),
    "one bit": (lambda d, _: d["tensors"]["d"].update(bits=1), "'d' cannot have codes of 1 bits in groups of 8"),
    "nine bits": (lambda d, _: d["tensors"]["d"].update(bits=9), "codes of 9 bits"),
    "bits in words": (lambda d, _: d["tensors"]["d"].update(bits="4"), "cannot have codes"),
    "empty group": (lambda d, _: d["tensors"]["d"].update(group=0), "cannot have codes of 4 bits in groups of 0"),
    "other group": (lambda d, _: d["tensors"]["d"].update(group=4), "'d.scales' is not what codes requires"),
    "rows of nothing": (lambda d, _: d["tensors"]["d"].update(outputs=[2]), r"rows by the dimensions \[2\]"),
    "rows twice": (lambda d, _: d["tensors"]["d"].update(outputs=[0, 0]), r"rows by the dimensions \[0, 0\]"),
    "rows before the first": (lambda d, _: d["tensors"]["d"].update(outputs=[-1]), r"rows by the dimensions \[-1\]"),
    "rows by a number": (lambda d, _: d["tensors"]["d"].update(outputs=0), "rows by the dimensions 0"),
    "rows of columns": (lambda d, _: d["tensors"]["d"].update(outputs=[1]), "'d.scales' is not what codes requires"),
    "whole numbers in codes": (lambda d, _: d["tensors"]["d"].update(dtype="I16"), "'d' of type I16.*cannot be codes"),
    "many empty rows": (lambda d, _: d["tensors"]["d"].update(shape=[2**59, 0]), "cannot be codes"),
    "other bits": (lambda d, _: d["tensors"]["d"].update(bits=8), r"'d'.*whose codes take \d+ bytes, not \d+"),
    "alias of nothing": (lambda d, _: d["tensors"]["tied"].update({"as": "nowhere"}), "a missing tensor"),
    "alias of itself": (lambda d, _: d["tensors"]["tied"].update({"as": "tied"}), "a missing tensor"),
    "another encoding": (lambda d, _: d["tensors"]["a"].update(encoding="2:4"), "missing"),
    "a list for a type": (lambda d, _: d["tensors"]["a"].update(dtype=[]), "unknown dtype or encoding"),
    "a list for an encoding": (lambda d, _: d["tensors"]["a"].update(encoding=[]), "unknown dtype or encoding"),
    "unknown encoding": (lambda d, _: d["tensors"]["a"].update(encoding="gzip"), "unknown dtype or encoding"),
    "larger shape": (lambda d, _: d["tensors"]["a"].update(shape=[2**30, 2**29]), "not what bitmask requires"),
    "no pattern": (lambda d, _: d["tensors"]["b"].update(shape=[64, 2]), "cannot be 2:4"),
    "left out": (lambda d, _: (d["tensors"].pop("tied"), d["tensors"].pop("a")), "belongs to no tensor"),
    "invented": (lambda d, _: d["tensors"].update(new=d["tensors"]["bias"]), "missing"),
    "entry of two": (
        lambda d, _: d["tensors"].update({"a.bits": {"dtype": "U8", "shape": [48], "encoding": "dense", "crc32": ""}}),
        "used twice",
    ),
    "checksum": (lambda d, _: d["tensors"]["a"].update(crc32="12345678"), "do not match their checksum"),
    "shard": (lambda d, _: d.update(shard=[2, 1]), "which file this is"),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_that_does_not_fit_its_file_is_refused(case, small):
    change, said = DESCRIPTIONS[case]
    edited(small, change, mend=True)
    with pytest.raises(ValueError, match=said):
        load_sparse(small)


def replaced(path: Path, name: str, entry: str, data: bytes) -> None:
    """Put other bytes into an entry and mend the checksum of its tensor."""
    header, _ = parse(path)
    begin, end = header[entry]["data_offsets"]
    assert len(data) == end - begin

    def change(description: dict, rest: bytearray) -> None:
        rest[begin:end] = data
        ends = ("", ".bits", ".indices", ".values", ".scales", ".codes")
        names = [name + end for end in ends if name + end in header]
        parts = [bytes(rest[slice(*header[n]["data_offsets"])]) for n in names]
        description["tensors"][name]["crc32"] = crc_of(*parts)

    edited(path, change, mend=True)


def test_a_mask_that_does_not_fit_its_values_is_refused_though_the_checksums_hold(small):
    replaced(small, "a", "a.bits", b"\xff" * 48)
    with pytest.raises(ValueError, match=r"'a'.*keeps 384 elements, but there are"):
        load_sparse(small)


@pytest.mark.parametrize("end", [b"\x10\0\0\0", b"\0\0\0\x01"], ids=["last byte", "behind it"])
def test_bits_behind_the_last_element_are_refused(end, tmp_path):
    path = tmp_path / "a.safetensors"
    tensor = torch.zeros(100)
    tensor[:3] = 1
    save_sparse({"a": tensor}, path)
    replaced(path, "a", "a.bits", b"\x07" + bytes(11) + end)
    with pytest.raises(ValueError, match="bits after the last element"):
        load_sparse(path)


def entry_of(path: Path, entry: str) -> bytearray:
    header, data = parse(path)
    return bytearray(data[slice(*header[entry]["data_offsets"])])


@pytest.mark.parametrize(
    ("entry", "place", "value", "said"),
    [
        ("d.bits", -1, 0x80, "its mask has bits after the last element"),
        (
            "d.bits",
            slice(0, 8),
            b"\xff" * 8,
            r"its mask keeps \d+ elements, whose codes take \d+ bytes, not \d+",
        ),
        ("d.codes", -1, 0x80, "its codes have bits behind the last one"),
        ("e.codes", -1, 0x10, "its codes have bits behind the last one"),
        ("d.scales", 1, 0x80, "1 of its 36 scales are not positive and finite"),
        ("d.scales", slice(0, 2), b"\0\0", "1 of its 36 scales are not positive and finite"),
        ("d.scales", slice(2, 6), b"\xc0\x7f\x80\x7f", "2 of its 36 scales are not positive and finite"),
        ("e.scales", -1, 0x3F, "there are values after its last scale"),
    ],
)
def test_codes_that_contradict_themselves_are_refused_in_one_line_though_the_checksums_hold(
    entry, place, value, said, small
):
    data = entry_of(small, entry)
    data[place] = value
    replaced(small, entry[0], entry, bytes(data))
    with pytest.raises(ValueError, match=f"damaged in {entry[0]!r}: {said}") as error:
        load_sparse(small)
    assert "\n" not in str(error.value)


def test_an_older_reader_refuses_codes_by_the_version_and_reads_what_has_none(small, tmp_path):
    save_sparse(tensors(), tmp_path / "without.safetensors")
    versions = [json.loads(parse(p)[0]["__metadata__"]["prunus"])["version"] for p in sorted(tmp_path.iterdir())]
    assert versions == [2, 1]


def test_indices_that_do_not_ascend_are_refused(small):
    replaced(small, "b", "b.indices", bytes(16))
    with pytest.raises(ValueError, match="not in ascending order"):
        load_sparse(small)


@pytest.mark.parametrize(
    "head",
    [b"", b"\0" * 7, b"\0" * 8, struct.pack("<Q", 2**63), struct.pack("<Q", 10**9), struct.pack("<Q", 4) + b"null"],
    ids=["empty", "seven bytes", "no header", "huge header", "header beyond the end", "null"],
)
def test_what_is_no_safetensors_file_is_refused(head, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(head)
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read"):
        load_sparse(path)


def test_a_name_that_occurs_twice_is_refused(small):
    header, rest = parse(small)
    written = json.dumps(header).encode()
    twice = written[:-1] + b',"bias":' + json.dumps(header["bias"]).encode() + b"}"
    small.write_bytes(struct.pack("<Q", len(twice)) + twice + rest)
    with pytest.raises(ValueError, match="occurs twice"):
        load_sparse(small)


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:  # sparse on the disk: nothing of it is there
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(ValueError, match="larger than the 100000000"):
        load_sparse(path)


def test_plain_files_missing_files_and_folders_without_a_model_are_refused(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="plain safetensors"):
        load_sparse(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="no file or folder"):
        load_sparse(tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="holds no tensors"):
        load_sparse(tmp_path)


BAD = {
    "no tensor": ({"a": [1.0]}, "a must be a tensor"),
    "type": ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
    "meta": ({"a": torch.ones(2, device="meta")}, "a is on the meta device.*load the weights first"),
    "sparse": ({"a": torch.ones(2, 2).to_sparse()}, "not an ordinary tensor"),
    "reserved": ({"__metadata__": torch.ones(2)}, "__metadata__"),
    "no string": ({3: torch.ones(2)}, "a tensor's name must be a string"),
    "surrogate": ({"\ud800": torch.ones(2)}, "UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_saved_is_refused_and_nothing_is_written(case, tmp_path):
    tensors, said = BAD[case]
    with pytest.raises(ValueError, match=said):
        save_sparse({"ok": torch.ones(4)} | tensors, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given", [torch.nn.Linear(2, 2), "a.safetensors", [torch.ones(2)]], ids=["model", "path", "list"]
)
def test_what_is_no_tensors_by_name_is_refused_with_what_to_write_of_a_model(given, tmp_path):
    for masks in (None, {}):
        with pytest.raises(
            ValueError, match=r"got (Linear|str|list); for a model, call save_sparse\(model\.state_dict\(\)"
        ):
            save_sparse(given, tmp_path / "a.safetensors", masks=masks)
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_are_refused(tmp_path):
    for path in (tmp_path / "a.bin", tmp_path / "no" / "a.safetensors", tmp_path):
        with pytest.raises(ValueError, match=r"safetensors|folder"):
            save_sparse({"a": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save_sparse({"a": torch.ones(3)}, tmp_path / "a.safetensors", max_shard_bytes=0)


def test_an_error_in_the_middle_leaves_the_old_file_and_nothing_else(small, monkeypatch):
    before = small.read_bytes()
    calls = []

    def encode(*args):
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the disk is full")
        return inner(*args)

    inner = writer.encode
    monkeypatch.setattr(writer, "encode", encode)
    with pytest.raises(OSError, match="disk is full"):
        save_sparse(tensors(), small)
    assert small.read_bytes() == before and [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_weight_that_came_back_is_refused_by_name_and_a_live_zero_is_legal(tmp_path):
    weight = torch.tensor([[0.0, 1.0, -0.0, 2.0]])
    keep = torch.tensor([[False, True, False, True]])
    path = tmp_path / "a.safetensors"
    save_sparse({"w": weight}, path, masks={"w": keep})
    save_sparse({"w": weight * 0}, path, masks={"w": keep})
    for value in (1e-45, float("nan")):
        weight[0, 0] = value
        with pytest.raises(ValueError, match="w has 1 non-zero weight"):
            save_sparse({"w": weight}, path, masks={"w": keep})
    with pytest.raises(ValueError, match="'v'"):
        save_sparse({"w": weight}, path, masks={"v": keep})
    with pytest.raises(ValueError, match="shape"):
        save_sparse({"w": weight}, path, masks={"w": keep[0]})


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    from prunus.files.reader import open_tensors

    path = tmp_path / "a.safetensors"
    save_sparse({"a": torch.randn(5000)}, path)
    with open_tensors(path) as tensors:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100)
        with pytest.raises(ValueError, match="truncated"):
            tensors.read("a")
