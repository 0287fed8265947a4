"""``compare_compile``: what torch.compile does to a training, by the profile of each arm."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from ..run import Run
from .measure import Window, measure

MIB = 2**20


def compare_compile(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """The profile of each arm, and what compile does, in figures and in words.

    Both arms have the same batch, learning rate and data. Each has a process of its own and an empty cache of
    compiled code, so that start-up and memory are its own.
    """
    arms = {}
    for name in ("eager", "compile"):
        progress(name)
        try:
            arms[name] = in_a_process(replace(run, compile=name == "compile"), window)
        except Exception as error:
            last = (str(error).strip().splitlines() or ["?"])[-1]
            raise ValueError(f"the arm {name} failed: {type(error).__name__}: {last}") from error
    figures = compared(arms["eager"], arms["compile"])
    return {"says": sentences(figures), "figures": figures, "arms": arms}


def in_a_process(run: Run, window: Window) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, run, window, cache).result()


def _measure(run: Run, window: Window, cache: str) -> dict[str, Any]:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    return measure(run, window).to_json()


def compared(eager: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    gain = eager["seconds"] - compiled["seconds"]
    peaks = [sum(arm["memory"]["peak"].values()) for arm in (eager, compiled)]
    startups = [sum(arm["startup"].values()) for arm in (eager, compiled)]
    return {
        "seconds": [eager["seconds"], compiled["seconds"]],
        "speed_up": eager["seconds"] / compiled["seconds"],
        "peak_bytes": peaks,
        "peak_ratio": peaks[1] / peaks[0],
        "startup_seconds": startups,
        "pays_after_steps": (startups[1] - startups[0]) / gain if gain > 0 else None,
        "loss": [eager["loss"], compiled["loss"]],
        **compiled["compiled"],
    }


def sentences(figures: dict[str, Any]) -> list[str]:
    steps = figures["pays_after_steps"]
    pays = "it never pays for that" if steps is None else f"it pays for that after {max(0, steps):,.0f} steps"
    eager_ms, compiled_ms = (f"{1e3 * seconds:.2f} ms" for seconds in figures["seconds"])
    losses = figures["loss"]
    before, after = (f"{num_bytes / MIB:,.1f} MiB" for num_bytes in figures["peak_bytes"])
    cold, compiling = (f"{seconds:.1f} s" for seconds in figures["startup_seconds"])
    return [
        f"Throughput: {figures['speed_up']:.2f} times that of eager ({eager_ms} a step, compiled {compiled_ms}).",
        f"Peak memory: {figures['peak_ratio']:.2f} times ({before}, compiled {after}).",
        f"Start-up: {cold}, compiled {compiling} with an empty cache; {pays}.",
        f"Compiled: {compile_words(figures)}.",
        "Batch, learning rate and data are equal; losses after the same steps: {:.5f} and {:.5f}.".format(*losses),
    ]


def compile_words(counts: dict[str, Any]) -> str:
    """``1 graph, 0 graph breaks, unknown recompiles``."""
    words = {name: counts[name] for name in ("graphs", "graph_breaks", "recompiles")}
    return ", ".join(
        f"{'unknown' if num is None else num} {name.replace('_', ' ').removesuffix('s' * (num == 1))}"
        for name, num in words.items()
    )
