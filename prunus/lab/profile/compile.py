"""Eager against torch.compile: two fresh processes, equal in everything but that."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..run import Run
from .measure import Compiled, Window, measure

ARMS = {"eager": False, "compile": True}
MIB = 2**20


def compare_compile(run: Run, window: Window, progress: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """The profile of each arm, and what compile does, in figures and in words.

    Both arms have the same batch, learning rate and data. Each has a process of its own and an empty cache of
    compiled code, so that start-up and memory are its own.
    """
    arms = {}
    for name, is_compiled in ARMS.items():
        progress(name)
        arms[name] = _in_a_process(replace(run, compile=is_compiled), window)
    figures = compared(arms["eager"], arms["compile"])
    return {"says": sentences(figures), "figures": figures, "arms": arms}


def _in_a_process(run: Run, window: Window) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        given = json.dumps({"run": run.to_json(), "window": asdict(window), "command": sys.argv[1:]})
        command = [sys.executable, "-m", "prunus.lab.profile.compile", str(out)]
        cache = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(command, input=given, text=True, capture_output=True, env=os.environ | cache, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ValueError(f"the arm {'compile' if run.compile else 'eager'} failed: {lines[-1] if lines else '?'}")
        return json.loads(out.read_text())


def compared(eager: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """Figures of both arms, and the second over the first."""
    saved = eager["seconds"] - compiled["seconds"]
    peaks = [sum(arm["memory"]["peak"].values()) for arm in (eager, compiled)]
    startups = [sum(arm["startup"].values()) for arm in (eager, compiled)]
    return {
        "seconds": [eager["seconds"], compiled["seconds"]],
        "speed_up": eager["seconds"] / compiled["seconds"],
        "peak_bytes": peaks,
        "peak_ratio": peaks[1] / peaks[0],
        "startup_seconds": startups,
        "pays_after_steps": (startups[1] - startups[0]) / saved if saved > 0 else None,
        "loss": [eager["loss"], compiled["loss"]],
        **compiled["compiled"],
    }


def sentences(figures: dict[str, Any]) -> list[str]:
    """What compile does, one sentence a figure."""
    slow, fast = (1e3 * seconds for seconds in figures["seconds"])
    before, after = (num_bytes / MIB for num_bytes in figures["peak_bytes"])
    cold, compiling = figures["startup_seconds"]
    steps = figures["pays_after_steps"]
    pays = "it never pays for that" if steps is None else f"it pays for that after {max(0, steps):,.0f} steps"
    losses = "{:.5f} and {:.5f}".format(*figures["loss"])
    return [
        f"Throughput: {figures['speed_up']:.2f} times that of eager ({slow:.2f} ms a step, compiled {fast:.2f} ms).",
        f"Peak memory: {figures['peak_ratio']:.2f} times ({before:,.1f} MiB, compiled {after:,.1f} MiB).",
        f"Start-up: {cold:.1f} s, compiled {compiling:.1f} s with an empty cache; {pays}.",
        f"Compiled: {Compiled(figures['graphs'], figures['graph_breaks'], figures['recompiles'])}.",
        f"Batch, learning rate and data are equal; the losses after the same steps are {losses}.",
    ]


def main() -> None:
    """One arm: run and window come in as JSON, the profile goes to the file named."""
    given = json.loads(sys.stdin.read())
    found = measure(Run.from_json(given["run"]), Window(**given["window"])).to_json()
    found["environment"]["command"] = given["command"]  # what a person typed
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
