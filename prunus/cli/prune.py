"""``prunus prune``"""

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from .console import print, weights_bar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..lab.trained_model import ModelSource, TrainedModel
    from ..oneshot import Probe, Result
    from ..select import Selector
    from ..sparsity_report import SparsityReport
    from .prune_tables import Outcome, Profile

Scope = Literal["auto", "row", "layer", "global", "2:4"]
Score = Literal["auto", "magnitude", "wanda", "fisher", "path", "random"]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
TokenType = Literal["auto", "uint16", "uint32"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Command:
    """Prune a trained model, repair the weights that stay, and measure the cost on held-out data.

    Block after block, the solver finds which weights stay and what they must be for the outputs to stay. A named score
    gives its mask, which is repaired too. Killed, the same command goes on with the next layers.

    With --experts whole experts go first, those that add least to their tokens; without --sparsity nothing else goes.

    The probe keeps some of what a strategy would prune, so the sparsity ends lower, unless tau is target. Its result
    is compared with the dense model and with the strategy alone at the same sparsity and scope.
    """

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a .gguf file, a checkpoint of prunus, or module:function
    out: Path  # folder to write; it must not exist
    tokens: Path | None = None  # calibration tokens for a Hugging Face folder (.u16, .bin, .u32 or .npy)
    eval_tokens: Path | None = None  # held-out tokens for it; without any the last tenth of what calibrates
    text: Path | None = None  # in place of tokens: text, read by the folder's own tokenizer
    eval_text: Path | None = None  # held-out text
    batches: Path | None = None  # in place of tokens: named arrays (.npz), a row a sample, with labels if there are any
    eval_batches: Path | None = None  # held-out arrays
    token_type: TokenType = "auto"  # of raw token files; auto goes by their names
    start_token: Literal["auto", "yes", "no"] = "auto"  # open every window with it; auto: as the tokenizer does to text
    score: Score = "auto"  # what makes a weight matter; auto leaves it to the repair, and is wanda without one
    scope: Scope = "auto"  # where weights are compared with each other; auto is layer, row for wanda, else global
    sparsity: float | None = None  # fraction of the prunable weights to remove; a half, or none beside --experts
    experts: float | None = None  # fraction of each layer's experts to drop first, as a whole
    # how layers share the sparsity; fisher and moments by gradients, moments by those of the training run
    allocate: Literal["uniform", "depth", "erk", "fisher", "moments"] = "uniform"
    no_repair: Flag = False  # leave the weights that stay as they are
    repair_probe: Flag = False  # repair the masks of a probe too
    targets: Literal["dense", "own"] = "dense"  # reproduce the dense model's outputs, or those of each layer by itself
    tune: Flag = False  # let every block, then the whole model, learn the outputs of the dense one; slow on a CPU
    damping: float | None = None  # how near weights stay to their dense values; by default from the number of tokens
    probe: Literal["none", "sequential", "block", "joint"] = "none"  # schedule of the probe
    tau: str = "1.0"  # allowed increase of the gradient: a number, adaptive, or target
    order: Literal["reverse", "forward"] = "reverse"  # in which weights or blocks are probed
    reduction: float = 0.1  # factor that candidates are multiplied by
    zero_gradient: Literal["prune", "keep"] = "prune"  # what to do with candidates that have no gradient
    calibrate: Literal["tokens", "self"] = "tokens"  # self: on text that the model writes from its start token
    samples: int | None = None  # calibration windows; by default up to 128 for a repair, else 32
    length: int = 0  # tokens per window; 0 takes 256, or the model's longest
    eval_windows: int | None = None  # held-out windows; 0 takes all, by default 32 of tokens and all other samples
    seed: int = 0  # which calibration windows
    include: tuple[str, ...] = ()  # patterns of weights to prune as well
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    batch: int = 0  # rows per pass; 0 takes what memory allows
    gguf_file: str | None = None  # file in the folder to read the weights from
    dtype: Dtype = "auto"  # auto keeps the model's own
    device: str = "cpu"  # cpu or cuda
    checkpointing: bool = False  # run blocks again for the backward instead of keeping their activations
    offload: bool = False  # keep the model in main memory, one block at a time on the device
    layers: Flag = False  # show every weight in the table at the end
    profile: bool = False  # report where time and memory went, and what to change
    plot: Path | None = None  # .svg or .png file for the chart of the layers, which the folder has too
    push: str | None = None  # name on the Hugging Face Hub, as user/model, to upload the folder to
    private: Flag = False  # make that repository private, if it is new


OF_PROBE = ("tau", "order", "reduction", "zero_gradient", "repair_probe")
OF_PRUNING = ("score", "scope", "allocate", "no_repair", "probe", "targets", "damping", "tune", "checkpointing")
OF_REPAIR = ("targets", "damping", "tune")


def run(command: Command) -> None:
    _check_places(command)
    if command.sparsity is None:
        command = replace(command, sparsity=0.5 if command.experts is None or command.scope == "2:4" else 0.0)
    if _is_written(command):  # killed after the result was in its place
        shutil.rmtree(_unfinished(command), ignore_errors=True)
        print(f"{command.out}: was written already")
        _publish(command)
        return
    _check(command)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # those of transformers, between ours
    from .prune_tables import print_profile, print_result

    with _working(command):
        outcome = _pruned(command)
        _write(command, outcome)
    print_result(outcome, command.sparsity or 0.0, is_probed=command.probe != "none", every_layer=command.layers)
    zeros = _report(command, outcome.model.model)
    print(
        f"{zeros.sparsity:.4%} of {zeros.num_prunable:,} prunable weights and {zeros.sparsity_of_all:.4%} of all "
        f"{zeros.num_parameters:,} are zero"
    )
    if outcome.score == "wanda" and command.scope == "global":
        print("One threshold for all layers suits wanda badly: on small GPTs it was far worse than by rows.")
    result = outcome.result
    cost = f"{result.passes:,} passes with gradients and {result.forwards:,} without, of one sample"
    memory = f"at most {result.peak_bytes / 2**30:.2f} GiB of memory"
    print(f"{command.out}: written; {command.model} was pruned in {result.seconds:.1f} s with {memory}, {cost}")
    if outcome.profile is not None:
        print_profile(outcome.profile)
    _publish(command)


def _check_places(command: Command) -> None:
    """Refuse a chart that cannot be written, and a push that will not be possible."""
    if command.plot is not None:
        from ..plot import check_picture

        check_picture(command.plot)
    if command.private and command.push is None:
        raise ValueError("without --push nothing reads --private; leave it off")
    if command.push is not None:
        from ..export.hub import check_push

        check_push(command.push)


def _publish(command: Command) -> None:
    """Write the chart and push the folder, where that was asked for."""
    if command.plot is not None:
        from ..files.json_file import read_json
        from ..plot import layers_chart

        layers_chart(read_json(command.out / "result.json")["layers"]).save(command.plot)
    if command.push is not None:
        from ..export.hub import push

        print(f"{command.out}: pushed to {push(command.out, command.push, private=command.private)}")


def _report(command: Command, model: "nn.Module") -> "SparsityReport":
    from ..eligible import eligible
    from ..sparsity_report import report

    return report(model, eligible(model, command.include, command.exclude))


def _check(command: Command) -> None:
    """Refuse options that make no sense before anything is loaded."""
    if command.out.exists():
        raise ValueError(f"{command.out} is there already; choose another --out")
    above = next(folder for folder in command.out.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{command.out} cannot be written: {above} is no folder that you may write to")
    if command.experts is not None and not 0 < command.experts < 1:
        raise ValueError(f"--experts is a fraction above 0 and below 1, got {command.experts}")
    if command.sparsity is None or not 0 <= command.sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), got {command.sparsity}")
    if command.scope == "2:4" and command.sparsity != 0.5:
        raise ValueError(f"--scope 2:4 removes half, not {command.sparsity}; leave off --sparsity, or take --scope row")
    if command.scope == "2:4" and command.probe != "none":
        # 2:4 has one sparsity, so the strategy alone could not be compared with a probe, which prunes less
        raise ValueError("--scope 2:4 removes half and --probe less than that; leave one off, or take --scope row")
    for option in fields(command):
        value, flag = getattr(command, option.name), f"--{option.name.replace('_', '-')}"
        if not _prunes(command) and option.name in OF_PRUNING and value != option.default:
            raise ValueError(f"--experts alone drops experts, and nothing reads {flag}; give --sparsity too")
        if command.probe == "none" and option.name in OF_PROBE and value != option.default:
            raise ValueError(f"without --probe nothing reads {flag}; leave it off")
        if not _repairs(command) and option.name in OF_REPAIR and value != option.default:
            raise ValueError(f"without a repair nothing reads {flag}; leave it off")
        if option.name in ("length", "eval_windows", "batch") and (value or 0) < 0:
            raise ValueError(f"{flag} must be at least 0, got {value}")
    if command.allocate != "uniform" and _scope(command) != "layer":
        raise ValueError(f"--allocate {command.allocate} spreads the sparsity over layers; take --scope layer")
    if command.allocate in ("fisher", "moments") and command.probe != "none":
        raise ValueError(f"--allocate {command.allocate} does not go with --probe; leave one off")
    from ..ops.machine import device_of

    device_of(command.device)


def _prunes(command: Command) -> bool:
    """Whether more is done than to drop experts."""
    return command.experts is None or bool(command.sparsity)


def _repairs(command: Command) -> bool:
    if not _prunes(command):
        return False
    return command.repair_probe if command.probe != "none" else not command.no_repair


def _scope(command: Command) -> str:
    """The scope that auto stands for."""
    if command.scope != "auto":
        return command.scope
    if _score(command) is None or command.allocate != "uniform":
        return "layer"
    return "row" if _score(command) == "wanda" else "global"


def _score(command: Command) -> str | None:
    """The score that auto stands for; None leaves the choice to the solver."""
    if command.score != "auto":
        return command.score
    if not _prunes(command):
        return None
    return "wanda" if command.probe != "none" or command.no_repair else None


def _pruned(command: Command) -> "Outcome":
    """The model, pruned, compared with the dense one and the strategy alone."""
    import time

    import torch

    from ..lab.gpu import Sampler, utilisation_reader
    from ..lab.trained_model import load_trained
    from ..oneshot import Repair, prune
    from ..oneshot.fewer_experts import fewer_experts
    from ..oneshot.walk import Originals
    from .prune_tables import Outcome

    probe, score, device = _probe(command), _score(command), torch.device(command.device)
    repair = Repair(command.targets, command.damping, tune=command.tune) if _repairs(command) else None
    trained = load_trained(_source(command))
    if trained.note:
        print(trained.note)
    if command.experts is not None:
        fewer_experts(trained.model, command.experts)  # refuses a model without experts before it is evaluated
    common: dict[str, Any] = {"include": command.include, "exclude": command.exclude}
    common |= {"batch_size": command.batch or None, "offload": device if command.offload else None}
    settings: dict[str, Any] = {"score": score, "select": _selector(command), "loss": trained.loss, **common}
    if command.allocate == "moments" and not trained.moments:
        raise ValueError(
            f"--allocate moments reads Adam's second moments, and {command.model} has none: they are in a checkpoint "
            "of prunus that was trained with Adam; take --allocate fisher"
        )
    settings |= {"moments": trained.moments} if command.allocate == "moments" else {}
    settings |= {"checkpointing": command.checkpointing}
    began, measure = time.perf_counter(), _Measure(command, trained, device)
    sampler = Sampler(utilisation_reader(device) if command.profile else None)
    title = f"probe, {command.probe}" if probe else "repair" if repair else "prune"
    with sampler.running(), weights_bar(title) as progress:
        rows = {"dense": measure()}
        dropping = result = None
        if command.experts is not None:
            dropping = result = prune(trained.model, trained.batches, experts=command.experts, progress=False, **common)
            rows["experts dropped"] = measure()
        if result is None or _prunes(command):
            more: dict[str, Any] = {"state": _unfinished(command) if repair and not probe else None}
            more |= {"probe": probe, "repair": repair, "progress": progress}
            result = prune(trained.model, trained.batches, command.sparsity, **settings, **more)
            reached = measure()
            if probe is not None:
                result.undo_()
                alone = prune(trained.model, trained.batches, result.sparsity, repair=None, progress=False, **settings)
                rows[f"{score} alone"] = measure()
                alone.undo_()
                result.apply_()
            if repair is not None:
                with result.masks_alone():
                    rows["masks alone"] = measure()
            rows["repaired" if repair else "probed" if probe else score or ""] = reached
    result.originals = Originals()  # the dense weights, which nothing reads any more
    if dropping is not None and result is not dropping:
        result.experts, result.parts = dropping.experts, dropping.parts | result.parts
        result.seconds, result.forwards = result.seconds + dropping.seconds, result.forwards + dropping.forwards
    outcome = Outcome(trained, result, rows, score)
    if not command.profile:
        return outcome
    seconds = result.parts | measure.clock.seconds
    total = time.perf_counter() - began
    return replace(outcome, profile=_profile(command, result, seconds, total, sampler.mean))


def _unfinished(command: Command) -> Path:
    """The folder for what is done until the result is in its place."""
    return command.out.with_name(f".{command.out.name}.unfinished")


@contextmanager
def _working(command: Command) -> Iterator[None]:
    """Keep other processes out of the folder to work in; folders that were made for it go if they stay empty."""
    from ..files.lock import lock_folder

    folder = _unfinished(command)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with lock_folder(folder):
            yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _is_written(command: Command) -> bool:
    """Whether this command has written its result, and only its folder to work in is left to remove."""
    from ..files.json_file import read_json

    path = command.out / "result.json"
    return _unfinished(command).is_dir() and path.is_file() and read_json(path).get("settings") == _settings(command)


class _Measure:
    """Returns sparsity and metric of the model as it is now; the clock sums up the time that takes."""

    def __init__(self, command: Command, trained: "TrainedModel", device: "torch.device") -> None:
        from ..oneshot.resources import Clock

        self.command, self.trained, self.device, self.clock = command, trained, device, Clock(device)

    def __call__(self) -> dict[str, float]:
        with self.clock.part("evaluation"), self._offloaded():
            zeros = _report(self.command, self.trained.model)
            size = {} if self.command.experts is None else {"parameters": zeros.num_parameters}
            return size | {"sparsity": zeros.sparsity, self.trained.metric: self.trained.evaluate(self.trained.model)}

    def _offloaded(self) -> AbstractContextManager[Any]:
        from contextlib import nullcontext

        from ..eligible import eligible
        from ..oneshot.offload import Offload

        if not self.command.offload:
            return nullcontext()
        weights = eligible(self.trained.model, self.command.include, self.command.exclude).weights
        return Offload(self.trained.model, weights, self.device).open()


def _profile(
    command: Command, result: "Result", parts: dict[str, float], total: float, utilisation: float | None
) -> "Profile":
    import torch

    from ..oneshot.resources import free_bytes
    from .prune_tables import Profile, split

    device = torch.device(command.device)
    left = free_bytes(device)
    if device.type == "cuda":
        left -= result.peak_bytes - torch.cuda.memory_allocated(device)
    state = (result.rows, result.halved, result.peak_bytes, max(0, left))
    return Profile(split(parts, total), *state, command.device, command.probe, utilisation, result.checkpointing)


def _source(command: Command) -> "ModelSource":
    from ..lab.trained_model import ModelSource

    known = {field.name: getattr(command, field.name) for field in fields(ModelSource) if hasattr(command, field.name)}
    if command.samples is None:
        many = _repairs(command) or command.experts is not None
        known |= {"samples": 128, "at_most": True} if many else {"samples": 32}
    return ModelSource(**known)


def _probe(command: Command) -> "Probe | None":
    from ..oneshot import Probe

    if command.probe == "none":
        return None
    try:
        tau: Any = command.tau if command.tau in ("adaptive", "target") else float(command.tau)
    except ValueError:
        raise ValueError(f"tau must be a number, adaptive or target, got {command.tau!r}") from None
    return Probe(tau, command.order, command.probe, command.reduction, command.zero_gradient)


def _selector(command: Command) -> "Selector":
    from ..select import Global, NofM, PerLayer, PerRow

    scopes = {"row": PerRow(), "layer": PerLayer(command.allocate), "global": Global(), "2:4": NofM(2, 4)}
    return scopes[_scope(command)]


def _write(command: Command, outcome: "Outcome") -> None:
    """Write the folder, which appears when it is complete, and remove the one to work in."""
    from ..export.card import CardFacts, write_card
    from ..files.atomic import new_folder
    from ..files.json_file import write_json

    figures = _plain(_figures(command, outcome))
    said = {name: figures[name] for name in ("layers", "rows", "settings")}
    facts = CardFacts(command.out.name, source=command.model, of_prunable=True, repo=command.push, **said)
    with new_folder(command.out, inside=_unfinished(command)) as part:
        outcome.model.save(part)
        write_json(part / "result.json", figures)
        write_card(part, facts)
    shutil.rmtree(_unfinished(command), ignore_errors=True)


def _figures(command: Command, outcome: "Outcome") -> dict[str, Any]:
    from .prune_tables import advice

    result, profile = outcome.result, outcome.profile
    layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in result.layers]
    cost = {"passes": result.passes, "forwards": result.forwards, "seconds": result.seconds}
    found = {
        "settings": _settings(command),
        "rows": outcome.rows,
        "layers": layers,
        "peak_bytes": result.peak_bytes,
    } | cost
    if result.experts is not None:
        found["experts"] = [asdict(layer) for layer in result.experts.layers]
    return found | ({} if profile is None else {"profile": asdict(profile) | {"advice": advice(profile)}})


def _settings(command: Command) -> Any:
    left_out = ("out", "plot", "push", "private")  # where the result goes, not what it is
    return _plain({key: value for key, value in asdict(command).items() if key not in left_out})


def _plain(value: Any) -> Any:
    """The same value in types that JSON has."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
