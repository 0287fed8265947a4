"""What ``prunus prune`` prints: the pruned layers, the models compared, where time and memory went, and advice."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from ..files.writer import SavedTensor
from ..oneshot import Layer, QuantizeResult, Result
from ..recovery import Recovery
from ..trained.model import TrainedModel
from .console import print, table_of, wide_console

GIB = 2**30
PARTS = {
    "scores": "input norms or gradients, and the choice of candidates",
    "forwards": "forward passes over the samples, dense and pruned",
    "grams": "Gram matrices of the layers' inputs",
    "factorisations": "inverses of Gram matrices",
    "iterations": "choosing which weights stay",
    "refine": "solving for the weights that stay",
    "bits": "quantising the kept weights",
    "tune": "training to match the dense model's outputs",
    "batch norms": "updating batch-norm statistics",
    "inspection": "finding what can be batched or skipped in this model",
    "records": "the probe: gradients before and after the reduction, and decisions",
    "evaluation": "measuring on held-out data",
    "other": "everything else",
}


@dataclass(frozen=True)
class Profile:
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
    found = []
    if profile.halved:
        times = "once" if profile.halved == 1 else f"{profile.halved} times"
        found.append(f"Memory ran out {times}; --batch {profile.rows} starts with the size that fitted in the end.")
    if profile.rows == 1 and profile.halved:
        recomputes = profile.checkpointing or profile.schedule in ("none", "joint")
        rest = "shorter windows (--length) or --offload frees memory"
        found.append(f"One row per pass is the minimum: {'' if recomputes else '--checkpointing, '}{rest}.")
    if profile.checkpointing and not profile.halved:
        found.append("Checkpointing was not needed: leave it off, or use more rows per pass (--batch).")
    roomy = profile.left_bytes > profile.used_bytes
    if profile.device.startswith("cuda") and profile.rows and roomy and not profile.halved:
        found.append(f"More memory is left than was used: --batch {2 * profile.rows} or more fills the GPU better.")
    elif profile.utilisation is not None and profile.utilisation < 0.7:
        found.append("The GPU waits for the host: longer windows (--length) or more rows per pass (--batch) help.")
    if profile.share("evaluation") > 0.5:
        found.append("Most of the time went into evaluation: fewer --eval-windows cost less.")
    if profile.share("inspection") > 0.25:
        found.append("Inspecting the model took a large share because the rest was short; it is done once.")
    if profile.share("records") > 0.5 and profile.schedule == "sequential":
        found.append("Gradients are recorded for one matrix at a time: --probe block needs far fewer passes, "
                     "and decides slightly differently.")  # fmt: skip
    if profile.share("scores") > 0.5 and profile.schedule == "none":
        found.append("Most time went into passes over the samples: fewer or shorter (--samples, --length) cost less.")
    if profile.device == "cpu":
        threads = torch.get_num_threads()
        found.append(f"Passes ran on {threads} CPU thread{'s' * (threads > 1)}: use --device cuda if there is a GPU.")
    return found or ["Nothing stands out: time and memory go where they should."]


@dataclass(frozen=True)
class Outcome:
    model: TrainedModel
    result: Result
    rows: dict[str, dict[str, float]]  # sparsity and metric of the dense model, the pruned one and the comparison
    score: str | None = None  # None where the solver chose
    profile: Profile | None = None
    recovery: Recovery | None = None
    quantised: QuantizeResult | None = None  # after a recovery

    @property
    def in_bits(self) -> Result:
        return self.quantised or self.result

    @property
    def layers(self) -> list[Layer]:
        if self.quantised is None:
            return self.result.layers
        rounded = {layer.name: layer for layer in self.quantised.layers}
        both = [(layer, rounded[layer.name]) for layer in self.result.layers]
        return [replace(layer, bits=own.bits, bits_error=own.bits_error) for layer, own in both]


def print_result(outcome: Outcome, asked: float, *, is_probed: bool, every_layer: bool) -> None:
    result, console = outcome.result, wide_console()
    is_recovered = outcome.quantised is not None
    table = _kinds(outcome.layers, console.width, is_recovered=is_recovered)
    console.print(_layers(outcome, is_probed=is_probed) if every_layer else table)
    console.print(models_table(outcome.rows, outcome.model.metric))
    if result.sparsity_before:
        print(_zero_already(asked, result))
    print(*result.notes)


def models_table(models: Mapping[str, Mapping[str, float]], metric: str) -> Table:
    rows = [
        ("as it came" if name == "dense" and row["sparsity"] else name, f"{row['sparsity']:.4%}", f"{row[metric]:.4f}")
        for name, row in models.items()
    ]
    return table_of("on held-out data", ("model", "sparsity", metric), rows)


def _zero_already(asked: float, result: Result) -> str:
    said = f"{result.sparsity_before:.4%} of the prunable weights were already zero"
    if result.sparsity_before > asked:
        return f"{said}, more than the {asked:.4%} requested; all of them stay zero"
    if result.sparsity > asked:
        why = "zeros stay zero, and each row, layer or group of --scope is counted by itself"
        return f"{said}; {result.sparsity:.4%} are zero now, not {asked:.4%}: {why}"
    return said


def _errors(layers: Sequence[Layer], *, is_recovered: bool) -> dict[str, str]:
    """Headings of relative errors of the outputs, each with the name of a layer's figure."""
    errors = {}
    if any(layer.error is not None for layer in layers):
        errors = {"error, mask alone": "mask_error", "repaired": "error"}
    if numbers := {layer.bits for layer in layers if layer.bits_error is not None}:
        heading = f"in {numbers.pop()} bits"
        errors[f"{heading} alone" if is_recovered else heading if errors else f"error, {heading}"] = "bits_error"
    return errors


def _kinds(layers: Sequence[Layer], width: int, *, is_recovered: bool = False) -> Table:
    """One row for all layers whose names differ in numbers only."""
    rows, errors = [], _errors(layers, is_recovered=is_recovered)
    for kind, alike in _by_kind(layers).items():
        num_pruned = sum(layer.num_pruned for layer in alike)
        cells = {"layers": kind, "number": str(len(alike)), "weights pruned": f"{num_pruned:,}"}
        rows.append(cells | {"sparsity": _spread(alike)} | _means(alike, errors))
    title = "pruned weights by kind of layer (--every-layer shows each layer)"
    return _fitting_table(title, rows, width, ("worst", "number", "weights pruned", "sparsity", "error, mask alone"))


def quantised_table(result: QuantizeResult, saved: Mapping[str, SavedTensor], width: int) -> Table:
    rows, layers = [], result.layers
    errors = {"error": "bits_error"} if any(layer.bits_error is not None for layer in layers) else {}
    for kind, alike in _by_kind(layers).items():
        tensors = [saved[layer.name] for layer in alike if layer.name in saved]
        before, after = (sum(getattr(one, name) for one in tensors) for name in ("dense_bytes", "stored_bytes"))
        sizes = {
            "bits a weight": f"{8 * after / max(1, sum(one.numel for one in tensors)):.2f}",
            "bytes before": f"{before:,}",
            "after": f"{after:,}",
        }
        cells = {"layers": kind, "number": str(len(alike)), "sparsity": _spread(alike)}
        rows.append(cells | _means(alike, errors) | sizes)
    title = f"weights quantised to {max(layer.bits or 0 for layer in layers)} bits, by kind of layer"
    return _fitting_table(title, rows, width, ("worst", "number", "bytes before", "sparsity"))


def _by_kind(layers: Sequence[Layer]) -> dict[str, list[Layer]]:
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(re.sub(r"\d+", "*", layer.name.removesuffix(".weight")), []).append(layer)
    return kinds


def _spread(layers: Sequence[Layer]) -> str:
    num_pruned, num = sum(layer.num_pruned for layer in layers), sum(layer.num_weights for layer in layers)
    least, most = min(layer.sparsity for layer in layers), max(layer.sparsity for layer in layers)
    return f"{least:.1%} to {most:.1%}" if most - least > 0.0005 else f"{num_pruned / max(1, num):.2%}"


def _means(layers: Sequence[Layer], errors: Mapping[str, str]) -> dict[str, str]:
    """Means of errors over the layers that have them, and the largest of the last kind."""
    cells, values = {}, []
    for heading, name in errors.items():
        values = [value for layer in layers if (value := getattr(layer, name)) is not None]
        cells[heading] = f"{sum(values) / len(values):.4f}" if values else ""
    return cells | ({"worst": f"{max(values):.4f}" if values else ""} if errors else {})


def _fitting_table(title: str, rows: Sequence[Mapping[str, str]], width: int, first_to_go: Sequence[str]) -> Table:
    """A table that cuts no name: a narrow terminal gets fewer columns."""
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) + 3 for name in rows[0]} if rows else {}
    for name in first_to_go:
        if name in wide and sum(wide.values()) >= width:
            del wide[name]
    table = Table(title=title)
    for name in wide:
        table.add_column(name, justify="left" if name == "layers" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in wide))
    return table


def _layers(outcome: Outcome, *, is_probed: bool) -> Table:
    rows, errors = [], _errors(outcome.layers, is_recovered=outcome.quantised is not None)
    for layer in outcome.layers:
        tau = "" if layer.tau is None else f"{layer.tau:.4g}"
        cells = [f"{layer.num_pruned:,}", f"{layer.sparsity:.2%}"]
        if is_probed:
            cells = [f"{layer.num_candidates:,}", *cells, str(layer.num_zero_gradient), str(layer.num_not_finite), tau]
        figures = [getattr(layer, name) for name in errors.values()]
        figures = ["" if error is None else f"{error:.4f}" for error in figures]
        rows.append((layer.name, "x".join(map(str, layer.shape)), *cells, *figures))
    before, after = (["weights proposed"], ["no gradient", "not finite", "tau"]) if is_probed else ([], [])
    headings = ("layer", "shape", *before, "weights pruned", "sparsity", *after, *errors)
    return table_of("pruned weights in each layer", headings, rows)


def print_profile(profile: Profile) -> None:
    headings = ("part", "cost", "meaning")
    wide_console().print(table_of("where time and memory went", headings, table_rows(profile), texts=("meaning",)))
    print(*advice(profile))


def table_rows(profile: Profile) -> list[tuple[str, str, str]]:
    seconds = profile.seconds.items()
    rows = [(part, f"{took:.2f} s ({profile.share(part):.0%})", PARTS[part]) for part, took in seconds]
    rows.append(("memory used", f"{profile.used_bytes / GIB:.2f} GiB", f"at the peak, on {profile.device}"))
    rows.append(("memory left", f"{profile.left_bytes / GIB:.2f} GiB", "at the peak"))
    if profile.rows:
        rows.append(("rows per pass", str(profile.rows), "samples times variants of the weights"))
    if profile.checkpointing:
        rows.append(("checkpointing", "yes", "blocks after the probed one ran again for the backward"))
    if profile.utilisation is not None:
        rows.append(("GPU busy", f"{profile.utilisation:.0%}", "of the time, according to the driver"))
    return rows
