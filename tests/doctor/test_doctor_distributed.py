"""Folders of torch.distributed.checkpoint: ranks' pieces put together, digests compared, nothing executed."""

import os
import pickle
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.distributed.checkpoint as dcp
from descriptions import ENUM, FORMS, GETATTR, HOSTILE, MEMBER, MEMBER_BY_VALUE, alone, before, rewrite, written
from patients import folder, found, healthy, prune_rows_, state_of

from prunus.doctor import examine
from prunus.doctor.sources import read_contents
from prunus.files.plain_pickle import ENUMS, read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled", "ignore:.*existing checkpoint")


@pytest.fixture
def distributed(tmp_path):
    def made(change=lambda state: None, tensors=None):
        tensors = tensors or prune_rows_(healthy())
        state = {"model": tensors, "pruner": state_of(tensors), "optimizer": {"exp_avg": torch.randn(3)}}
        change(state)
        dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
        return tmp_path / "dcp"

    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_distributed_checkpoint_is_read_like_the_model(distributed, tmp_path, dtype):
    report = examine(distributed(tensors=prune_rows_(healthy(dtype))), sparsity=0.5, pattern="row")
    assert report.is_healthy and report.kind == "distributed checkpoint"
    assert report.digest == state_of(prune_rows_(healthy(dtype)))["digest"]
    expected = examine(folder(tmp_path / "model", prune_rows_(healthy(dtype))))
    assert {layer.name: (layer.num_zeros, layer.dtype) for layer in report.layers} == {
        layer.name: (layer.num_zeros, layer.dtype) for layer in expected.layers
    }


def test_digests_of_ranks_in_a_distributed_checkpoint_are_compared(distributed):
    def set_digests(state):
        own = state["pruner"]["digest"]
        state["pruner"]["digests"] = {"rank0": own, "rank1": own[::-1]}

    finding = found(examine(distributed(set_digests)), "digest")
    assert finding.where.endswith("pruner.digests.rank1")


def test_a_file_of_a_rank_that_is_cut_or_lost_is_refused(distributed):
    path = distributed()
    (file,) = path.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"does not hold the|truncated"):
        examine(path)
    file.unlink()
    with pytest.raises((ValueError, OSError), match=file.name):
        examine(path)


@pytest.mark.parametrize(("size", "said"), [((2**40, 16), "cannot hold"), ((41, 16), "640 of the 656")])
def test_a_description_that_promises_more_than_there_is_is_refused(distributed, size, said):
    path = distributed()
    described = pickle.loads((path / ".metadata").read_bytes())
    described.state_dict_metadata["model.model.layers.0.mlp.up_proj.weight"].size = torch.Size(size)
    (path / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match=said):
        examine(path)


RANK = """
import os, sys, torch, warnings
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
warnings.simplefilter("ignore")
folder = sys.argv[1]
rank = 0 if os.fork() else 1  # torch is imported once
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
tensors = torch.load(f"{folder}/tensors.pt")
places = [Shard(0), Shard(1), Replicate()]
model = {name: distribute_tensor(t, mesh, [places[i % 3]]) for i, (name, t) in enumerate(tensors["model"].items())}
dcp.save({"model": model, "pruner": tensors["pruner"]}, checkpoint_id=f"{folder}/dcp")
dist.destroy_process_group()
if rank == 0:
    os.wait()
"""


@pytest.mark.slow
def test_pieces_of_ranks_are_put_together(tmp_path):
    tensors = prune_rows_({f"{name}.proj.weight": torch.randn(7, 12) for name in ("rows", "columns", "whole")})
    tensors["one.proj.weight"] = torch.randn(1, 12)  # the second rank has nothing of it
    torch.save({"model": tensors, "pruner": state_of(tensors)}, tmp_path / "tensors.pt")
    done = subprocess.run([sys.executable, "-c", RANK, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    source = read_contents(tmp_path / "dcp", ExitStack())
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    for name, tensor in tensors.items():
        assert torch.equal(source.tensors[name].load(), tensor)
    report = examine(tmp_path / "dcp")
    assert report.is_healthy and report.digest == state_of(tensors)["digest"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_in_a_description_is_executed(distributed, tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    path = distributed()
    (path / ".metadata").write_bytes(pickle.dumps({"a": Evil()}, protocol))
    with pytest.raises(ValueError, match=r"\.metadata"):
        examine(path)
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Evil(), protocol))
    with pytest.raises(ValueError, match=r"not a complete torch\.save file"):
        examine(tmp_path / "a.pt")
    torch.save({"a": Evil()}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"not a complete torch\.save file"):
        examine(tmp_path / "b.pt")
    assert not (tmp_path / "evil-was-here").exists()


def test_a_description_is_read_as_plain_data():
    value = {"a": [1, 2**40, -3, 1.5, None, True, "x" * 300], "b": (1, (2, 3), (), (1, 2, 3, 4)), 3: {"c": {}}}
    assert read_pickle(pickle.dumps(value, 4)) == value
    again = [1]
    assert read_pickle(pickle.dumps([again, again], 5)) == [[1], [1]]
    assert read_pickle(pickle.dumps(Evil(), 4)).name.endswith(".mkdir")


def test_every_member_of_an_enum_is_the_same_by_value_and_by_name():
    assert {f"{ENUM.__module__}.{ENUM.__name__}": {member.name: member.value for member in ENUM}} == ENUMS
    members = [*ENUM, *ENUM]
    by_value, by_name = (read_pickle(written(members, form)) for form in FORMS)
    assert by_name == by_value and [member.args for member in by_name] == [(member.value,) for member in members]
    assert read_pickle(alone(MEMBER)) == read_pickle(alone(MEMBER_BY_VALUE)) == by_name[ENUM.TORCH_CHANNELS_LAST.value]


@pytest.mark.parametrize("form", FORMS)
def test_a_description_is_read_alike_whichever_python_wrote_it(distributed, form):
    path = distributed()
    expected = examine(path)
    rewrite(path, form)
    assert (b"getattr" in (path / ".metadata").read_bytes()) == (form == "by name")
    assert examine(path) == expected and expected.is_healthy


@pytest.mark.parametrize("use", HOSTILE)
@pytest.mark.slow
def test_any_other_use_of_getattr_and_any_change_of_a_name_is_one_line(distributed, use):
    path = distributed()
    whole = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(before(MEMBER, whole))
    assert examine(path).is_healthy
    (path / ".metadata").write_bytes(before(HOSTILE[use], whole))
    with pytest.raises(ValueError, match=r"\.metadata does not describe .*does not need$") as error:
        examine(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"does not need$"):
        read_pickle(alone(HOSTILE[use]))


@pytest.mark.parametrize(
    "opcodes",
    [GETATTR, *(b"K\x01" + opcode for opcode in (b"q\x00", b"r\x00\x00\x00\x00", b"p0\n", b"2"))],
    ids=["getattr", "BINPUT", "LONG_BINPUT", "PUT", "DUP"],
)
def test_opcodes_that_are_not_known_are_refused_and_not_guessed(opcodes):
    with pytest.raises(ValueError, match=r"does not need$"):
        read_pickle(alone(opcodes))


def test_damaged_descriptions_are_refused_or_found(distributed):
    path = distributed()
    whole = (path / ".metadata").read_bytes()
    for at in range(0, len(whole), 287):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 7]) + whole[at + 1 :]):
            (path / ".metadata").write_bytes(damaged)
            try:
                examine(path)
            except (ValueError, OSError):
                continue
