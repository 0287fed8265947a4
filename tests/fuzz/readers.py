"""Every reader of the project, with a small valid sample for it.

A reader takes the folder of its sample. It may raise ValueError or OSError; a command may end with exit code 0, 1 or 2.
"""

import contextlib
import gzip
import io
import json
import lzma
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from every_encoding import grids, tensors
from mutations import BYTES, in_zip
from on_grids import put_on_grids_
from safetensors.torch import save_file
from small_gguf import write_gguf
from torch import Tensor

import prunus

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies/gpt2-124m"
TRAIN = (
    "--model gpt2-tiny --context 8 --batch 2 --steps 4 --every 2 --begin 2 --end 4 --eval-every 4 --eval-size 2 "
    "--save-every 2 --log-every 1 --warmup 2"
).split()


@dataclass(frozen=True)
class Reader:
    """``make`` fills a folder and ``read`` reads it; the files that fit ``damaged`` are mutated."""

    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    damaged: str = "*"  # patterns, with spaces between them
    exact: frozenset[str] = frozenset()  # mutations after which the reader must refuse, or give the same tensors
    needs: str = ""  # a module that is not always installed


def command(*args: object) -> None:
    """A command of prunus; exit code 2 is a ValueError, and anything but 0 and 1 else an error."""
    from small_gpt import fewer_weights

    from prunus.cli import main

    told, said, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said), fewer_weights():
            main(list(map(str, args)))
    except SystemExit as stop:
        code = stop.code
    if code not in (None, 0, 1, 2) or "Traceback" in told.getvalue() + said.getvalue():
        raise RuntimeError(f"exit code {code}: {said.getvalue()[-300:]}")
    if "\x1b" in told.getvalue() + said.getvalue():
        raise RuntimeError("an escape sequence of a file was printed")
    if code == 2:
        lines = said.getvalue().strip().splitlines()
        raise ValueError("\n".join(line for line in lines if "it/s]" not in line))  # a bar of a library


def tokens(folder: Path, suffix: str, pack: Callable[[bytes], bytes] = bytes) -> None:
    (folder / f"tokens{suffix}").write_bytes(pack(np.arange(500, dtype="<u2").tobytes()))


def only(folder: Path) -> Path:
    return sorted(path for path in folder.iterdir() if path.suffix != ".link")[0]


def text(home: Path) -> Path:
    path = home / "text.txt"  # beside the samples, and not damaged
    if not path.is_file():
        path.write_bytes(bytes(torch.randint(32, 127, (2000,), generator=torch.Generator().manual_seed(0)).tolist()))
    return path


@cache
def _trained(home: Path) -> Path:
    out = home / "trained"
    command("train", *TRAIN, "--data", text(home), "--out", out)
    assert (out / "result.json").is_file()
    return out


def trained(folder: Path) -> None:
    """A run of four steps, made once."""
    shutil.copytree(_trained(folder.parents[1]), folder, dirs_exist_ok=True)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"out": str(folder)}))


def half_trained(folder: Path) -> None:
    trained(folder)
    (folder / "result.json").unlink()


def exported(folder: Path) -> None:
    command("export", _trained(folder.parents[1]), "--out", folder / "model")
    assert (folder / "model").is_dir()


def distributed(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": tensors()["a"], "b": torch.randn(9)}, "step": 3, "optimizer": {"lr": [0.1]}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def sharded(folder: Path) -> None:
    """What ranks save together, by one process."""
    from prunus.lab.parallel import Team
    from prunus.lab.run import Run
    from prunus.lab.sharded_checkpoint import save_sharded

    weights = {"a": tensors()["a"], "b": torch.randn(9)}
    rows = {name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(w)} for name, w in weights.items()}
    optimizer = {"state": rows, "groups": {"0": {"lr": 0.1, "params": list(weights)}}}
    random_state = {"rng": torch.get_rng_state(), "cuda_rng": torch.empty(0, 0, dtype=torch.uint8), "digest": None}
    rest = {"step": 3, "seconds": 1.5, "run": Run().to_json(), "ties": {}, "pruner": None}
    save_sharded(folder, {"model": weights, "optimizer": optimizer, **rest, **random_state}, Team())


def metadata(folder: Path) -> None:
    distributed(folder)
    data = (folder / ".metadata").read_bytes()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "metadata.pickle").write_bytes(data)


def hugging_face(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from prunus.export import save_model

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    for parameter in model.transformer.h.parameters():
        parameter.data.view(-1)[::2] = 0
    put_on_grids_(model)
    assert any(row.encoding == "codes" for row in save_model(model, folder / "model").rows)


def plain_hugging_face(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder.parent / "tokens.u16").write_bytes((np.arange(600) % 16).astype("<u2").tobytes())


def gguf_file(folder: Path) -> None:
    write_gguf(folder / "model.gguf")
    (folder.parent / "tokens.u16").write_bytes((np.arange(600) % 16).astype("<u2").tobytes())


def read_gguf(folder: Path) -> None:
    from prunus.files.gguf_header import check_gguf

    check_gguf(only(folder))


def weights() -> Any:
    from prunus.eligible import eligible

    torch.manual_seed(0)
    return {weight.name: weight for weight in eligible(torch.nn.Linear(16, 24)).weights}


def repair_state(folder: Path) -> None:
    from prunus.oneshot.journal import Journal

    content = {"weight": tensors()["a"], "mask": torch.arange(12), "repair": {"error": 0.5, "note": "a"}}
    Journal(folder, {"sparsity": "0.5", "score": "None"}, weights().values()).save(
        "group_00000", ["weight"], {"weight": content}
    )


def search_state(folder: Path) -> None:
    from prunus.oneshot.journal import SearchJournal
    from prunus.oneshot.options import Trial
    from prunus.oneshot.probe.prober import Probed, Ratios

    state, mask = SearchJournal(folder, {"limit": "0.5"}, weights()), torch.arange(12, dtype=torch.int32)
    for number in range(2):
        state.finish(number, Trial(0.2, 0.2, 1.5, True), [{"weight": mask + number}])
    found = Probed({}, {"weight": Ratios(torch.rand(9), 1, 2)}, {"weight": 0.5}, {"weight": mask})
    state.save_group(2, ["weight"], found)


def read_repair_state(folder: Path) -> dict[str, Tensor]:
    from prunus.oneshot.journal import Journal

    with _refused_by_warning():
        found = Journal(folder, {"sparsity": "0.5", "score": "None"}, weights().values()).load(
            "group_00000", ["weight"]
        )
    return flat(found)


def read_search_state(folder: Path) -> dict[str, Tensor]:
    from prunus.oneshot.journal import SearchJournal

    with _refused_by_warning():
        state = SearchJournal(folder, {"limit": "0.5"}, weights())
        levels = [state.levels(number) for number in range(len(state.trials()))]
        groups = state.groups(2)
    return flat({"levels": levels, "pruned": groups.pruned, "q": {"q": groups.ratios["weight"].q}})


@contextlib.contextmanager
def _refused_by_warning() -> Iterator[None]:
    """What is damaged is done again, with a warning: that counts as refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield
        except UserWarning as error:
            raise ValueError(str(error)) from None


def prune(folder: Path, *more: str) -> None:
    """With magnitude, on tokens that lie beside the sample."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading, which would stand beside the one line of an error
    tokens = folder.parent / "tokens.u16"
    size = "--score magnitude --samples 2 --length 8 --eval-windows 2".split()
    command("prune", folder, "--out", folder / "out", *size, "--tokens", tokens, "--eval-tokens", tokens, *more)


def plain_folder(folder: Path) -> None:
    kept = {f"layer.{name}.weight": value for name, value in tensors().items() if value.ndim == 2 and name != "tied"}
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 16, "tie": {"a": [1]}}))


def small_folder(folder: Path) -> None:
    on_grid = {f"layer.{name}.weight": value for name, value in grids().items()}
    values = {f"layer.{name}.weight": value for name, value in tensors().items() if value.ndim == 2}
    prunus.save_sparse(values, folder / "sparse.safetensors", grids=on_grid, max_shard_bytes=500)


def masked(folder: Path) -> None:
    weight = tensors()["a"]
    save_file({"w.weight": weight}, folder.parent / "weights.safetensors")
    save_file({"w.weight": weight != 0}, folder / "masks.safetensors")


def slim_study(folder: Path) -> None:
    for path in STUDY.glob("*.json*"):
        shutil.copy(path, folder)


def recovered(folder: Path) -> None:
    figures = {"kl": 0.5, "loss": 4.0, "accuracy": None}
    values = {"before": figures, "after": figures, "teacher": figures, "lr": 1e-3, "lr_reason": "given", "notes": ["a"]}
    values |= {"best_step": 4, "steps": 4, "tokens": 1024, "seconds": 1.5, "num_zeros": 7, "settings": {"train": ["b"]}}
    curve = [{"step": step, "tokens": 256 * step} | figures for step in range(5)]
    (folder / "recovery.json").write_text(json.dumps(values | {"curve": curve}))


def full_study(folder: Path) -> None:
    for path in STUDY.glob("study*.json"):
        shutil.copy(path, folder)
    for line in (STUDY / "runs.jsonl").read_text().splitlines()[:4]:
        files = json.loads(line)
        run = folder / "runs" / files.pop("folder")
        run.mkdir(parents=True)
        metrics = "\n".join(map(json.dumps, files.pop("metrics.jsonl")))
        (run / "metrics.jsonl").write_text(metrics + "\n")
        for name, content in files.items():
            (run / name).write_text(json.dumps(content))


def mnist(folder: Path) -> None:
    for part in ("train", "t10k"):
        head = (0x803).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in (3, 4, 4))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(range(48)))
        labels = (0x801).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes([1, 2, 3])
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def cifar(folder: Path) -> None:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").write_bytes(bytes([3, *(i % 256 for i in range(3072))]))


def cifar_package(folder: Path) -> None:
    from PIL import Image

    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        Image.fromarray(np.full((1, 1024, 3), 7, np.uint8)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text("[1, 2, 3, 4, 5]")
    (folder / "test_lables.json").write_text("[6]")


def settings(folder: Path) -> None:
    (folder / "base.toml").write_text(
        'model = "gpt2-tiny"\ndata = "stdlib"\nsteps = 40\nevery = 2\nlr = 0.001\nsparsity = 0.5\n\n'
        '[[arm]]\nname = "a"\nscore = "bitter7"\n\n[[arm]]\nname = "b"\nlr = 0.1\n'
    )


def load_sparse(path: Path) -> Any:
    return prunus.load_sparse(path)


def open_plain(folder: Path) -> None:
    from prunus.files.reader import open_tensors

    with open_tensors(only(folder)) as found:
        for name in found.records:
            found.read(name)


def load_checkpoint(path: Path) -> Any:
    from prunus.lab.checkpoint import checkpoint_of, load_checkpoint

    return flat(load_checkpoint(checkpoint_of(path)))


def flat(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors of nested dicts and lists."""
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: tensor for inner, part in items for key, tensor in flat(part, f"{name}/{inner}").items()}


def read_torch(folder: Path) -> None:
    from prunus.files.torch_file import read_torch_file

    read_torch_file(only(folder))


def read_pickle(folder: Path) -> None:
    from prunus.files.plain_pickle import read_pickle
    from prunus.files.regular import check_regular

    check_regular(only(folder))
    read_pickle(only(folder).read_bytes())


def read_tokens(folder: Path) -> None:
    from prunus.trained import tokens

    tokens.MAX_READ = 1 << 26  # what a child may use is less than a machine has
    tokens.read_tokens(only(folder))


def read_arrays(folder: Path) -> None:
    from prunus.trained import tokens
    from prunus.trained.data import read_batches

    tokens.MAX_READ = 1 << 26
    read_batches(only(folder))


def problems(folder: Path) -> None:
    row = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(candidate):\n    candidate()"}
    (folder / "a.jsonl").write_text("".join(json.dumps({"task_id": f"own/{i}"} | row) + "\n" for i in range(3)))


def read_problems(folder: Path) -> None:
    from prunus.trained import tokens
    from prunus.trained.problems import read_problems

    tokens.MAX_READ = 1 << 26
    for problem in read_problems(only(folder)):
        problem.program("def f():\n    pass")


def answers(folder: Path) -> None:
    from prunus.cli.answering import Answers
    from prunus.trained.problems import Problem

    kept = Answers(folder / "kept.jsonl", lambda: {"max_new_tokens": 5})
    for i in range(3):
        kept.add(Problem(f"own/{i}", "def f():\n", "f", "def check"), "    pass", "AssertionError" * (i % 2))


def read_answers(folder: Path) -> None:
    from prunus.cli.answering import Answers

    Answers(only(folder), lambda: {"max_new_tokens": 5})


def read_images(folder: Path) -> None:
    from prunus.lab.data import datasets
    from prunus.trained import tokens

    tokens.MAX_READ = 1 << 26
    datasets.load(folder, context=1)


def read_base(folder: Path) -> None:
    from prunus.lab.study.arms import read_base

    read_base(only(folder))


def load_exported(folder: Path) -> Any:
    from small_gpt import fewer_weights

    from prunus.lab.trained_run import load_exported

    with fewer_weights():
        return load_exported(folder / "model").state_dict()


def load_model(folder: Path) -> Any:
    from prunus.export import load_model

    return load_model(folder / "model").state_dict()


BYTEWISE = frozenset(kind.__name__ for kind in (*BYTES, in_zip))
ANY = frozenset({"*"})

READERS = {
    "sparse file": Reader(
        lambda to: prunus.save_sparse(tensors(), to / "a.safetensors", grids=grids()),
        lambda to: load_sparse(only(to)),
        exact=ANY,
    ),
    "sparse shards": Reader(
        lambda to: prunus.save_sparse(tensors(), to / "model.safetensors", grids=grids(), max_shard_bytes=2000),
        load_sparse,
        exact=ANY,
    ),
    "plain safetensors": Reader(lambda to: save_file({"a": torch.randn(4, 6)}, to / "a.safetensors"), open_plain),
    "torch file": Reader(lambda to: torch.save({"a": torch.ones(3), "b": [1, {"c": "d"}]}, to / "a.pt"), read_torch),
    "plain pickle": Reader(metadata, read_pickle),
    "checkpoint": Reader(trained, load_checkpoint, "checkpoint.pt", BYTEWISE),
    "sharded checkpoint": Reader(sharded, load_checkpoint, "checkpoint-*/*", BYTEWISE),
    "exported model": Reader(exported, load_exported, "model/*"),
    "Hugging Face model": Reader(hugging_face, load_model, "model/*", needs="transformers"),
    "prune": Reader(plain_hugging_face, prune, "*.json *.safetensors", needs="transformers"),
    "prune, GGUF": Reader(gguf_file, lambda to: prune(to, "--gguf-file", "model.gguf"), needs="gguf"),
    "GGUF header": Reader(gguf_file, read_gguf, needs="gguf"),
    "state of a repair": Reader(repair_state, read_repair_state, exact=ANY),
    "state of a search": Reader(search_state, read_search_state, exact=ANY),
    "train --resume": Reader(
        half_trained, lambda to: command("train", "--resume", "--out", to), "run.json metrics.jsonl checkpoint*.pt"
    ),
    "eval": Reader(trained, lambda to: command("eval", to), "run.json result.json checkpoint.pt"),
    "doctor, checkpoint": Reader(trained, lambda to: command("doctor", to, "--json"), "run.json checkpoint.pt"),
    "doctor, distributed": Reader(distributed, lambda to: command("doctor", to, "--json")),
    "doctor, folder": Reader(plain_folder, lambda to: command("doctor", to)),
    "doctor, small folder": Reader(small_folder, lambda to: command("doctor", to)),
    "doctor, masks": Reader(
        masked, lambda to: command("doctor", to.parent / "weights.safetensors", "--masks", only(to), "--json")
    ),
    "export --check": Reader(
        exported,
        lambda to: command("export", to / "model", "--out", to / "back", "--form", "dense", "--check"),
        "model/*",
    ),
    "export --check, small": Reader(
        small_folder, lambda to: command("export", to, "--out", to / "copy", "--check"), "*.safetensors*"
    ),
    "study show": Reader(slim_study, lambda to: command("study", "show", to)),
    "study show, runs in folders": Reader(full_study, lambda to: command("study", "show", to), "**/*.json*"),
    "study merge": Reader(
        full_study, lambda to: command("study", "merge", to, "--out", to / "m", "--slim"), "**/*.json*"
    ),
    "study settings": Reader(settings, read_base),
    "report of a run": Reader(trained, lambda to: command("report", to), "*.json*", needs="plotly"),
    "report of a study": Reader(full_study, lambda to: command("report", to), "**/*.json*", needs="plotly"),
    "report of a recovery": Reader(recovered, lambda to: command("report", to), needs="plotly"),
    "tokens .u16": Reader(lambda to: tokens(to, ".u16"), read_tokens),
    "tokens .npy": Reader(lambda to: np.save(to / "tokens.npy", np.arange(500)), read_tokens),
    "batches .npz": Reader(lambda to: np.savez(to / "a.npz", pixels=np.ones((3, 4)), labels=np.arange(3)), read_arrays),
    "batches .npz, packed": Reader(lambda to: np.savez_compressed(to / "a.npz", input_ids=np.eye(9)), read_arrays),
    "tokens .xz": Reader(lambda to: tokens(to, ".u16.xz", lzma.compress), read_tokens),
    "tokens .gz": Reader(lambda to: tokens(to, ".bin.gz", gzip.compress), read_tokens),
    "problems": Reader(problems, read_problems),
    "answers": Reader(answers, read_answers),
    "MNIST": Reader(mnist, read_images),
    "CIFAR-10": Reader(cifar, read_images),
    "CIFAR-10 in PNGs": Reader(cifar_package, read_images, needs="PIL"),
}
SLOW = {  # readers whose files are damaged in every fifth round only
    *("prune", "prune, GGUF", "train --resume", "eval", "doctor, checkpoint", "export --check", "study merge"),
    *(
        "study show, runs in folders",
        "report of a run",
        "report of a study",
        "report of a recovery",
        "tokens .gz",
        "tokens .xz",
    ),
}
