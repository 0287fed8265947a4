"""Headers of GGUF files: real ones pass, lengths that cannot be are refused at once."""

import struct
import time

import numpy as np
import pytest

from prunus.files.gguf_header import ARRAY, STRING, check_gguf

UINT8, UINT32 = 0, 4


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*fields, num_tensors=0, num_fields=None):
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(fields)


def array(kind, length, content=b""):
    return text(b"tokens") + struct.pack("<IIQ", ARRAY, kind, length) + content


def tensor(*shape):
    return text(b"w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


def test_what_the_library_writes_passes(tmp_path):
    gguf = pytest.importorskip("gguf")
    for order in (gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=order)
        writer.add_block_count(2)
        writer.add_token_list([f"token {i}" for i in range(300)])
        writer.add_token_scores([0.5] * 300)
        for name in ("a", "b"):
            writer.add_tensor(name, np.ones((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert check_gguf(tmp_path / "a.gguf") == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(array(UINT32, 2**63)), "too long"),
        (header(array(UINT8, 2**22, b"\0" * 100)), "beyond its end"),
        (header(array(STRING, 2**22, text(b"a"))), "beyond its end"),
        (header(*[array(UINT8, 2**21, b"\0" * 2**21)] * 3), "too long"),
        (header(text(b"name") + struct.pack("<IQ", STRING, 2**64 - 1)), "beyond its end"),
        (header(struct.pack("<Q", 2**40) + b"name"), "beyond its end"),
        (header(text(b"deep") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 50_000), "arrays too deep"),
        (header(text(b"odd") + struct.pack("<I", 77)), "type 77"),
        (header(num_fields=2**64 - 1), "beyond its end"),
        (header(num_tensors=2**64 - 1), "beyond its end"),
        (header(tensor(2**40, 2**20), num_tensors=1, num_fields=0), "elements in a file"),
        (header(tensor(2**40, 0), num_tensors=1, num_fields=0), "0 elements in a file"),
        (header(tensor(1, 1, 1, 1, 1), num_tensors=1, num_fields=0), "5 dimensions"),
        (b"GGUF", "beyond its end"),
        (b"", "empty"),
        (b"ONNX" * 20, "begin with GGUF"),
    ],
)
def test_lengths_that_cannot_be_are_refused_in_one_line_at_once(data, reason, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data)
    began = time.process_time()
    with pytest.raises(
        ValueError, match=rf"^\S+a\.gguf cannot be read: it is not a GGUF file, or is damaged: [^\n]*{reason}"
    ):
        check_gguf(tmp_path / "a.gguf")
    assert time.process_time() - began < 2
