"""Run and study folders as trainings leave them, made without training: the numbers are a function of the names."""

import json
import math
import random
from pathlib import Path

from prunus.lab.run import Run

LAYERS = {f"blocks.{i}.{part}.weight": 4096 for i in range(4) for part in ("attention.qkv", "attention.out", "mlp.up")}
GAIN = {"dense": -4.0, "bitter7": -1.6, "bitter3": -0.3, "random": 9.0}  # perplexity against magnitude at 80 %


def make_run(folder: Path, arm: str = "bitter7", sparsity: float = 0.5, seed: int = 0, **changes: object) -> Path:
    """A finished run of 200 steps; returns its folder."""
    score = {"dense": "none"}.get(arm, arm if arm in ("magnitude", "random", "bitter3") else "bitter7")
    run = Run(**{"score": score, "sparsity": sparsity, "seed": seed, "steps": 200, "out": folder} | changes)
    final = 60 + GAIN.get(arm, 0.0) * (sparsity / 0.8 if arm != "dense" else 1) + 10 * sparsity + 0.7 * seed
    folder.mkdir(parents=True)
    environment = {"machine": "a machine", "python": "3.11", "versions": {"torch": "2.13"}, "command": ["train"]}
    _write(folder / "run.json", {"run": run.to_json(), "environment": environment})
    lines = list(_lines(run, final, random.Random(f"{arm} {sparsity} {seed}")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write(folder / "result.json", _result(run, lines[-1]["eval"]))
    return folder


def _lines(run: Run, final: float, noise: random.Random):
    if run.score != "none":
        yield {"step": 0, "layers": LAYERS}
    for step in range(10, 201, 10):
        share = 0.0 if run.score == "none" else run.sparsity * min(1.0, step / 170)
        if run.score != "none":
            event = {"step": step, "sparsity": share, "seconds": 0.01, "newly_pruned": 1}
            yield {"step": step, "event": event}
        loss = math.log(final) + 3 * math.exp(-step / 40) + noise.gauss(0, 0.02)
        line = {"step": step, "loss": loss, "lr": 1e-3, "examples": step * run.batch}
        if step % 20 == 0:
            held = math.log(final) + 3 * math.exp(-step / 30)
            quality = {"loss": held, "accuracy": 0.5, "perplexity": math.exp(held)}
            zeros = [round(4096 * min(1.0, share * (0.8 + 0.4 * i / 11))) for i in range(len(LAYERS))]
            line |= {"sparsity": share, "zeros": zeros, "eval": quality}
        yield line


def _result(run: Run, quality: dict) -> dict:
    return quality | {
        "steps": 200,
        "tokens": 200 * run.batch * run.context,
        "sparsity": 0.0 if run.score == "none" else run.sparsity,
        "num_parameters": 834304,
        "seconds": 20.0 + run.seed + (run.score != "none"),
        "budget_scale": 1.0,
        "peak_memory": (450 + run.seed) * 2**20,
    }


def stopped(folder: Path, share: float, failure: str = "") -> Path:
    """The run as it lies at a ``share`` of its lines: it goes on, or failed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(True)
    (folder / "metrics.jsonl").write_text("".join(lines[: round(share * len(lines))]))
    for name in ("result.json", "cell.json"):
        (folder / name).unlink(missing_ok=True)
    if failure:
        _write(folder / "failed.json", {"message": failure, "session": "1", "when": "today"})
    return folder


def make_study(folder: Path, arms: list[str], sparsities: tuple[float, ...] = (0.5, 0.8), seeds: int = 3) -> Path:
    """A finished study whose verdicts follow from its runs by a fixed interval."""
    folder.mkdir(parents=True)
    cells = [(arm, 0.0 if arm == "dense" else s, seed) for arm in arms for s in sparsities for seed in range(seeds)]
    for arm, sparsity, seed in dict.fromkeys(cells):
        path = make_run(folder / "runs" / f"{arm.replace(' ', '-')}-{sparsity:g}-s{seed}", arm, sparsity, seed)
        _write(path / "cell.json", {"arm": arm, "sparsity": sparsity, "seed": seed, "cold": seed == 0, "peak_mib": 451})
    base = Run(steps=200).to_json()
    described = [{"name": arm, "changes": {"score": arm}, "against": "magnitude", "cells": []} for arm in arms]
    plan = {"format": "prunus-study-1", "hash": "abc123", "base": base, "data": {}, "arms": described}
    plan["environment"] = {"machine": "a machine"}
    _write(folder / "study.json", plan)
    rows = [_row(folder, arm, s, seeds) for s in (0.0, *sparsities) for arm in arms if (arm == "dense") == (s == 0)]
    result = {"rows": rows, "failed": [], "off_target": [], "num_runs": len(cells), "num_finished": len(cells)}
    _write(folder / "study_result.json", result)
    return folder


def recovery_values(metric: str = "perplexity", **changes: object) -> dict:
    """What a recovery of 360 steps writes: a curve of six points of which the last but one is the best."""

    def figures(distance: float) -> dict:
        loss = {"kl": None}.get(metric, math.log(55 + 50 * distance))
        return {"kl": distance, "loss": loss, "accuracy": 0.9 - distance if metric == "accuracy" else None}

    steps, distances = [0, 120, 180, 240, 300, 360], [0.125, 0.0625, 0.05, 0.04, 0.03, 0.031]
    measured = zip(steps, map(figures, distances), strict=True)
    curve = [{"step": step, "tokens": 512 * step} | one for step, one in measured]
    values = {"before": figures(0.125), "after": figures(0.03), "teacher": figures(0.0), "curve": curve}
    values |= {"lr": 0.002, "lr_reason": "the best of 3 trials of 20 steps (0.001: 0.07, 0.002: 0.06)"}
    values |= {"best_step": 300, "steps": 360, "tokens": 512 * 360, "seconds": 47.25, "num_zeros": 40_632_320}
    settings = {"model": "pruned", "teacher": "path/to/dense", "budget": "184k", "lr": None, "train": ["*.weight"]}
    return values | {"notes": ["Logits are whole."], "settings": settings} | changes


def make_recovery(folder: Path, metric: str = "perplexity", **changes: object) -> Path:
    folder.mkdir(parents=True)
    _write(folder / "recovery.json", recovery_values(metric, **changes))
    return folder


def _row(folder: Path, arm: str, sparsity: float, seeds: int) -> dict:
    values = [_perplexity(folder, arm, sparsity, seed) for seed in range(seeds)]
    mean = sum(values) / seeds
    row = {"arm": arm, "sparsity": sparsity, "values": values, "mean": mean, "sd": 0.7, "budget_scale": 1.0}
    if arm in ("dense", "magnitude"):
        return row | {"against": None, "difference": None, "verdict": "", "overlap": None if arm == "dense" else 1.0}
    difference = mean - sum(_perplexity(folder, "magnitude", sparsity, seed) for seed in range(seeds)) / seeds
    word = "better" if difference < 0 else "worse"
    said = f"{word} by {abs(difference):.2f} ± 0.50 ({seeds} seeds)"
    if abs(difference) < 0.5:
        said = f"no difference seen with {seeds} seeds: {difference:+.2f} ± 0.50"
    paired = {"mean": difference, "half_width": 0.5, "num_seeds": seeds}
    overlap = sparsity / (2 - sparsity) if arm == "random" else 0.7
    cost = {"mean": mean - sum(_perplexity(folder, "dense", 0.0, seed) for seed in range(seeds)) / seeds}
    return row | {"against": "magnitude", "difference": paired, "verdict": said, "overlap": overlap, "cost": cost}


def _perplexity(folder: Path, arm: str, sparsity: float, seed: int) -> float:
    path = folder / "runs" / f"{arm.replace(' ', '-')}-{sparsity:g}-s{seed}" / "result.json"
    return json.loads(path.read_text())["perplexity"]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
