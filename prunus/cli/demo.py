"""``prunus demo``"""

import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..lab.report.demo_page import DEMO_FILE, Row, change, in_one_line
from ..lab.report.numbers import duration, plain
from ..lab.run import Run, read_run
from .console import Terminal, print, progress_bar

if TYPE_CHECKING:
    from torch import nn

    from ..lab.trainer import Training

PROMPT = b"    def __init__(self, "
LENGTH = 180  # bytes of a sample
TEMPERATURE = 0.8
WIDTH, BATCH = 128, 8  # of the model, and windows a step
SIZE = 0.5  # of the blocks' weights stay when the model is shrunk
LEARNING = 0.12  # steps of a recovery, of those of a training
SMALL = "in 4 bits"  # the model that is written, and whose text stands beside that of the dense one
AFTERWARDS = "One seed. Perplexity is per byte, on files not used for training; sizes are those of the weight files."


@dataclass(frozen=True)
class Command:
    """Train a small GPT on Python's own source, dense and sparse, then make the dense one smaller.

    It takes a few minutes on two cores. The dense model is pruned without and with repair, recovered, quantised to four
    bits, and shrunk. The demo ends with a table and an HTML page. If you interrupt it, the same command continues.
    """

    steps: int = 600  # optimizer steps of each of the two training runs
    sparsity: float = 0.8  # fraction of the prunable weights to remove
    seed: int = 0  # initial weights and order of the data
    out: Path = Path("runs/demo")  # folder for the runs, the small model and report.html


def run(command: Command) -> None:
    if command.steps < 20:
        raise ValueError(f"the demo takes at least 20 steps, got {command.steps}")
    plan = Run(
        model="gpt2-tiny",
        width=WIDTH,
        layers=2,
        batch=BATCH,
        lr=4e-3,
        steps=command.steps,
        seed=command.seed,
        sparsity=command.sparsity,
        eval_every=max(1, command.steps // 4),
        eval_size=128,
        save_every=100,
    )
    from ..files.json_file import write_json
    from ..lab.evaluate import measured, summed
    from ..lab.report.page import write_report

    began, out = time.time(), command.out
    dense, sparse = (
        _trained(replace(plan, score=s, out=out / n)) for s, n in (("none", "dense"), ("bitter7", "sparse"))
    )
    rows, texts = [], {}
    for name, done, model in _models(dense, sparse, command):
        if name == SMALL:
            model, size = _written(model, out / "small", dense.run)
        else:
            size = _size(model)
        if name in ("dense", SMALL):
            texts[name] = _text(model, plan.context)
        batches = dense.data.validation(BATCH, plan.eval_size)
        quality = summed(measured(model, batches, dense.device, dense.autocast()))
        rows.append(Row(name, done, quality.perplexity, size))
    values = {"rows": [*map(asdict, rows)], "texts": texts, "prompt": PROMPT.decode(), "settings": plan.to_json()}
    write_json(out / DEMO_FILE, values)
    page = write_report(out)
    _print_table(rows)
    _print_texts(texts)
    print(f"{in_one_line(rows, command.sparsity)}.", AFTERWARDS)
    if not _can_recover():
        print("Recovery was left out: it needs pip install 'prunus[hf]'.")
    activate = Path(sys.executable).parent / "activate"
    on_path = shutil.which("prunus") or not activate.is_file()
    print(
        "",
        f"Open {page} in a browser. The demo took {duration(time.time() - began)}. What to do next:",
        *(() if on_path else (f"  . {activate}", "      puts prunus on your path")),
        f"  prunus doctor {out / 'small'}",
        "      checks the small model that the demo wrote",
        "  prunus train --data YOUR.txt --out runs/mine",
        "      trains on your own text and prunes during training",
        "  prunus prune MODEL_FOLDER --text YOUR.txt --out pruned",
        "      prunes a trained Hugging Face model",
    )


def _trained(run: Run) -> "Training":
    from ..lab.checkpoint import checkpoint_of, load_checkpoint
    from ..lab.trainer import Training, train

    if (run.out / "run.json").is_file():
        before = read_run(run.out)
        if replace(before, out=run.out, resume=False) != run:
            raise ValueError(f"{run.out} holds a run with other options; choose another --out")
        run = replace(run, resume=True)
    if not (run.out / "result.json").is_file():
        with progress_bar(f"train {run.out.name}", run.total_steps) as report:
            train(run, report)
    training = Training(run, trains=False)
    training.load_weights(load_checkpoint(checkpoint_of(run.out))["model"])
    training.model.eval()
    return training


def _can_recover() -> bool:
    return find_spec("transformers") is not None and find_spec("accelerate") is not None


def _models(dense: "Training", sparse: "Training", command: Command) -> "Iterator[tuple[str, str, nn.Module]]":
    """The models that are compared: a name, what was done, and the model, which the next may be made from."""
    from .. import prune, quantize, recover, shrink

    steps, zeros = max(1, round(LEARNING * command.steps)), f"{100 * command.sparsity:g} %"
    learned = f"then {steps} steps from dense"
    windows = [dense.data.train.batch(command.steps + i, BATCH, command.seed)[0] for i in range(16 + steps)]

    def recovered(model: "nn.Module") -> None:
        recover(model, teacher=deepcopy(dense.model), batches=windows, steps=steps, seed=command.seed)

    yield "dense", f"{command.steps} steps", dense.model
    yield "sparse", f"{zeros} zeros during training", sparse.model
    model = deepcopy(dense.model)
    prune(model, windows[:16], command.sparsity, score="magnitude", repair=None)
    yield "magnitude", f"smallest {zeros} to zero", model
    model = deepcopy(dense.model)
    prune(model, windows[:16], command.sparsity)
    yield "repaired", f"{zeros} zeros, others adjusted", model
    if _can_recover():
        recovered(model)
        yield "recovered", learned, model
    quantize(model, windows[:16], bits=4)
    yield SMALL, "then quantised to 4 bits", model
    model = deepcopy(dense.model)
    shrink(model, windows[:16], size=SIZE)
    yield "shrunk", "half the blocks' weights", model
    if _can_recover():
        recovered(model)
        yield "shrunk, recovered", learned, model


def _size(model: "nn.Module", folder: Path | None = None) -> int:
    """Bytes of its weights in the small form, written to a folder or to none that stays."""
    from ..export.huggingface import save_model

    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="load_model only loads transformers models")
        saved = save_model(model, folder or Path(place) / "model", replace=folder is not None)
        return sum(path.stat().st_size for path in saved.files)


def _written(model: "nn.Module", folder: Path, run: Run) -> "tuple[nn.Module, int]":
    """The model as it is read back from the folder that it is written to, and the bytes of its weights."""
    from ..lab.trained_run import describe, load_exported

    size = _size(model, folder)
    describe({"run": run.to_json(), "step": run.steps, "model": model.state_dict()}, folder)
    return load_exported(folder), size


def _text(model: "nn.Module", context: int) -> str:
    """What a model writes after the prompt, with the same random numbers as the others."""
    import torch

    drawn, tokens = torch.Generator().manual_seed(0), list(PROMPT)
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        tokens.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=drawn)))
    return bytes(tokens).decode("ascii", errors="replace").rstrip()


def _print_table(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table()
    for heading in ("model", "what was done"):
        table.add_column(heading, overflow="fold")
    for heading in ("perplexity", "change", "MB"):
        table.add_column(heading, justify="right")
    for row in rows:
        beside = change(row, rows[0]) if row is not rows[0] else ""
        table.add_row(row.name, row.done, plain(row.perplexity), beside, f"{row.num_bytes / 1e6:.2f}")
    Terminal().print(table)


def _print_texts(texts: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"What they write after {PROMPT.decode().strip()!r}, drawn with the same random numbers")
    for name in texts:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*map(Text, texts.values()))
    Terminal().print(table)
