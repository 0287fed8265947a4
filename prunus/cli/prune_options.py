"""The options of ``prunus prune``: which go together, and what they stand for."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .model_options import ModelCommand, check_model_options
from .shared_options import Bits, Flag

if TYPE_CHECKING:
    from ..oneshot import Probe
    from ..select import Selector

Scope = Literal["auto", "row", "layer", "global", "2:4"]
Score = Literal["auto", "magnitude", "wanda", "fisher", "path", "random"]


@dataclass(frozen=True, kw_only=True)
class Command(ModelCommand):
    """Prune a trained model, repair the weights that stay, and measure the cost on held-out data.

    Block after block, the solver finds which weights stay and what they must be for the outputs to stay. A named score
    gives its mask, which is repaired too. Killed, the same command goes on with the next layers.

    The probe keeps some of what a score would prune, so the sparsity ends lower, unless tau is target. Its result
    is compared with the dense model and with the score alone at the same sparsity and scope.
    """

    name: ClassVar[str] = "prune"

    score: Score = "auto"  # what makes a weight matter; auto leaves it to the repair, and is wanda without one
    scope: Scope = "auto"  # where weights are compared with each other; auto is layer, row for wanda, else global
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    bits: Bits | None = None  # of each kept weight, which is rounded to so many: the folder is in the small form
    # how layers share the sparsity; fisher and moments by gradients, moments by those of the training run
    allocate: Literal["uniform", "depth", "erk", "fisher", "moments"] = "uniform"
    no_repair: Flag = False  # leave the weights that stay as they are
    repair_probe: Flag = False  # repair the masks of a probe too
    targets: Literal["dense", "own"] = "dense"  # reproduce the dense model's outputs, or those of each layer by itself
    damping: float | None = None  # how near weights stay to their dense values; by default from the number of tokens
    probe: Literal["none", "sequential", "block", "joint"] = "none"  # schedule of the probe
    tau: str = "1.0"  # allowed increase of the gradient: a number, adaptive, or target
    order: Literal["reverse", "forward"] = "reverse"  # in which weights or blocks are probed
    reduction: float = 0.1  # factor that candidates are multiplied by
    zero_gradient: Literal["prune", "keep"] = "prune"  # what to do with candidates that have no gradient
    samples: int | None = None  # calibration windows; by default up to 128 for a repair, else 32
    include: tuple[str, ...] = ()  # patterns of weights to prune as well
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    only: tuple[str, ...] = ()  # patterns of the weights to prune, and no others
    checkpointing: bool = False  # run blocks again for the backward instead of keeping their activations
    profile: bool = False  # report where time and memory went, and what to change

    @property
    def repairs(self) -> bool:
        return self.repair_probe if self.probe != "none" else not self.no_repair

    @property
    def num_samples(self) -> dict[str, Any]:
        if self.samples is not None:
            return {"samples": self.samples}
        return {"samples": 128, "at_most": True} if self.repairs else {"samples": 32}

    @property
    def chosen_score(self) -> str | None:
        """The score that auto stands for; None leaves the choice to the solver."""
        if self.score != "auto":
            return self.score
        return "wanda" if self.probe != "none" or self.no_repair else None

    @property
    def chosen_scope(self) -> str:
        """The scope that auto stands for."""
        if self.scope != "auto":
            return self.scope
        if self.chosen_score is None or self.allocate != "uniform":
            return "layer"
        return "row" if self.chosen_score == "wanda" else "global"


OF_PROBE = ("tau", "order", "reduction", "zero_gradient", "repair_probe")
OF_REPAIR = ("targets", "damping", "tune")


def check(command: Command) -> None:
    """Refuse options that make no sense before anything is loaded."""
    if not 0 <= command.sparsity < 1:
        raise ValueError(f"sparsity must lie in [0, 1), as 0.5 for a half, got {command.sparsity}")
    if command.scope == "2:4" and command.sparsity != 0.5:
        raise ValueError(f"--scope 2:4 removes half, not {command.sparsity}; leave off --sparsity, or take --scope row")
    if command.scope == "2:4" and command.probe != "none":
        # 2:4 has one sparsity, so the score alone could not be compared with a probe, which prunes less
        raise ValueError("--scope 2:4 removes half and --probe less than that; leave one off, or take --scope row")
    if command.bits is not None and command.probe != "none":
        raise ValueError(
            f"--bits does not go with --probe; prune, then quantise: prunus export {command.out} --bits {command.bits}"
        )
    for option in fields(command):
        value, flag = getattr(command, option.name), f"--{option.name.replace('_', '-')}"
        if command.probe == "none" and option.name in OF_PROBE and value != option.default:
            raise ValueError(f"without --probe nothing reads {flag}; leave it off")
        if not command.repairs and option.name in OF_REPAIR and value != option.default:
            raise ValueError(f"without a repair nothing reads {flag}; leave it off")
    if command.allocate != "uniform" and command.chosen_scope != "layer":
        raise ValueError(f"--allocate {command.allocate} spreads the sparsity over layers; take --scope layer")
    if command.allocate in ("fisher", "moments") and command.probe != "none":
        raise ValueError(f"--allocate {command.allocate} does not go with --probe; leave one off")
    check_model_options(command)


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
