"""What does not fit ranks or their checkpoints is one line, and nothing in a checkpoint is executed."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from descriptions import ENUM, FORMS, HOSTILE, MEMBER, MEMBER_BY_VALUE, before, rewrite
from unbroken_run import assert_same

from prunus.cli import main
from prunus.files.atomic import part_name
from prunus.files.distributed import write_checksums
from prunus.lab.checkpoint import _remove_older, checkpoint_of, checkpoints_in, load_checkpoint, remove_checkpoints
from prunus.lab.parallel import Team
from prunus.lab.run import Run
from prunus.lab.sharded_checkpoint import load_sharded, save_sharded
from prunus.lab.trainer import _begun

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled", "ignore:.*TypedStorage")
ALONE = {"RANK": None, "WORLD_SIZE": None}
TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("launch", "args", "words"),
    [
        (ALONE, ["--parallel", "ddp"], "parallel is ddp, but there is only one process; start it with torchrun"),
        (TWO, [], "2 ranks were started, but parallel is none; pass --parallel ddp"),
        (TWO, ["--parallel", "fsdp", "--batch", "5"], "batch is split over 2 ranks, but 5 is not a multiple"),
        (TWO, ["--parallel", "tp"], "tp"),
    ],
    ids=["alone", "none", "batch", "unknown"],
)
def test_a_launch_that_does_not_fit_is_one_line(launch, args, words, monkeypatch, capsys, tmp_path):
    for name, value in launch.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["train", *args, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and words in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_rank_speaks_for_all_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "prunus", "train", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("prunus train")] == [
        "prunus train: 2 ranks were started, but parallel is none; pass --parallel ddp or --parallel fsdp"
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_batches", [1, 2, 5, 8])
def test_ranks_deal_batches_in_equal_numbers_and_return_them_in_order(size, num_batches, monkeypatch):
    batches = [(number, number) for number in range(num_batches)]
    own: list[torch.Tensor] = []

    def kept(_: Team, rows: torch.Tensor) -> torch.Tensor:
        own.append(rows)
        return torch.cat([rows] * size)

    def measure(dealt):
        return [(float(number), number + 1, number + 2) for number, _ in dealt]

    monkeypatch.setattr(Team, "rows", kept)
    for rank in range(size):
        Team("ddp", rank, size).shared(batches, measure)
    assert len({len(rows) for rows in own}) == 1, "sharded weights are gathered by all ranks or none"
    gathered = torch.cat(own[:size])
    monkeypatch.setattr(Team, "rows", lambda *_: gathered)
    for rank in range(size):
        assert Team("ddp", rank, size).shared(batches, measure) == measure(batches)


def a_state(step: int = 3) -> dict:
    return {
        "run": Run().to_json(),
        "step": step,
        "seconds": 1.5,
        "model": {"b.weight": torch.randn(3, 5), "a.weight": torch.randn(2).bfloat16()},
        "ties": {},
        "optimizer": {"state": {}, "groups": {"0": {"lr": 0.1, "betas": (0.9, 0.95), "params": ["b.weight"]}}},
        "pruner": {"step": 3, "due": False, "masks": {}, "movement": {}},
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.empty(0, 0, dtype=torch.uint8),
        "digest": "abc",
    }


def test_shards_give_every_value_and_their_order_back(tmp_path):
    state = a_state()
    read = load_sharded(save_sharded(tmp_path, state, Team()), {})
    assert list(read["model"]) == list(state["model"])
    assert_same(read, {key: state[key] for key in read})
    assert set(read) == set(state)


@pytest.mark.parametrize("form", FORMS)
def test_shards_are_read_alike_whichever_python_wrote_them(form, tmp_path):
    state = a_state()
    path = save_sharded(tmp_path, state, Team())
    rewrite(path, form)
    forge(path)
    assert (b"getattr" in (path / ".metadata").read_bytes()) == (form == "by name")
    read = load_sharded(path, {})
    assert_same(read, {key: state[key] for key in read})


def forge(path: Path) -> None:
    """Make the checksum of a description fit what it is now."""
    stored = json.loads((path / "checksums.json").read_text())["checksums"]
    write_checksums(path, {place: crc for place, crc in stored.items() if place != ".metadata"})


def test_only_whole_checkpoints_are_taken_and_the_last_two_stay(tmp_path):
    first = save_sharded(tmp_path, a_state(9), Team())
    (tmp_path / "checkpoint-11.part").mkdir()
    (tmp_path / "checkpoint-11.part" / ".metadata").write_bytes(b"")
    (tmp_path / "checkpoint-12").mkdir()  # without a description nobody finished it
    assert checkpoint_of(tmp_path) == first
    second, third = (save_sharded(tmp_path, a_state(step), Team()) for step in (10, 13))
    assert checkpoint_of(tmp_path) == third
    _remove_older(tmp_path)
    assert checkpoints_in(tmp_path) == [third, second] and set(tmp_path.iterdir()) == {third, second}
    remove_checkpoints(tmp_path)
    assert checkpoint_of(tmp_path) == tmp_path / "checkpoint.pt" and not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self):
        return (Path("executed").touch, ())


class EvilState:
    """Hides behind a class that a description does need."""

    def __reduce__(self):
        return (dcp.metadata.Metadata, ({},), {"storage_data": Evil()})


def replaced_bytes(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


DAMAGES = {
    "a call in the description": lambda p: (p / ".metadata").write_bytes(pickle.dumps(Evil())),
    "a call in its state": lambda p: (p / ".metadata").write_bytes(pickle.dumps(EvilState())),
    "a file elsewhere": lambda p: replaced_bytes(p / ".metadata", b"__0_0.distcp", b"../../secret"),
    "half a description": lambda p: (p / ".metadata").write_bytes((p / ".metadata").read_bytes()[:-400]),
    "an unknown layout": lambda p: replaced_bytes(p / ".metadata", b"torch.strided", b"torch.stridex"),
    "not a description": lambda p: (p / ".metadata").write_bytes(pickle.dumps({"storage_data": {}})),
    "half a shard": lambda p: (p / "__0_0.distcp").write_bytes((p / "__0_0.distcp").read_bytes()[:3000]),
    "a lost shard": lambda p: (p / "__0_0.distcp").unlink(),
    "a foreign checkpoint": lambda p: dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=p, no_dist=True),
}


@pytest.mark.parametrize("is_forged", [False, True], ids=["damaged", "forged"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_malicious_checkpoint_is_one_line_and_executes_nothing(damage, is_forged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save_sharded(tmp_path, a_state(), Team())
    DAMAGES[damage](path)
    if is_forged:
        forge(path)
    with pytest.raises(ValueError, match="checkpoint") as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("use", HOSTILE)
@pytest.mark.slow
def test_any_other_use_of_getattr_and_any_change_of_a_name_is_one_line(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save_sharded(tmp_path, a_state(), Team())
    whole, members = (path / ".metadata").read_bytes(), [vars(member).copy() for member in ENUM]
    for code in (MEMBER, MEMBER_BY_VALUE):
        (path / ".metadata").write_bytes(before(code, whole))
        forge(path)
        load_checkpoint(path)
    (path / ".metadata").write_bytes(before(HOSTILE[use], whole))
    forge(path)
    with pytest.raises(ValueError, match=r"damaged, or not a checkpoint of prunus: .*does not need$") as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value) and not (tmp_path / "executed").exists()
    assert [vars(member) for member in ENUM] == members and not hasattr(dcp.metadata.Metadata, "touched")


def test_a_value_that_is_no_plain_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save_sharded(tmp_path, a_state() | {"seconds": Evil()}, Team())
    with pytest.raises(ValueError, match="checkpoint"):
        load_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("attempt", "files", "options", "expected"),
    [
        ("1", ["run.json"], {}, True),
        ("1", ["run.json"], {"lr": 0.5}, "not empty"),
        ("0", ["run.json"], {}, "not empty"),
        ("1", [part_name(Path("run.json")).name], {}, False),
        ("1", [], {}, False),
        ("1", ["letters.txt"], {}, "no run.json"),
    ],
    ids=["the same run", "another run", "no restart", "killed at once", "nothing yet", "no run"],
)
def test_a_restarted_job_takes_up_its_own_run_alone(attempt, files, options, expected, monkeypatch, tmp_path):
    for name, value in {**TWO, "TORCHELASTIC_RESTART_COUNT": attempt}.items():
        monkeypatch.setenv(name, value)
    run = Run(out=tmp_path / "run", parallel="ddp")
    run.out.mkdir()
    for name in files:
        (run.out / name).write_text(json.dumps({"run": run.to_json()}))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            _begun(replace(run, **options))
    else:
        assert _begun(run) == replace(run, resume=expected)


def test_a_resumed_run_takes_the_ranks_it_is_given(monkeypatch):
    saved = Run(parallel="fsdp", steps=50)
    monkeypatch.delenv("RANK", raising=False)
    assert Run(resume=True).continuing(saved).parallel == "none"
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert Run(resume=True).continuing(saved).parallel == "fsdp"
    assert Run(resume=True, parallel="ddp").continuing(saved).parallel == "ddp"
