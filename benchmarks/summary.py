"""The main figures: the tables of ``README.md`` and of ``docs/evidence/README.md``."""

import json
from pathlib import Path
from typing import Any

from prunus.lab.study.tables import markdown_table

from .benchmark import Row, newest_records
from .probe import BESIDE, counted, read_figures
from .repair_figures import figures_of
from .select import OURS
from .study import level_name

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
CHECKS = ("training", "magnitude", "wanda", "fisher", "repair", "export", "doctor", "sparse run")


def readme_parts(results: Path, studies: Path) -> dict[str, str]:
    return {"figures": "\n\n".join([after_training(results), in_training(studies), costs(results)])}


def parts(results: Path, studies: Path, probe: Path, records: Path) -> dict[str, str]:
    """What ``docs/evidence/README.md`` shows between its marks; ``records`` holds support.json and reliability.json."""
    return {
        "after training": after_training(results),
        "while training": in_training(studies),
        "costs": costs(results),
        "probe": _probe(probe),
        "models": _support(json.loads((records / "support.json").read_text())),
        "reliability": _reliability(json.loads((records / "reliability.json").read_text())),
    }


def after_training(results: Path) -> str:
    """Models and levels that repair and at least one other way were measured on."""
    models = figures_of(results)
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


def in_training(studies: Path) -> str:
    lines = []
    for study, model, sparsity, arm in TRAINED:
        result = json.loads((studies / study / "study_result.json").read_text())
        rows = {(row["arm"], row["sparsity"]): row for row in result["rows"]}
        row = rows[arm, sparsity]
        dense, magnitude = rows[row["dense"], 0.0], rows.get((arm.replace("bitter7", "magnitude"), sparsity))
        num = len(row["seeds"])
        cells = [_spread(each, result["metric"], num) if each else "" for each in (dense, magnitude, row)]
        name, power = f"{model}: {result['metric']['name']}", (arm.partition(" rate ")[2] or "0").split()[0]
        lines.append([name, level_name(f"{100 * sparsity:g}"), power, *cells, str(num)])
    headings = ["", "sparsity", "power", "dense", "magnitude", "**bitter7**", "seeds"]
    return (
        "While training, with the recipe of `prunus train`. `power` raises the learning rate as weights go "
        "(1 by default). "
        "Mean and standard deviation over seeds; n where there are fewer:\n\n" + markdown_table(headings, lines)
    )


def _spread(row: Row, metric: Row, num_seeds: int) -> str:
    percent, fewer = " %" if metric["name"] == "accuracy" else "", len(row["seeds"])
    text = f"{row['mean']:.{row['decimals']}f} ± {row['sd']:.{row['decimals']}f}{percent}"
    return text + (f" (n = {fewer})" if fewer < num_seeds else "")


def costs(results: Path) -> str:
    """Time of an event, of a step and of a repair, the size of a file, and the speed of text."""
    records = newest_records(results)

    def row_of(what: str, **wanted: Any) -> Row:
        """The row with those values of the largest record of its kind."""
        rows = [
            (r["settings"].get("num_weights") or r["settings"].get("blocks") or 0, row | {"record": r})
            for r in records
            if r["what"] == what
            for row in r["rows"]
            if all((row | r["settings"]).get(key) == value for key, value in wanted.items())
        ]
        return max(rows, key=lambda each: each[0])[1]

    event, repair = row_of("select", method=OURS), row_of("repair", weights="stories15M")
    step = row_of("train", arm="Pruner + AdamWPrune")
    size = row_of("export", way="file, prunus: save_sparse, load_sparse", dtype="bfloat16", sparsity=0.5)["size"]
    half, fifth = (row_of("decode", zeros=z, batch=1, way="decoder, compiled") for z in ("50%", "80%"))
    machine, threads = (each["record"]["environment"]["machine"] for each in (event, repair))
    return "\n".join(
        [
            f"- Finding the masks of {event['record']['settings']['num_weights'] / 1e9:.1f} billion weights takes "
            f"{event['ms']:.0f} ms on an {machine}.",
            f"- A training step of GPT-2 124M with `AdamWPrune` takes {step['ratio']:.3f} of the time of one without "
            "pruning, with PyTorch's fused AdamW, on the same GPU.",
            f"- Repairing stories15M takes {repair['seconds']:.0f} s on a CPU with {threads.split(', ')[-1]}.",
            f"- At 50 %, a pruned weight takes {size:.3f} of its bytes in a file in bfloat16.",
            f"- A model of Llama-3-8B's shape writes text {half['times_faster']:.2f} times faster at 50 % and "
            f"{fifth['times_faster']:.2f} times at 80 %, in {half['memory']:.2f} and {fifth['memory']:.2f} of the "
            "GPU's memory, by our compiled decoder, sparse beside dense, on the same GPU.",
        ]
    )


def _probe(folder: Path) -> str:
    """Clear differences from the strategy alone, over models that are still usable, and over all."""
    lines = []
    for model in read_figures(folder):
        compared = [each for way in BESIDE for each in model.against(way)]
        usable = counted(each for each in compared if each.usable)
        lines.append([model.settings["case"], *usable, *counted(compared)])
    return markdown_table(["model", "better, usable", "worse, usable", "of, usable", "better", "worse", "of"], lines)


def _support(record: Row) -> str:
    """In how many families of the newest transformers each check held: for all weights, for some, or not."""
    newest = max(record, key=lambda version: [*map(int, version.split("."))])
    families = [family for family in record[newest]["families"].values() if "training" in family]
    lines = []
    for check in CHECKS:
        whole = sum(family[check] == "yes" for family in families)
        held = sum(family[check].startswith("yes") for family in families)
        lines.append([check, *map(str, (whole, held - whole, len(families) - held))])
    return markdown_table([f"of {len(families)} families, transformers {newest}", "held", "in part", "failed"], lines)


def _reliability(record: Row) -> str:
    kills = record["kills"].values()
    num_kills, differences = (sum(each[key] for each in kills) for key in ("kills", "differences"))
    trials = [("processes killed and begun again: results that differ", num_kills, differences)]
    for name, key in {"flipped bits: tensors read wrong": "flips", "damaged files: failures": "mutations"}.items():
        trials.append((name, record[key]["mutations"], len(record[key]["failures"])))
    trials.append(("hostile files: code that ran", record["payloads"]["opened"], len(record["payloads"]["ran"])))
    lines = [[name, f"{num:,}", f"{happened:,}"] for name, num, happened in trials]
    return markdown_table(["trial: what may not happen", "trials", "happened"], lines)
