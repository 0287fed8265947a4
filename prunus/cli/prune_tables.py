"""What ``prunus prune`` prints: the pruned layers, the models compared, where time and memory went, and advice."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from ..lab.gpu import GIB
from ..oneshot import Layer, Result
from ..recovery import Recovery
from ..trained.model import TrainedModel
from .console import print, wide_console

PARTS = {
    "scores": "input norms or gradients, and the choice of candidates",
    "forwards": "passes over the samples, dense and pruned",
    "grams": "products of the layers' inputs",
    "factorisations": "inverses of Gram matrices",
    "iterations": "which weights stay",
    "refine": "what the weights that stay must be",
    "tune": "blocks tuned to the dense model's outputs",
    "batch norms": "statistics renewed",
    "inspection": "what can be batched and skipped in this model",
    "records": "gradients before and after the reduction, and the decisions",
    "evaluation": "held-out data",
    "other": "everything else",
}

ERRORS = ("error, mask alone", "repaired", "worst")  # of the outputs, relative: means over the layers, and the largest


@dataclass(frozen=True)
class Profile:
    """Seconds by part, and the state of the device."""

    seconds: Mapping[str, float]
    rows: int  # per pass, at the end; 0 where no gradient was read
    halved: int  # how often memory ran out
    used_bytes: int  # at the peak
    left_bytes: int  # free at the peak
    device: str
    schedule: str = "none"
    utilisation: float | None = None  # share of the time in which the GPU was busy
    checkpointing: bool = False  # whether blocks ran again for the backward

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        return self.seconds.get(part, 0.0) / self.total if self.total else 0.0


def split(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds by part in the order of PARTS, with the rest as ``other``."""
    found = {part: parts[part] for part in PARTS if part in parts}
    return found | {"other": max(0.0, total - sum(found.values()))}


def advice(profile: Profile) -> list[str]:
    """What would make the run faster or smaller; at least one sentence."""
    found = []
    if profile.halved:
        times = "once" if profile.halved == 1 else f"{profile.halved} times"
        found.append(f"Memory ran out {times}; --batch {profile.rows} starts with what fitted in the end.")
    if profile.rows == 1 and profile.halved:
        found.append(f"One row per pass is the minimum: {_room(profile)} leave more room.")
    if profile.checkpointing and not profile.halved:
        found.append("Checkpointing was not needed: leave it out, or take more rows per pass (--batch).")
    roomy = profile.left_bytes > profile.used_bytes
    if profile.device.startswith("cuda") and profile.rows and roomy and not profile.halved:
        found.append(f"More memory is left than was used: --batch {2 * profile.rows} or more fills the GPU better.")
    elif profile.utilisation is not None and profile.utilisation < 0.7:
        found.append("The GPU waits for the host: longer windows (--length) or more rows per pass (--batch) help.")
    if profile.share("evaluation") > 0.5:
        found.append("Most of the time went into held-out data: --eval-windows takes fewer of them.")
    if profile.share("inspection") > 0.25:
        found.append("The inspection of the model shows because the rest is short; it is done once.")
    if profile.share("records") > 0.5 and profile.schedule == "sequential":
        found.append("Gradients are recorded for one weight at a time: --probe block takes far fewer passes, "
                     "and decides a little differently.")  # fmt: skip
    if profile.share("scores") > 0.5 and profile.schedule == "none":
        found.append("Most of it is passes over the samples: fewer or shorter ones (--samples, --length) cost less.")
    if profile.device == "cpu":
        threads = torch.get_num_threads()
        found.append(f"The passes ran on {threads} CPU thread{'s' * (threads > 1)}: --device cuda where there is one.")
    return found or ["Nothing stands out: time and memory go where they should."]


def _room(profile: Profile) -> str:
    """Options that leave more memory for activations and were not used."""
    if profile.checkpointing or profile.schedule in ("none", "joint"):
        return "shorter windows (--length) or --offload"
    return "--checkpointing, shorter windows (--length) or --offload"


@dataclass(frozen=True)
class Outcome:
    """A model that was pruned, and the figures."""

    model: TrainedModel
    result: Result
    rows: dict[str, dict[str, float]]  # sparsity and metric of the dense model, the pruned one and the comparison
    score: str | None = None  # None where the solver chose
    profile: Profile | None = None
    recovery: Recovery | None = None


def print_result(outcome: Outcome, asked: float, *, is_probed: bool, every_layer: bool) -> None:
    """One table of the layers and one of the models; ``asked`` is the sparsity asked for."""
    result, rows, metric = outcome.result, outcome.rows, outcome.model.metric
    table = Table(title="on held-out data")
    for heading in ("model", "sparsity", metric):
        table.add_column(heading)
    for name, row in rows.items():
        name = "as it came" if name == "dense" and row["sparsity"] else name
        table.add_row(name, f"{row['sparsity']:.4%}", f"{row[metric]:.4f}")
    console = wide_console()
    console.print(_layers(result, is_probed=is_probed) if every_layer else _kinds(result.layers, console.width))
    console.print(table)
    if result.sparsity_before:
        print(_zero_already(asked, result))
    print(*result.notes)


def _zero_already(asked: float, result: Result) -> str:
    said = f"{result.sparsity_before:.4%} were zero already"
    if result.sparsity_before > asked:
        return f"{said}, more than the {asked:.4%} asked for; none comes back"
    if result.sparsity > asked:
        why = "the count holds for each row, layer or group of the scope, and none of them gets a zero back"
        return f"{said}; {result.sparsity:.4%} are zero now, not {asked:.4%}: {why}"
    return said


def _kinds(layers: Sequence[Layer], width: int) -> Table:
    """One row for all layers whose names differ in numbers only; in a narrow terminal without the last columns."""
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\d+", "*", layer.name.removesuffix(".weight")), []).append(layer)
    is_repaired = any(layer.error is not None for layer in layers)
    table = Table(title="what was pruned, by kind of layer (--every-layer shows every one)")
    headings = ("layers", "number", "weights pruned", "sparsity", *(ERRORS if is_repaired else ()))
    rows = []
    for kind, found in kinds.items():
        num_pruned, num = sum(layer.num_pruned for layer in found), sum(layer.num_weights for layer in found)
        least, most = min(layer.sparsity for layer in found), max(layer.sparsity for layer in found)
        spread = f"{least:.1%} to {most:.1%}" if most - least > 0.0005 else f"{num_pruned / max(1, num):.2%}"
        cells = [kind, str(len(found)), f"{num_pruned:,}", spread]
        errors = [(layer.mask_error, layer.error) for layer in found if layer.error is not None]
        if is_repaired and errors:
            before, after = ([error or 0.0 for error in each] for each in zip(*errors, strict=True))
            cells += [f"{sum(before) / len(before):.4f}", f"{sum(after) / len(after):.4f}", f"{max(after):.4f}"]
        rows.append(dict(zip(headings, cells, strict=False)))
    wide = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) + 3 for name in headings}
    for name in ("worst", "number", "weights pruned"):
        if name in wide and sum(wide.values()) >= width:
            del wide[name]
    for name in wide:
        table.add_column(name, justify="left" if name == "layers" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in wide))
    return table


def _layers(result: Result, *, is_probed: bool) -> Table:
    """One row per layer; columns of the probe are left out without one."""
    table = Table(title="what was pruned in each layer")
    of_probe = ("no gradient", "not finite", "tau") if is_probed else ()
    of_repair = ("error, mask alone", "error") if result.errors else ()
    proposed = ["weights proposed"] if is_probed else []
    headings = ("layer", "shape", *proposed, "weights pruned", "sparsity", *of_probe, *of_repair)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for layer in result.layers:
        shape, tau = "x".join(map(str, layer.shape)), "" if layer.tau is None else f"{layer.tau:.4g}"
        cells = [f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}"]
        if is_probed:
            cells.insert(0, f"{layer.num_candidates:,}")
            cells += [str(layer.num_zero_gradient), str(layer.num_not_finite), tau]
        if result.errors:
            cells += ["" if error is None else f"{error:.4f}" for error in (layer.mask_error, layer.error)]
        table.add_row(layer.name, shape, *cells)
    return table


def print_profile(profile: Profile) -> None:
    """Where time and memory went, and what to change."""
    table = Table(title="where time and memory went")
    for heading in ("what", "how much", "meaning"):
        table.add_column(heading, justify="right" if heading == "how much" else "left")
    for row in table_rows(profile):
        table.add_row(*row)
    wide_console().print(table)
    for line in advice(profile):
        print(line)


def table_rows(profile: Profile) -> list[tuple[str, str, str]]:
    """Rows (what, how much, meaning) of the table."""
    rows = [
        (part, f"{seconds:.2f} s ({profile.share(part):.0%})", PARTS[part]) for part, seconds in profile.seconds.items()
    ]
    rows.append(("memory used", f"{profile.used_bytes / GIB:.2f} GiB", f"at the peak, on {profile.device}"))
    rows.append(("memory left", f"{profile.left_bytes / GIB:.2f} GiB", "at the peak"))
    if profile.rows:
        rows.append(("rows per pass", str(profile.rows), "samples times variants of the weights"))
    if profile.checkpointing:
        rows.append(("checkpointing", "yes", "blocks after the probed one ran again for the backward"))
    if profile.utilisation is not None:
        rows.append(("GPU busy", f"{profile.utilisation:.0%}", "of the time, as the driver says"))
    return rows
