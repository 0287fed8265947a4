"""What ``README.md`` says in numbers: written between two marks from the records, so that none is typed."""

import json
from pathlib import Path
from typing import Any

from prunus.lab.study.tables import markdown_table

from .benchmark import newest_records
from .repair_page import Figures, figures_of, level_name
from .select import OURS

BEGIN, END = "<!-- figures: written by python -m benchmarks pictures -->", "<!-- end of figures -->"
WAYS = {  # columns of the table for after training
    "magnitude": "magnitude",
    "wanda": "WANDA",
    "llmc-sparsegpt": "SparseGPT",
    "repair": "**prunus**",
    "tuned": "**prunus, tuned**",
}
TRAINED = [  # study, model, sparsity, arm; all in the recipe that is the default
    ("gpt2-124m-rates", "GPT-2 124M", 0.5, "bitter7 rate 1 lr 1e-3"),
    ("gpt2-124m-rates", "GPT-2 124M", 0.8, "bitter7 rate 1 lr 1e-3"),
    ("gpt2-rates", "GPT, 51 M weights", 0.5, "bitter7 rate 1"),
    ("gpt2-rates", "GPT, 51 M weights", 0.8, "bitter7 rate 1"),
    ("gpt2-tiny-rates", "GPT, 0.8 M weights", 0.5, "bitter7 rate 1"),
    ("gpt2-tiny-rates", "GPT, 0.8 M weights", 0.8, "bitter7 rate 1"),
    ("lenet-rates", "LeNet-5, MNIST", 0.95, "bitter7"),
    ("resnet-rates", "ResNet-20, CIFAR-10", 0.9, "bitter7"),
]


def page(text: str, results: Path, studies: Path) -> str:
    """``text`` with its figures written anew."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"README.md needs the two lines {BEGIN} and {END}, between which its figures go")
    return f"{before}{BEGIN}\n{figures(results, studies)}\n{END}{after}"


def figures(results: Path, studies: Path) -> str:
    parts = [_after_training(figures_of(results)), _in_training(studies), _costs(results)]
    return "\n\n".join(parts)


def _after_training(models: list[Figures]) -> str:
    """Models and levels that repair and at least one other way were measured on."""
    lines = [
        [f"{model.name}, {level_name(level)}", model.number(model.dense), *cells]
        for model in models
        for level in model.levels
        if model.num_seeds == len(model.values("repair", level))
        for cells in [[model.cell(way, level, ends=False) for way in WAYS]]
        if any(cells[:3])
    ]
    draws = max(model.num_seeds for model in models)
    return (
        f"After training, on held-out data: perplexity, lower is better (ResNet-20: accuracy, higher is better). "
        f"Means of {draws} draws of the calibration samples; n where there are fewer:\n\n"
        + markdown_table(["", "dense", *WAYS.values()], lines)
    )


def _in_training(studies: Path) -> str:
    lines = []
    for study, model, sparsity, arm in TRAINED:
        found = json.loads((studies / study / "study_result.json").read_text())
        rows = {(row["arm"], row["sparsity"]): row for row in found["rows"]}
        row = rows[arm, sparsity]
        dense, magnitude = rows[row["dense"], 0.0], rows.get((arm.replace("bitter7", "magnitude"), sparsity))
        num = len(row["seeds"])
        cells = [_spread(each, found["metric"], num) if each else "" for each in (dense, magnitude, row)]
        name, power = f"{model}: {found['metric']['name']}", (arm.partition(" rate ")[2] or "0").split()[0]
        lines.append([name, level_name(f"{100 * sparsity:g}"), power, *cells, str(num)])
    headings = ["", "sparsity", "power", "dense", "magnitude", "**bitter7**", "seeds"]
    return (
        "While training, in the recipe of `prunus train`; power is that of the rule for learning rates, 1 by default. "
        "Mean and standard deviation over seeds; n where there are fewer:\n\n" + markdown_table(headings, lines)
    )


def _spread(row: dict[str, Any], metric: dict[str, Any], num_seeds: int) -> str:
    percent, fewer = " %" if metric["name"] == "accuracy" else "", len(row["seeds"])
    text = f"{row['mean']:.{row['decimals']}f} ± {row['sd']:.{row['decimals']}f}{percent}"
    return text + (f" (n = {fewer})" if fewer < num_seeds else "")


def _costs(results: Path) -> str:
    """Time of an event, of a step and of a repair, and the size of a file."""
    records = newest_records(results)
    events = {
        r["settings"]["weights"]: (r, row)
        for r in records
        if r["what"] == "select" and r["environment"]["machine"].startswith("NVIDIA")
        for row in r["rows"]
        if row["method"] == OURS
    }
    record, event = max(events.values(), key=lambda each: each[0]["settings"]["num_weights"])
    steps = next(r for r in records if r["what"] == "train")
    step = next(row for row in steps["rows"] if row["arm"] == "Pruner + AdamWPrune")
    repair = next(r for r in records if r["what"] == "repair" and r["settings"]["weights"] == "stories15M")
    sizes = next(r for r in records if r["what"] == "export")["rows"]
    rows = [r for r in sizes if "save_sparse" in r["way"] and r["dtype"] == "bfloat16" and r["sparsity"] == 0.5]
    size = rows[0]["size"]
    texts = [r for r in records if r["what"] == "decode"]
    texts = max(texts, key=lambda r: r["settings"]["blocks"])
    one = {row["zeros"]: row for row in texts["rows"] if row["batch"] == 1 and row["way"] == "decoder, compiled"}
    seconds, threads = repair["rows"][0]["seconds"], repair["environment"]["machine"].split(", ")[-1]
    return "\n".join(
        [
            f"- Finding the masks of {record['settings']['num_weights'] / 1e9:.1f} billion weights takes "
            f"{event['ms']:.0f} ms on an {record['environment']['machine']}.",
            f"- A training step of GPT-2 124M with `AdamWPrune` takes {step['ratio']:.3f} of the time of one without "
            "pruning, with PyTorch's fused AdamW, on the same GPU.",
            f"- Repairing stories15M takes {seconds:.0f} s on a CPU with {threads}.",
            f"- At 50 %, a pruned weight takes {size:.3f} of its bytes in a file in bfloat16.",
            f"- A model of Llama-3-8B's shape writes text {one['50%']['times_faster']:.2f} times faster at 50 % and "
            f"{one['80%']['times_faster']:.2f} times at 80 %, in {one['50%']['memory']:.2f} and "
            f"{one['80%']['memory']:.2f} of the GPU's memory, by our compiled decoder, sparse beside dense, on "
            "the same GPU.",
        ]
    )
