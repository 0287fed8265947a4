"""Whatever a file holds, its reader gives what is there or says what is wrong: one line, soon, in little memory."""

import io
import random
import sys

import numpy as np
import pytest
import torch
from fuzzing import FAILURES, fuzz
from mutations import BYTES, NO_FILES, STRUCTURED, mutate
from readers import READERS
from safetensors.torch import save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

SPARSE = ("sparse file", "sparse shards")  # whose readers give the same tensors or none
KNOWN: dict[str, str] = {}  # readers that still fail, and why


@pytest.mark.parametrize(
    ("count", "names", "least"),
    [
        (200, SPARSE, 0.9),
        pytest.param(2000, SPARSE, 0.9, marks=pytest.mark.slow),
        pytest.param(1400, None, 0.4, marks=pytest.mark.slow),
    ],
    ids=["sparse", "sparse, many", "all"],
)
def test_damaged_files_are_refused_or_harmless(count, names, least):
    found = fuzz(count, names=names)
    new = [failure for failure in found["failures"] if failure["reader"] not in KNOWN]
    assert not new, "\n".join(map(str, new))
    counts = found["readers"]
    assert found["mutations"] == count and all(counts[name].total() for name in counts)
    assert sum(counts[name]["refused"] for name in counts) > least * count  # they are damaged indeed
    if found["failures"]:
        pytest.xfail(f"known to fail: {', '.join(sorted({failure['reader'] for failure in found['failures']}))}")


def test_every_failure_has_a_name_and_every_known_one_a_reader():
    assert set(KNOWN) <= set(READERS) and len(set(FAILURES)) == len(FAILURES)


def sample(suffix: str) -> bytes:
    archive = io.BytesIO()
    np.savez(archive, a=np.ones(3))
    forms = {".json": b'{"hidden_size": 4, "a": {"b": 1}}', ".npz": archive.getvalue()}
    return forms.get(suffix) or save({"a": torch.ones(2), "b": torch.ones(3)}, {"prunus": "{}"})


@pytest.mark.parametrize("suffix", [".json", ".npz", ".safetensors"])
def test_every_way_to_damage_a_file_of_its_format_is_taken(suffix, tmp_path):
    found = set()
    for seed in range(1000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = folder / f"a{suffix}"
        path.write_bytes(sample(suffix))
        found.update(mutate(path, random.Random(seed)).split("+"))
    assert found == {kind.__name__ for kind in (*BYTES, *NO_FILES, *STRUCTURED[suffix])}
