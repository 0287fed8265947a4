"""Studies by name; the user says where the data is. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..run import Run
from .arms import Arm, parse_arm, score_arm

PresetName = Literal["gpt2-variants", "schedules", "eps", "beta2", "lenet-mnist", "resnet-cifar10", "compile"]


@dataclass(frozen=True)
class Preset:
    base: Run
    arms: tuple[Arm, ...]
    sparsities: tuple[float, ...]
    reads: str = "a file of tokens, and --validation its held-out file"  # what --data is


RAMP: dict[str, Any] = {"min_lr": 0.1, "schedule": "linear", "begin": 0.1, "end": 0.85}
FAST: dict[str, Any] = {"precision": "bfloat16", "compile": True}
IMAGES: dict[str, Any] = {"beta2": 0.999, "eval_size": 0}
# one pass over 59 M tokens with 8 layers of width 512
BATCHES: dict[str, Any] = {"context": 512, "batch": 96, "steps": 1200, "eval_every": 400, "eval_size": 1920}
GPT = Run(model="gpt2-small8", lr=1e-3, warmup=60, beta2=0.95, every=25, **RAMP, **FAST, **BATCHES)
# 10 epochs of MNIST, 30 of CIFAR-10
LENET = Run(model="lenet5", batch=128, steps=4690, lr=2e-3, warmup=100, eval_every=1173, **RAMP, **IMAGES)
EPOCHS: dict[str, Any] = {"augment": True, "batch": 256, "steps": 5880, "eval_every": 1470}
RESNET = Run(model="resnet20", lr=4e-3, warmup=300, **EPOCHS, **RAMP, **FAST, **IMAGES)


def arms_of(scores: str, *texts: str) -> tuple[Arm, ...]:
    """An arm for each score, then those written out."""
    return (*map(score_arm, scores.split()), *map(parse_arm, texts))


def crossed(scores: Sequence[str], variations: Mapping[str, Mapping[str, Any]]) -> tuple[Arm, ...]:
    """Each score with each variation, compared with the score without it."""
    return tuple(
        Arm(f"{score} {name}", {"score": "none" if score == "dense" else score, **changes}, score)
        for name, changes in variations.items()
        for score in scores
    )


ENDS = {
    f"{shape} {end:.0%}": {"schedule": shape, "end": end}
    for shape in ("linear", "cubic", "zhu_gupta")
    for end in (0.5, 0.7, 0.9)
}
BETAS = {f"beta2 {beta2}": {"beta2": beta2} for beta2 in (0.95, 0.99, 0.999)}
VISION = arms_of("bitter0 bitter3 bitter7 movement fisher")

PRESETS: dict[PresetName, Preset] = {
    "gpt2-variants": Preset(
        GPT,
        arms_of(
            " ".join(f"bitter{number}" for number in range(10)) + " movement",
            "bitter4 depth: score=bitter4 allocate=depth",
            "fisher q=0.25: score=fisher exponent=0.25",
            "fisher q=0.5: score=fisher exponent=0.5",
        )
        + tuple(
            Arm(f"{score} regrow", {"score": score, "regrow": 0.1, "regrow_by": "snr"})
            for score in ("magnitude", "bitter7")
        ),
        (0.5, 0.8),
    ),
    "schedules": Preset(GPT, arms_of("bitter7") + crossed(("magnitude", "bitter7"), ENDS), (0.8,)),
    "eps": Preset(
        GPT,
        arms_of(
            "bitter3 bitter7",
            "bitter3 eps 1e-12: score=bitter3 eps=1e-12 against=bitter3",
            "bitter3 eps 1e-8: score=bitter3 eps=1e-8 against=bitter3",
            "bitter7 eps 1e-12: score=bitter7 eps=1e-12 against=bitter7",
            "bitter7 eps 1e-8: score=bitter7 eps=1e-8 against=bitter7",
        ),
        (0.8,),
    ),
    "beta2": Preset(GPT, arms_of("bitter7") + crossed(("dense", "magnitude", "bitter7"), BETAS), (0.8,)),
    "lenet-mnist": Preset(LENET, VISION, (0.7, 0.9, 0.95), "the folder of MNIST"),
    "resnet-cifar10": Preset(RESNET, VISION, (0.5, 0.7, 0.9), "the folder of CIFAR-10"),
    "compile": Preset(
        GPT,
        (
            Arm("bitter7 compiled", {"score": "bitter7", "compile": True}),
            Arm("bitter7 eager", {"score": "bitter7", "compile": False}, "bitter7 compiled"),
        ),
        (0.5,),
    ),
}
