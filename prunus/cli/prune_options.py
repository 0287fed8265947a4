"""The options of ``prunus prune``: which go together, and what they stand for."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from .shared_options import Flag, StartToken, TokenType, check_new_folder, number_of

if TYPE_CHECKING:
    from ..oneshot import Probe
    from ..select import Selector
    from ..trained.model import ModelSource

Scope = Literal["auto", "row", "layer", "global", "2:4"]
Score = Literal["auto", "magnitude", "wanda", "fisher", "path", "random"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Command:
    """Prune a trained model, repair the weights that stay, and measure the cost on held-out data.

    Block after block, the solver finds which weights stay and what they must be for the outputs to stay. A named score
    gives its mask, which is repaired too. Killed, the same command goes on with the next layers.

    With --experts whole experts go first, those that add least to their tokens; without --sparsity nothing else goes.

    The probe keeps some of what a score would prune, so the sparsity ends lower, unless tau is target. Its result
    is compared with the dense model and with the score alone at the same sparsity and scope.
    """

    model: tyro.conf.Positional[str]  # a Hugging Face folder, a .gguf file, a checkpoint of prunus, or module:function
    out: Path  # folder to write; it must not exist
    tokens: Path | None = None  # calibration tokens for a Hugging Face folder (.u16, .bin, .u32 or .npy)
    eval_tokens: Path | None = None  # held-out tokens for it; without any the last tenth of what calibrates
    text: Path | None = None  # in place of tokens: text file, or folder of them, read by the model's own tokenizer
    eval_text: Path | None = None  # held-out text file, or folder of them
    batches: Path | None = None  # in place of tokens: named arrays (.npz), a row a sample, with labels if there are any
    eval_batches: Path | None = None  # held-out arrays
    token_type: TokenType = "auto"  # of raw token files; auto goes by their names
    start_token: StartToken = "auto"  # open every window with it; auto: as the tokenizer does to text
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
    recover: str | None = None  # then learn from the dense model over so many tokens (20M) of the text or tokens
    damping: float | None = None  # how near weights stay to their dense values; by default from the number of tokens
    probe: Literal["none", "sequential", "block", "joint"] = "none"  # schedule of the probe
    tau: str = "1.0"  # allowed increase of the gradient: a number, adaptive, or target
    order: Literal["reverse", "forward"] = "reverse"  # in which weights or blocks are probed
    reduction: float = 0.1  # factor that candidates are multiplied by
    zero_gradient: Literal["prune", "keep"] = "prune"  # what to do with candidates that have no gradient
    calibrate: Literal["tokens", "self"] = "tokens"  # self: on text that the model writes from its start token
    samples: int | None = None  # calibration windows; by default up to 128 for a repair, else 32
    length: int = 0  # tokens per window; 0 takes 256, or the model's longest
    eval_windows: int | None = None  # held-out windows; 0 takes all, by default 128 of tokens; of a run as in training
    seed: int = 0  # which calibration windows
    include: tuple[str, ...] = ()  # patterns of weights to prune as well
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    only: tuple[str, ...] = ()  # patterns of the weights to prune, and no others
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

    @property
    def prunes(self) -> bool:
        """Whether more is done than to drop experts."""
        return self.experts is None or bool(self.sparsity)

    @property
    def repairs(self) -> bool:
        if not self.prunes:
            return False
        return self.repair_probe if self.probe != "none" else not self.no_repair

    @property
    def chosen_score(self) -> str | None:
        """The score that auto stands for; None leaves the choice to the solver."""
        if self.score != "auto":
            return self.score
        if not self.prunes:
            return None
        return "wanda" if self.probe != "none" or self.no_repair else None

    @property
    def chosen_scope(self) -> str:
        """The scope that auto stands for."""
        if self.scope != "auto":
            return self.scope
        if self.chosen_score is None or self.allocate != "uniform":
            return "layer"
        return "row" if self.chosen_score == "wanda" else "global"

    @property
    def unfinished(self) -> Path:
        """The folder for what is done until the result is in its place."""
        return self.out.with_name(f".{self.out.name}.unfinished")


OF_PROBE = ("tau", "order", "reduction", "zero_gradient", "repair_probe")
OF_PRUNING = ("score", "scope", "allocate", "no_repair", "probe", "targets", "damping", "tune", "checkpointing")
OF_REPAIR = ("targets", "damping", "tune")


def check_places(command: Command) -> None:
    """Refuse a chart that cannot be written, and a push that will not be possible."""
    if command.plot is not None:
        from ..plot import check_picture

        check_picture(command.plot)
    if command.private and command.push is None:
        raise ValueError("without --push nothing reads --private; leave it off")
    if command.push is not None:
        from ..export.hub import check_push

        check_push(command.push)


def check(command: Command) -> None:
    """Refuse options that make no sense before anything is loaded."""
    check_new_folder(command.out)
    if command.experts is not None and not 0 < command.experts < 1:
        raise ValueError(f"--experts is a fraction above 0 and below 1, got {command.experts}")
    if command.sparsity is None or not 0 <= command.sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), as 0.5 for a half, got {command.sparsity}")
    if command.scope == "2:4" and command.sparsity != 0.5:
        raise ValueError(f"--scope 2:4 removes half, not {command.sparsity}; leave off --sparsity, or take --scope row")
    if command.scope == "2:4" and command.probe != "none":
        # 2:4 has one sparsity, so the score alone could not be compared with a probe, which prunes less
        raise ValueError("--scope 2:4 removes half and --probe less than that; leave one off, or take --scope row")
    for option in fields(command):
        value, flag = getattr(command, option.name), f"--{option.name.replace('_', '-')}"
        if not command.prunes and option.name in OF_PRUNING and value != option.default:
            raise ValueError(f"--experts alone drops experts, and nothing reads {flag}; give --sparsity too")
        if command.probe == "none" and option.name in OF_PROBE and value != option.default:
            raise ValueError(f"without --probe nothing reads {flag}; leave it off")
        if not command.repairs and option.name in OF_REPAIR and value != option.default:
            raise ValueError(f"without a repair nothing reads {flag}; leave it off")
        if option.name in ("length", "eval_windows", "batch") and (value or 0) < 0:
            raise ValueError(f"{flag} must be at least 0, got {value}")
    if command.recover is not None:
        check_recovery(command)
    if command.allocate != "uniform" and command.chosen_scope != "layer":
        raise ValueError(f"--allocate {command.allocate} spreads the sparsity over layers; take --scope layer")
    if command.allocate in ("fisher", "moments") and command.probe != "none":
        raise ValueError(f"--allocate {command.allocate} does not go with --probe; leave one off")
    from ..ops.machine import device_of

    device_of(command.device)


def check_recovery(command: Command) -> None:
    number_of(command.recover or "")
    if not command.prunes:
        raise ValueError("--recover learns back what pruning took; give --sparsity too")
    if command.offload:
        raise ValueError("--recover trains the whole model on the device; leave off --offload, and recover by itself")
    if command.calibrate == "self":
        raise ValueError("--recover learns from text; give --text, --tokens or --batches, not --calibrate self")
    if command.experts is not None:
        raise ValueError("--recover and --experts do not go together; drop experts first, then prune and recover")


def source_of(command: Command) -> "ModelSource":
    from ..trained.model import ModelSource

    known = {field.name: getattr(command, field.name) for field in fields(ModelSource) if hasattr(command, field.name)}
    if command.samples is None:
        many = command.repairs or command.experts is not None
        known |= {"samples": 128, "at_most": True} if many else {"samples": 32}
    if command.recover is not None:
        from ..trained.data import TokenCache

        known["cache"] = TokenCache(command.unfinished, number_of(command.recover) * 10 // 9)
    return ModelSource(**known)


def probe_of(command: Command) -> "Probe | None":
    from ..oneshot import Probe

    if command.probe == "none":
        return None
    try:
        tau: Any = command.tau if command.tau in ("adaptive", "target") else float(command.tau)
    except ValueError:
        raise ValueError(f"tau must be a number, adaptive or target, got {command.tau!r}") from None
    return Probe(tau, command.order, command.probe, command.reduction, command.zero_gradient)


def selector_of(command: Command) -> "Selector":
    from ..select import Global, NofM, PerLayer, PerRow

    scopes = {"row": PerRow(), "layer": PerLayer(command.allocate), "global": Global(), "2:4": NofM(2, 4)}
    return scopes[command.chosen_scope]
