"""``prunus prune``"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    import torch

    from ..lab.prune_profile import Profile
    from ..lab.subject import Request
    from ..oneshot import Probe, Result
    from ..select import Selector

Scope = Literal["auto", "row", "layer", "global", "2:4"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Command:
    """Prune a trained model in one shot, with or without the gradient probe, and say what that cost on held-out data.

    The probe keeps some of what the strategy would prune, so the sparsity ends lower, unless tau is target. Beside the
    result stand the dense model and the strategy alone at the same sparsity and scope.
    """

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a checkpoint of prunus, or module:function
    out: Path  # folder to write; it must not exist
    tokens: Path | None = None  # calibration tokens (uint16, .u16 or .bin) for a Hugging Face folder
    eval_tokens: Path | None = None  # held-out tokens for it
    score: Literal["magnitude", "wanda", "fisher", "path", "random"] = "wanda"  # what makes a weight matter
    scope: Scope = "auto"  # within what weights are compared; auto is row for wanda, else global
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    probe: Literal["none", "sequential", "block", "joint", "jacobi"] = "none"  # schedule of the probe
    tau: str = "1.0"  # increase of the gradient allowed: a number, adaptive, or target
    order: Literal["reverse", "forward", "size"] = "reverse"  # in which weights or blocks are probed
    reduction: float = 0.1  # what candidates are reduced to
    zero_gradient: Literal["prune", "keep"] = "prune"  # candidates without any gradient
    samples: int = 32  # calibration windows
    length: int = 0  # tokens a window; 0 takes 256, or the model's longest
    eval_windows: int = 0  # held-out windows; 0 takes all
    seed: int = 0  # which calibration windows
    include: tuple[str, ...] = ()  # patterns of weights to prune that are not by default
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    batch: int = 0  # rows a pass; 0 finds what memory allows
    gguf_file: str | None = None  # file in the folder to read the weights from
    dtype: Dtype = "auto"  # auto keeps the model's own
    device: str = "cpu"  # cpu or cuda
    checkpointing: bool = False  # run blocks again for the backward instead of keeping what they computed
    offload: bool = False  # keep the model in main memory, one block at a time on the device
    profile: bool = False  # say where time and memory went, and what to change


def run(command: Command) -> None:
    if command.out.exists():
        raise ValueError(f"{command.out} is there already; choose another --out")
    if not 0 <= command.sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), got {command.sparsity}")
    if command.scope == "2:4":
        _check_two_of_four(command)
    _check_read(command)
    _check_numbers(command)
    _check_device(command.device)
    from .prune_tables import print_profile, print_result

    outcome = _pruned(command)
    _write(command, outcome)
    print_result(command, outcome)
    if outcome.profile is not None:
        print_profile(outcome.profile)


def _check_two_of_four(command: Command) -> None:
    """Of 2:4 there is one sparsity, so that no strategy alone could stand beside a probe, which leaves less."""
    if command.sparsity != 0.5:
        raise ValueError(f"--scope 2:4 removes half, not {command.sparsity}; leave off --sparsity, or take --scope row")
    if command.probe != "none":
        raise ValueError("--scope 2:4 removes half and --probe less than that; leave one off, or take --scope row")


def _check_read(command: Command) -> None:
    """Refuse an option of the probe where there is none."""
    if command.probe == "none":
        for option in fields(command):
            if option.name in OF_PROBE and getattr(command, option.name) != option.default:
                raise ValueError(f"without --probe nothing reads --{option.name.replace('_', '-')}; leave it off")


def _check_numbers(command: Command) -> None:
    for name in ("length", "eval_windows", "batch"):
        if getattr(command, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(command, name)}")


def _check_device(name: str) -> None:
    from ..ops.machine import device_of

    device_of(name)


OF_PROBE = ("tau", "order", "reduction", "zero_gradient")


@dataclass(frozen=True)
class Outcome:
    """What was done to the subject, and the figures."""

    subject: Any
    result: "Result"
    rows: dict[str, dict[str, float]]  # sparsity and metric by name of the model
    profile: "Profile | None" = None


def _pruned(command: Command) -> Outcome:
    """The subject, pruned, beside the dense model and the strategy alone."""
    import time

    import torch

    from ..lab.prune_profile import Sampler, utilisation_reader
    from ..lab.subject import subject_of
    from ..oneshot import prune

    probe, select, device = _probe(command), _selector(command.scope), torch.device(command.device)
    subject = subject_of(_request(command))
    settings: dict[str, Any] = {"score": command.score, "select": select, "loss": subject.loss}
    settings |= {"include": command.include, "exclude": command.exclude, "batch_size": command.batch or None}
    settings |= {"offload": device if command.offload else None, "checkpointing": command.checkpointing}
    began, measured = time.perf_counter(), _Measured(command, subject, device)
    sampler = Sampler(utilisation_reader(device) if command.profile else None)
    with sampler.running(), _bar(command.probe) as progress:
        rows = {"dense": measured()}
        result = prune(subject.model, subject.batches, command.sparsity, probe=probe, progress=progress, **settings)
        reached = measured()
        if probe is not None:
            result.undo_()
            alone = prune(subject.model, subject.batches, result.sparsity, **settings)
            rows[f"{command.score} alone"] = measured()
            alone.undo_()
            result.apply_()
    rows["probed" if probe else command.score] = reached
    if not command.profile:
        return Outcome(subject, result, rows)
    seconds = result.parts | {"evaluation": measured.seconds}
    return Outcome(subject, result, rows, _profile(command, result, seconds, time.perf_counter() - began, sampler.mean))


class _Measured:
    """The metric of the subject as it is, beside its zeros; ``seconds`` is what that took in all."""

    def __init__(self, command: Command, subject: Any, device: "torch.device") -> None:
        from ..eligible import eligible
        from ..oneshot.clock import Clock

        self.command, self.subject, self.device, self.clock = command, subject, device, Clock(device)
        self.eligible = eligible(subject.model, command.include, command.exclude)

    def __call__(self) -> dict[str, float]:
        from ..summary import report

        with self.clock.part("evaluation"), self._placed():
            zeros = report(self.subject.model, self.eligible).sparsity
            return {"sparsity": zeros, self.subject.metric: self.subject.evaluate(self.subject.model)}

    def _placed(self) -> Any:
        from contextlib import nullcontext

        from ..oneshot.offload import Offload

        if not self.command.offload:
            return nullcontext()
        return Offload(self.subject.model, self.eligible.weights, self.device).open()

    @property
    def seconds(self) -> float:
        return self.clock.seconds.get("evaluation", 0.0)


def _profile(
    command: Command, result: "Result", parts: dict[str, float], total: float, utilisation: float | None
) -> "Profile":
    import torch

    from ..lab.prune_profile import Profile, split
    from ..oneshot.memory import free_bytes

    device = torch.device(command.device)
    left = free_bytes(device)
    if device.type == "cuda":
        left -= result.peak_bytes - torch.cuda.memory_allocated(device)
    state = (result.rows, result.halved, result.peak_bytes, max(0, left))
    return Profile(split(parts, total), *state, command.device, command.probe, utilisation, result.checkpointing)


def _request(command: Command) -> "Request":
    from ..lab.subject import Request

    return Request(
        command.model,
        command.tokens,
        command.eval_tokens,
        command.samples,
        command.length,
        command.eval_windows,
        command.seed,
        command.gguf_file,
        command.dtype,
        command.device,
        command.offload,
    )


def _probe(command: Command) -> "Probe | None":
    from ..oneshot import Probe

    if command.probe == "none":
        return None
    try:
        tau: Any = command.tau if command.tau in ("adaptive", "target") else float(command.tau)
    except ValueError:
        raise ValueError(f"tau must be a number, adaptive or target, got {command.tau!r}") from None
    return Probe(tau, command.order, command.probe, command.reduction, command.zero_gradient)


def _selector(scope: str) -> "Selector | None":
    from ..select import Global, NofM, PerLayer, PerRow

    return {"auto": None, "row": PerRow(), "layer": PerLayer(), "global": Global(), "2:4": NofM(2, 4)}[scope]


def _bar(title: str) -> Any:
    from .progress import weights_bar

    return weights_bar("prune" if title == "none" else f"probe, {title}")


def _write(command: Command, outcome: Outcome) -> None:
    """The folder, whole or not at all."""
    import shutil

    from ..files.json_file import write_json

    part = command.out.with_name(command.out.name + ".part")
    part.mkdir(parents=True)
    try:
        outcome.subject.save(part)
        write_json(part / "result.json", _plain(_figures(command, outcome)))
        part.rename(command.out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _figures(command: Command, outcome: Outcome) -> dict[str, Any]:
    from ..lab.prune_profile import advice

    result, profile = outcome.result, outcome.profile
    settings = {key: value for key, value in asdict(command).items() if key != "out"}
    layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in result.layers]
    cost = {"passes": result.passes, "forwards": result.forwards, "seconds": result.seconds}
    found = {"settings": settings, "rows": outcome.rows, "layers": layers, "peak_bytes": result.peak_bytes} | cost
    return found | ({} if profile is None else {"profile": asdict(profile) | {"advice": advice(profile)}})


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
