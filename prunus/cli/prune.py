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

    Block by block, the solver chooses which weights stay and changes them to reproduce the dense model's outputs; a
    score chooses by itself. The result is compared with the dense model and with the score alone at the same sparsity.
    If the command is killed, repeat it: it continues with the next layers.

    A gradient probe keeps some of the weights that the score would prune, so the sparsity is lower, unless tau is
    target.
    """

    name: ClassVar[str] = "prune"

    # ranks weights, to remove the lowest; auto: the repair chooses, wanda with --probe or --no-repair
    score: Score = "auto"
    scope: Scope = "auto"  # weights ranked together; auto: layer if the repair chooses, row for wanda, else global
    sparsity: float = 0.5  # fraction of the prunable weights to remove
    bits: Bits | None = None  # quantise kept weights to this many bits; writes the small form of prunus export
    # how layers share the sparsity; fisher: by gradients, moments: by Adam's moments in a checkpoint
    allocate: Literal["uniform", "depth", "erk", "fisher", "moments"] = "uniform"
    no_repair: Flag = False  # do not change the weights that stay
    repair_probe: Flag = False  # also repair after a probe
    targets: Literal["dense", "own"] = "dense"  # outputs to match: the dense model's, or those of each layer by itself
    damping: float | None = None  # how strongly weights stay near their dense values; default: by number of tokens
    # gradient probe of one matrix after another, block by block, or all at once
    probe: Literal["none", "sequential", "block", "joint"] = "none"
    tau: str = "1.0"  # allowed relative growth of a gradient: a number, adaptive, or target
    order: Literal["reverse", "forward"] = "reverse"  # order in which matrices or blocks are probed
    reduction: float = 0.1  # factor that scales the candidates during the probe
    zero_gradient: Literal["prune", "keep"] = "prune"  # what to do with candidates whose gradient is zero
    samples: int | None = None  # calibration windows; default: up to 128 with repair, else up to 32
    include: tuple[str, ...] = ()  # globs of weight names to prune as well
    exclude: tuple[str, ...] = ()  # globs of weight names to leave dense
    only: tuple[str, ...] = ()  # globs of weight names: prune no others
    checkpointing: bool = False  # recompute blocks in the backward instead of keeping activations
    memory: str | None = None  # main memory for activations, such as 4GB; the rest goes to a file beside --out
    dry_run: Flag = False  # estimate memory and time from a trial on the first block, and stop
    profile: bool = False  # report where time and memory went, and what to change

    @property
    def memory_bytes(self) -> int | None:
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
        if self.scope != "auto":
            return self.scope
        if self.chosen_score is None or self.allocate != "uniform":
            return "layer"
        return "row" if self.chosen_score == "wanda" else "global"

    def check(self) -> None:
        super().check()
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), such as 0.5 for half, got {self.sparsity}")
        if self.scope == "2:4" and self.sparsity != 0.5:
            mend = "leave off --sparsity, or use --scope row"
            raise ValueError(f"--scope 2:4 removes half, not {self.sparsity}; {mend}")
        if self.scope == "2:4" and self.probe != "none":
            # 2:4 has one sparsity, so the score alone could not be compared with a probe, which prunes less
            raise ValueError("--scope 2:4 removes half, --probe less than that; leave one off, or use --scope row")
        if self.bits is not None and self.probe != "none":
            raise ValueError(
                f"--bits does not work with --probe; prune, then quantise: prunus export {self.out} --bits {self.bits}"
            )
        if self.memory is not None:
            size_in_bytes(self.memory)
        for flag in given(self, *OF_PROBE) if self.probe == "none" else ():
            raise ValueError(f"without --probe nothing reads {flag}; leave it off")
        for flag in given(self, *OF_REPAIR) if not self.repairs else ():
            raise ValueError(f"without a repair nothing reads {flag}; leave it off")
        if self.allocate != "uniform" and self.chosen_scope != "layer":
            raise ValueError(f"--allocate {self.allocate} spreads the sparsity over layers; use --scope layer")
        if self.allocate in ("fisher", "moments") and self.probe != "none":
            raise ValueError(f"--allocate {self.allocate} does not work with --probe; leave one off")


OF_PROBE = ("tau", "order", "reduction", "zero_gradient", "repair_probe")
OF_REPAIR = ("targets", "damping", "tune")


def run(command: Command) -> None:
    from .model_work import on_all_ranks

    on_all_ranks(command)
