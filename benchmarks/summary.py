"""The main figures: the tables of ``README.md`` and of ``docs/evidence/README.md``."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prunus.lab.study.tables import markdown_table

from .benchmark import Record, Row, newest_records
from .bits_figures import BitsFigures, percent
from .bits_figures import read_figures as read_bits
from .figures import ModelFigures, rows_of_study
from .probe import BESIDE, counted, read_figures
from .repair_figures import read_figures as read_repair
from .select import OURS
from .shrink_figures import read_figures as read_shrunk
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
SMALL = ("recover", "80", "4"), ("dense", "", "4")  # way, level and form of GPT-51M in few bits
CHECKS = ("training", "magnitude", "wanda", "fisher", "repair", "export", "doctor", "sparse run")


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
    models = read_repair(results)
    lines = [
        [model.title(level), model.number(model.dense), *cells]
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
        rows = rows_of_study(studies / study)
        row = rows[arm, sparsity]
        dense, magnitude = rows[row["dense"], 0.0], rows.get((arm.replace("bitter7", "magnitude"), sparsity))
        num = len(row["seeds"])
        cells = [_spread(each, num) if each else "" for each in (dense, magnitude, row)]
        power = (arm.partition(" rate ")[2] or "0").split()[0]
        lines.append([f"{model}: {row['metric']}", level_name(f"{100 * sparsity:g}"), power, *cells, str(num)])
    headings = ["", "sparsity", "power", "dense", "magnitude", "**bitter7**", "seeds"]
    return (
        "While training, with the recipe of `prunus train`. `power` raises the learning rate as weights go "
        "(1 by default). "
        "Mean and standard deviation over seeds; n where there are fewer:\n\n" + markdown_table(headings, lines)
    )


def _spread(row: Row, num_seeds: int) -> str:
    percent, fewer = " %" if row["metric"] == "accuracy" else "", len(row["seeds"])
    text = f"{row['mean']:.{row['decimals']}f} ± {row['sd']:.{row['decimals']}f}{percent}"
    return text + (f" (n = {fewer})" if fewer < num_seeds else "")


def row_of(records: Sequence[Record], what: str, **wanted: Any) -> Row:
    """The row with those values of the largest record of its kind."""
    rows = [
        (r["settings"].get("num_weights") or r["settings"].get("blocks") or 0, row | {"record": r})
        for r in records
        if r["what"] == what
        for row in r["rows"]
        if all((row | r["settings"]).get(key) == value for key, value in wanted.items())
    ]
    return max(rows, key=lambda each: each[0])[1]


def choices(results: Path, studies: Path) -> str:
    """Which way a reader should take: what to type, and what was measured of it."""
    records = newest_records(results)
    of_bits = {model.figures.name: model for model in read_bits(results, studies)}
    shrunk = {model.name: model for model in read_shrunk(results)}
    lines = [
        [
            "a smaller file",
            "Dense in 4 or 8 bits, by [another tool](docs/bits.md#dense-models); for less than that, sparse in 4 bits",
            "`prunus prune MODEL --text CORPUS --sparsity 0.8 --recover 20M --bits 4 --device cuda --out small`",
            _smaller(of_bits),
        ],
        [
            "faster chat on one GPU (H100 or newer)",
            "A sparse file in 4 bits, run by our [decoder](docs/run-and-ship.md#run-it)",
            '`prunus generate small --compile --prompt "Once"`',
            _faster(records),
        ],
        [
            "many users at once",
            "Another tool: a dense model in few bits, by [llm-compressor](docs/bits.md#dense-models)",
            "`vllm serve MODEL-W4A16`",
            _together(records),
        ],
        [
            "a phone, or llama.cpp",
            "llama.cpp's `llama-quantize`, on the dense model; if that is too big, [shrink](docs/shrink.md) it first",
            "`prunus shrink MODEL --text CORPUS --size 0.8 --recover 20M --device cuda --out smaller`",
            _shrunk(shrunk),
        ],
        [
            "to train anyway",
            "Prune [while you train](docs/training.md), on [many GPUs](docs/distributed.md) too",
            "`prunus train --data TEXT --sparsity 0.8 --out runs/mine`",
            _trained(records, studies),
        ],
        [
            "to work without a GPU",
            "Dense in 8 bits by another tool; or [shrink](docs/shrink.md) it: an ordinary model, smaller and faster",
            "`prunus shrink MODEL --text CORPUS --size 0.8 --tune --out smaller`",
            _without_gpu(records, {model.name: model for model in read_repair(results)}, shrunk),
        ],
    ]
    return markdown_table(["I want", "take", "type", "what was measured"], lines, words=range(4))


def _smaller(models: Mapping[str, BitsFigures]) -> str:
    model, other = models["GPT-51M"], models["SmolLM2-135M"]
    sparse, codes = (next(a for a in model.arms if (a.way, a.level, a.form) == key) for key in SMALL)
    stored = (model.figures.rows[key].values() for key in (("dense", ""), ("dense 4", ""), ("recover 4", "80")))
    sizes = [statistics.fmean(row["num_bytes"] for row in rows) / 1e6 for rows in stored]
    losses = {arm.form: percent(arm.loss) for arm in other.arms if arm.way == "dense"}
    learned = {arm.form: percent(arm.loss) for arm in other.arms if (arm.way, arm.level) == ("recover", "50")}
    return (
        f"GPT-51M: its blocks' weights take {sizes[2]:.1f} MB at 80 % in 4 bits, perplexity {percent(sparse.loss)}; "
        f"dense they take {sizes[1]:.1f} MB in 4 bits, {percent(codes.loss)}, and {sizes[0]:.1f} MB in 16. "
        "SmolLM2-135M (its weights came in 4 bits), dense, rounded again by us without learning: "
        f"{losses['8-nearest']} in 8 bits, {losses['4']} in 4, {losses['4-32']} in 4 with a scale for every 32 columns "
        f"instead of 128 ({losses['4-llmcompressor']} by llm-compressor); 50 % in 4 bits, recovered: {learned['4']}, "
        f"and {learned['4-scales']} where the scales learn too"
    )


def _decoded(records: Sequence[Record], zeros: str, batch: int) -> Row:
    return row_of(records, "decode", way="decoder, compiled", zeros=zeros, batch=batch)


def _faster(records: Sequence[Record]) -> str:
    half, fifth, theirs = (_decoded(records, zeros, 1) for zeros in ("50%, 4 bits", "80%, 4 bits", "int4"))
    return (
        f"Random weights of Llama-3-8B's shape, {half['record']['environment']['machine']}, one text: "
        f"{half['times_faster']:.2f} times the dense speed at 50 % in 4 bits and {fifth['times_faster']:.2f} at 80 %, "
        f"in {half['memory']:.2f} and {fifth['memory']:.2f} of its memory; torch's dense int4 "
        f"{theirs['times_faster']:.2f} times in {theirs['memory']:.2f}. Only GPUs from compute capability 9.0 on "
        "(H100) multiply 4-bit codes; on older ones, which were not measured, the decoder holds 16-bit values. Quality "
        "at this size is not measured"
    )


def _together(records: Sequence[Record]) -> str:
    one, eight = (_decoded(records, "80%, 4 bits", batch)["times_faster"] for batch in (1, 8))
    return (
        f"Our decoder gains less the more texts it writes: the same random weights at 80 % in 4 bits are {one:.2f} "
        f"times as fast as dense with one text, {eight:.2f} with 8, and more than 16 are not possible"
    )


def _shrunk(models: Mapping[str, ModelFigures]) -> str:
    said = [
        f"{name}, {level} % of its blocks' weights less: perplexity {models[name].beside(way, level)}"
        for name, way, level in (("SmolLM2-135M", "solved-recover", "20"), ("GPT-51M", "tuned-recover", "25"))
    ]
    return "; ".join(said) + ", after recovery. Speed in llama.cpp is not measured"


def _trained(records: Sequence[Record], studies: Path) -> str:
    study, model, _, arm = TRAINED[0]
    rows = rows_of_study(studies / study)
    keys = (rows[arm, 0.5]["dense"], 0.0), (arm, 0.5), (arm, 0.8)
    dense, half, fifth = (_spread(rows[key], 0) for key in keys)
    step = row_of(records, "train", arm="Pruner + AdamWPrune")
    return (
        f"{model}, {len(rows[arm, 0.5]['seeds'])} seeds (mean ± standard deviation): perplexity {dense} dense, "
        f"{half} at 50 %, {fifth} at 80 %. "
        f"A step takes {step['ratio']:.3f} of the time of a dense one, {step['record']['environment']['machine']}"
    )


def _without_gpu(
    records: Sequence[Record], repaired: Mapping[str, ModelFigures], shrunk: Mapping[str, ModelFigures]
) -> str:
    repair = row_of(records, "repair", weights="stories15M")
    half, solved, tuned = (
        models["stories15M"].beside(way, level)
        for models, way, level in ((repaired, "repair", "50"), (shrunk, "solved", "1/6"), (shrunk, "tuned", "1/6"))
    )
    threads = repair["record"]["environment"]["machine"].split(", ")[-1]
    return (
        f"stories15M, a sixth of its blocks' weights less: perplexity {solved}, tuned {tuned}. Pruning works without a "
        f"GPU, too ({repair['seconds']:.0f} s on {threads} at 50 %: {half}), but on a CPU zeros save time only where "
        "nearly all weights are zero: `prunus export pruned --advise` measures it"
    )


def costs(results: Path) -> str:
    """Time of an event, of a step and of a repair, the size of a file, and the speed of text."""
    records = newest_records(results)
    event, repair = row_of(records, "select", method=OURS), row_of(records, "repair", weights="stories15M")
    step = row_of(records, "train", arm="Pruner + AdamWPrune")
    file = row_of(records, "export", way="file, prunus: save_sparse, load_sparse", dtype="bfloat16", sparsity=0.5)
    half, fifth = (_decoded(records, zeros, 1) for zeros in ("50%", "80%"))
    machine, threads = (each["record"]["environment"]["machine"] for each in (event, repair))
    return "\n".join(
        [
            f"- Finding the masks of {event['record']['settings']['num_weights'] / 1e9:.1f} billion weights takes "
            f"{event['ms']:.0f} ms on an {machine}.",
            f"- A training step of GPT-2 124M with `AdamWPrune` takes {step['ratio']:.3f} of the time of one without "
            "pruning, with PyTorch's fused AdamW, on the same GPU.",
            f"- Repairing stories15M takes {repair['seconds']:.0f} s on a CPU with {threads.split(', ')[-1]}.",
            f"- At 50 %, a pruned weight takes {file['size']:.3f} of its bytes in a file in bfloat16.",
            f"- A model of Llama-3-8B's shape with random weights writes text {half['times_faster']:.2f} times "
            f"faster at 50 % and {fifth['times_faster']:.2f} times at 80 %, in {half['memory']:.2f} and "
            f"{fifth['memory']:.2f} of the GPU's memory, by our compiled decoder, sparse beside dense, on the same "
            "GPU.",
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
    num = len(record[newest]["families"])
    about = f"{len(families)} of {num} families could be built, transformers {newest}"
    return markdown_table([about, "held", "in part", "failed"], lines)


def _reliability(record: Row) -> str:
    kills = record["kills"].values()
    num_kills, differences = (sum(each[key] for each in kills) for key in ("kills", "differences"))
    trials = [("processes killed and begun again: results that differ", num_kills, differences)]
    for name, key in {"flipped bits: tensors read wrong": "flips", "damaged files: failures": "mutations"}.items():
        trials.append((name, record[key]["mutations"], len(record[key]["failures"])))
    trials.append(("hostile files: code that ran", record["payloads"]["opened"], len(record["payloads"]["ran"])))
    lines = [[name, f"{num:,}", f"{happened:,}"] for name, num, happened in trials]
    return markdown_table(["trial: what may not happen", "trials", "happened"], lines)
