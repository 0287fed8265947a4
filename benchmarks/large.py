"""Folders that are pruned block by block, beside models that are loaded whole: memory, time, and the same bits.

Each call runs in a process of its own. Its memory is the largest resident size, less that of the same call on a folder
of the size of stories260K.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import prunus
from prunus.cli import main
from prunus.export.convert import check_same
from prunus.files.one_line import in_one_line
from prunus.files.reader import open_tensors
from prunus.files.sparse_file import from_files
from prunus.ops.machine import said_by_linux
from prunus.trained.data import Windows, drawn

from .benchmark import SPARSITY, Benchmark, Measured, RecordTable, Row
from .wanda import their_oneshot

SMALL = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8, "vocab_size": 512}  # stories260K
WIDE = {"hidden_size": 1024, "intermediate_size": 2752, "num_attention_heads": 16, "vocab_size": 32_000}
STORIES15M = {"hidden_size": 288, "intermediate_size": 768, "num_attention_heads": 6, "vocab_size": 32_000}
THEIRS = "llm-compressor"
WORKS = {"repair": [], "masks": ["--no-repair", "--score", "magnitude"]}  # options of the command
WayName = Literal["prunus prune", "folder", "module", "llm-compressor"]
GOALS = {"repair": 0.6, "masks": 0.4}  # memory as a share of the folder
TIME_GOAL, RANKS_GOAL = 1.05, 1.7  # beside the model that is loaded whole, and one process beside two
EVALUATED = 4  # windows that the command measures the model on


@dataclass(frozen=True, kw_only=True)
class Large(Benchmark):
    """Prune folders of random Llama blocks (float32, width 1,024), or yours, block by block and loaded whole."""

    work: Literal["masks", "repair"] = "masks"  # masks by magnitude alone, or a repair by the solver
    folder: Path | None = None  # of a Llama model in place of the random ones
    blocks: tuple[int, ...] = (4, 8, 16, 37)  # of each random folder
    ways: tuple[WayName, ...] = ("prunus prune", "folder", "module")  # the command, a folder and a module in Python
    windows: int = 32  # that calibrate
    length: int = 256  # tokens of each
    memory: str = "none"  # limit for activations of a repair, as 400MB
    tokens: Path | None = None  # file of 16-bit tokens, below 512 for random blocks; by default random ones
    ranks: int = 1  # processes that divide a repair of the folder or of stories15M's shape; 1: it is not measured

    def measure(self) -> Measured:
        settings: dict[str, Any] = {"dtype": "float32", "sparsity": SPARSITY}
        if self.work == "repair" or self.ranks > 1:
            settings |= {"windows": self.windows, "length": self.length, "memory": self.memory}
        with tempfile.TemporaryDirectory() as place:
            tokens = Path(place, "tokens.npy")
            num = (self.windows + EVALUATED) * self.length
            random = np.random.default_rng(0).integers(0, SMALL["vocab_size"], num, dtype=np.uint16)
            np.save(tokens, random if self.tokens is None else np.fromfile(self.tokens, np.uint16)[:num])
            call = Call(str(tokens), self.windows, self.length, self.memory, self.threads)
            if self.ranks > 1:
                settings |= {"weights": self.folder.name if self.folder else "6 blocks of stories15M's shape"}
                folder = self.folder or make_folder(Path(place, "folder"), STORIES15M, 6)
                return "large ranks", settings, measure_ranks(call, folder, Path(place), self.ranks)
            if self.folder is not None:
                settings |= {"weights": f"{self.work}, {self.folder.name}"}
                return "large", settings, measure_folder(call, Path(place), self.work, self.folder, self.ways)
            settings |= {"weights": f"{self.work}, {' '.join(map(str, self.blocks))} blocks of width 1,024"}
            return "large", settings, measure_blocks(call, Path(place), self.work, self.blocks, self.ways)


@dataclass(frozen=True)
class Call:
    """What all calls share."""

    tokens: str
    windows: int
    length: int
    memory: str
    threads: int

    def run(self, way: str, work: str, folder: Path, out: Path, ranks: int = 1) -> list[Row]:
        """What a call took, by rank, measured in a process of its own."""
        start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run"]
        start += [] if ranks == 1 else ["--standalone", f"--nproc-per-node={ranks}"]
        command = [*start, "-m", "benchmarks.large", json.dumps(asdict(self)), way, work, str(folder), str(out)]
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way} of {work} ended with {done.returncode}: {done.stderr[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]


def make_folder(folder: Path, shape: dict[str, int], blocks: int) -> Path:
    """Write a folder of random blocks, in a process of its own: what it takes stays out of all measurements."""
    program = (
        "import sys, json, torch; from transformers import LlamaConfig, LlamaForCausalLM; torch.manual_seed(0); "
        "config = LlamaConfig(**json.loads(sys.argv[2]), tie_word_embeddings=True, pad_token_id=0); "
        "LlamaForCausalLM(config).save_pretrained(sys.argv[1])"
    )
    about = json.dumps(shape | {"num_hidden_layers": blocks})
    subprocess.run([sys.executable, "-c", program, str(folder), about], check=True, capture_output=True)
    return folder


def measure_blocks(call: Call, place: Path, work: str, blocks: Sequence[int], ways: Sequence[str]) -> list[Row]:
    """A row for each number of random blocks and way."""
    least, rows = peaks_of_small(call, place, work, SMALL, ways), []
    for num in blocks:
        folder = make_folder(place / "folder", WIDE, num)
        rows += measure_memory(call, place, work, folder, ways, least, GOALS[work])
        shutil.rmtree(folder)
    return rows


def measure_folder(call: Call, place: Path, work: str, folder: Path, ways: Sequence[str]) -> list[Row]:
    """A row for each way of pruning a model."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    least = peaks_of_small(call, place, work, SMALL | {"vocab_size": vocabulary}, ways)
    return measure_memory(call, place, work, folder, ways, least)


def peaks_of_small(call: Call, place: Path, work: str, shape: dict[str, int], ways: Sequence[str]) -> dict[str, float]:
    """What each way takes for a model as small as stories260K."""
    small = make_folder(place / "small", shape, 5)
    return {way: call.run(way, work, small, place / f"small_{number}")[0]["peak_mb"] for number, way in enumerate(ways)}


def measure_memory(
    call: Call,
    place: Path,
    work: str,
    folder: Path,
    ways: Sequence[str],
    least: dict[str, float],
    goal: float | None = None,
) -> list[Row]:
    """A row for each way, with a goal for the share of the folder; ValueError unless ours write the same bits."""
    outs = {way: place / f"out_{number}" for number, way in enumerate(ways)}
    megabytes = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    num_blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    measured = {way: call.run(way, work, folder, out)[0] for way, out in outs.items()}
    same_bits([out for way, out in outs.items() if way != THEIRS])
    for way, row in measured.items():
        above = row["peak_mb"] - least[way]
        row |= {"work": work, "blocks": num_blocks, "folder_mb": megabytes}
        row |= {"above_mb": above, "share": above / megabytes}
        row["share_goal"] = goal if way in ("prunus prune", "folder") else None
        if "module" in measured and way == "folder":
            row |= {"times": row["cpu_seconds"] / measured["module"]["cpu_seconds"], "times_goal": TIME_GOAL}
        print(row, flush=True)
    for out in outs.values():
        shutil.rmtree(out)
    return list(measured.values())


def measure_ranks(call: Call, folder: Path, place: Path, ranks: int) -> list[Row]:
    """One process and several, a thread each; the CPU seconds are those of the busiest."""
    rows: list[Row] = []
    for num in (1, ranks):
        each = call.run("folder", "repair", folder, place / f"out_{num}", num)
        row = {name: max(row[name] for row in each) for name in ("seconds", "cpu_seconds", "peak_mb")}
        rows.append({"ranks": num} | row)
    for row in rows:
        row |= {name.replace("seconds", "times"): rows[0][name] / row[name] for name in ("seconds", "cpu_seconds")}
        row["goal"] = RANKS_GOAL if row["ranks"] > 1 else None
    return rows


def same_bits(folders: Sequence[Path]) -> None:
    """ValueError unless all folders hold the same tensors."""
    if not folders:
        return
    first, *others = folders
    with open_tensors(first) as tensors:
        for other in others:
            with in_one_line(f"{first} and {other} are not the same, so no figure is reported", ValueError):
                check_same(from_files(tensors), other)


# In the process of a call


def by_command(call: Call, work: str, folder: str, out: str) -> None:
    """``prunus prune``, which measures the dense and the pruned model too."""
    data = ["--tokens", call.tokens, "--eval-tokens", call.tokens, "--eval-windows", str(EVALUATED)]
    how = ["--samples", str(call.windows), "--length", str(call.length), "--start-token", "no", *WORKS[work]]
    limit = [] if call.memory == "none" or work == "masks" else ["--memory", call.memory]
    main(["prune", folder, "--out", out, *data, *how, *limit])


def in_python(call: Call, work: str, folder: str, out: str, *, is_loaded: bool) -> None:
    """``prune`` of a folder, or of the model in it."""
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {} if is_loaded else {"out": out}
    batches: Sequence[Any] = ()
    if work == "repair":
        batches = [drawn(Windows(np.load(call.tokens, "r"), call.length), call.windows, 0)]
        how["group"] = True if torch.distributed.is_initialized() else None
        how["memory"] = None if call.memory == "none" else int(call.memory.removesuffix("MB")) * 10**6
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval() if is_loaded else folder
    prunus.prune(model, batches, SPARSITY, progress=False, **how)
    if is_loaded:
        model.save_pretrained(out)


def by_llm_compressor(call: Call, work: str, folder: str, out: str) -> None:
    """Its SparseGPT in place of a repair, and WANDA in place of masks alone, on the model in a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    windows: Any = drawn(Windows(np.load(call.tokens, "r"), call.length), call.windows, 0)
    modifier = "SparseGPTModifier" if work == "repair" else "WandaPruningModifier"
    their_oneshot(model, windows, modifier, sparsity=SPARSITY, mask_structure="0:0")
    model.save_pretrained(out)


WAYS: dict[str, Callable[..., None]] = {
    "prunus prune": by_command,
    "folder": partial(in_python, is_loaded=False),
    "module": partial(in_python, is_loaded=True),
    THEIRS: by_llm_compressor,
}


def call_alone(call: Call, way: str, *what: str) -> None:
    """Run one call, and print what it took; what imports take is left out of the time."""
    import accelerate  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    if way == THEIRS:
        import llmcompressor  # noqa: F401
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    began, cpu = time.perf_counter(), time.process_time()
    WAYS[way](call, *what)
    row = {"way": way, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    print("\n" + json.dumps(row | {"peak_mb": (said_by_linux("self/status", "VmHWM") or 0) / 1e6}), flush=True)


TABLES = {
    "large": RecordTable(
        "work | blocks | folder MB = folder_mb:,.0f | way | peak MB = peak_mb:,.0f | "
        "above the small MB = above_mb:,.0f | of the folder = share:.2f | goal = share_goal:g | "
        "CPU s = cpu_seconds:,.0f | times the module's = times:.2f | "
        "goal = times_goal:g"
    ),
    "large ranks": RecordTable(
        "ranks | s = seconds:,.0f | CPU s of the busiest = cpu_seconds:,.0f | times faster = times:.2f | "
        "by CPU s = cpu_times:.2f | goal:g | peak MB = peak_mb:,.0f"
    ),
}

if __name__ == "__main__":
    call_alone(Call(**json.loads(sys.argv[1])), *sys.argv[2:])
