"""A section of ``docs/results.md`` from the ``compile.json`` that ``prunus profile --compare compile`` wrote."""

import json
from pathlib import Path
from typing import Any

from ..markdown import table, where
from .compare import MIB

ROWS = {
    "ms a step": lambda arm: f"{1e3 * arm['seconds']:.2f}",
    "tokens a second": lambda arm: f"{arm['tokens_a_second']:,.0f}" if arm["tokens_a_second"] else "",
    "peak memory, MiB": lambda arm: f"{sum(arm['memory']['peak'].values()) / MIB:,.0f}",
    "of it activations": lambda arm: f"{arm['memory']['peak']['activations'] / MIB:,.0f}",
    "memory between steps, MiB": lambda arm: f"{sum(arm['memory']['steady'].values()) / MIB:,.0f}",
    "start-up, s": lambda arm: f"{sum(arm['startup'].values()):.1f}",
    "GPU at work": lambda arm: "" if arm["busy"] is None else f"{arm['busy']:.1%}",
    "loss after the same steps": lambda arm: f"{arm['loss']:.5f}",
}


def compile_section(folder: Path) -> str:
    """What torch.compile does to one training, eager beside compiled."""
    path, notes = folder / "compile.json", folder / "notes.md"
    try:
        found = json.loads(path.read_text())
        eager, compiled, says = found["arms"]["eager"], found["arms"]["compile"], found["says"]
        rows = [(name, write(eager), write(compiled)) for name, write in ROWS.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what prunus profile --compare compile writes: {error!r}") from error
    parts = [
        f"## {folder.name}",
        _origin(eager),
        *([notes.read_text().strip()] if notes.is_file() else []),
        table(("", "eager", "torch.compile"), rows),
        " ".join(says),
    ]
    return "\n\n".join(parts) + "\n"


def _origin(arm: dict[str, Any]) -> str:
    run, environment = arm["run"], arm["environment"]
    window = f" of {run['context']} tokens" if arm["tokens_a_second"] else ""
    return (
        f"{where(environment)}; commit {environment['commit']}; "
        f"`prunus profile --compare compile`: {run['model']}, batch {run['batch']}{window}, {run['precision']}, "
        f"{_pruning(run)}, each arm in a process of its own."
    )


def _pruning(run: dict[str, Any]) -> str:
    return "dense" if run["score"] == "none" else f"{run['score']} to {run['sparsity']:.0%}"
