"""``prunus prune``: its options, which of them go together, and what they stand for; the work is in prune_work."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .model_options import ModelCommand
from .shared_options import Bits, Flag, given, size_in_bytes

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
    samples: int | None = None  # calibration windows; by default up to 128 for a repair, else up to 32
    include: tuple[str, ...] = ()  # patterns of weights to prune as well
    exclude: tuple[str, ...] = ()  # patterns of weights to leave dense
    only: tuple[str, ...] = ()  # patterns of the weights to prune, and no others
    checkpointing: bool = False  # run blocks again for the backward instead of keeping their activations
    memory: str | None = None  # for activations of the samples, as 4GB; what is beyond goes to a file beside the output
    dry_run: Flag = False  # say what it will take, from a trial on the first block, and stop
    profile: bool = False  # report where time and memory went, and what to change

    @property
    def memory_bytes(self) -> int | None:
        """Of main memory that activations may take."""
        return None if self.memory is None else size_in_bytes(self.memory)

    @property
    def repairs(self) -> bool:
        return self.repair_probe if self.probe != "none" else not self.no_repair

    @property
    def needs_whole(self) -> str | None:
        if self.probe != "none":
            return "--probe"
        if self.score in ("fisher", "path"):
            return f"--score {self.score}"
        return f"--allocate {self.allocate}" if self.allocate in ("fisher", "moments") else super().needs_whole

    @property
    def most_samples(self) -> int:
        return 128 if self.repairs else 32

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

    def check(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), as 0.5 for a half, got {self.sparsity}")
        if self.scope == "2:4" and self.sparsity != 0.5:
            mend = "leave off --sparsity, or take --scope row"
            raise ValueError(f"--scope 2:4 removes half, not {self.sparsity}; {mend}")
        if self.scope == "2:4" and self.probe != "none":
            # 2:4 has one sparsity, so the score alone could not be compared with a probe, which prunes less
            raise ValueError("--scope 2:4 removes half and --probe less than that; leave one off, or take --scope row")
        if self.bits is not None and self.probe != "none":
            raise ValueError(
                f"--bits does not go with --probe; prune, then quantise: prunus export {self.out} --bits {self.bits}"
            )
        if self.memory is not None:
            size_in_bytes(self.memory)
        for flag in given(self, *OF_PROBE) if self.probe == "none" else ():
            raise ValueError(f"without --probe nothing reads {flag}; leave it off")
        for flag in given(self, *OF_REPAIR) if not self.repairs else ():
            raise ValueError(f"without a repair nothing reads {flag}; leave it off")
        if self.allocate != "uniform" and self.chosen_scope != "layer":
            raise ValueError(f"--allocate {self.allocate} spreads the sparsity over layers; take --scope layer")
        if self.allocate in ("fisher", "moments") and self.probe != "none":
            raise ValueError(f"--allocate {self.allocate} does not go with --probe; leave one off")


OF_PROBE = ("tau", "order", "reduction", "zero_gradient", "repair_probe")
OF_REPAIR = ("targets", "damping", "tune")


def run(command: Command) -> None:
    from .model_work import on_all_ranks

    on_all_ranks(command)
