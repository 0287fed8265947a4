"""Arms: what a study compares, as changes of fields of one base run, and studies by name. Loads no torch."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ...files.regular import check_regular
from ..run import FIELDS, Run, ScoreName, check_field

# what makes two numbers comparable: data, order, evaluation set and the weights that are counted
SHARED = "model data validation vocab_size context augment include exclude only eval_every eval_size".split()
OF_THE_STUDY = {
    "out": "--out",
    "save_every": "--save-every",
    "device": "--devices",
    "resume": "the same command again",
}
ELSEWHERE = OF_THE_STUDY | {"sparsity": "--sparsity", "seed": "--seeds"}
UNCHANGED = ("log_every", "track")


def slug(name: str) -> str:
    """The name as part of a folder's name: lower case, with a dash for all but letters, digits and dots."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c == ".") else "-" for c in name.lower())
    return "-".join(part for part in kept.split("-") if part.strip("."))


@dataclass(frozen=True)
class Arm:
    """``changes`` are fields of Run; it is compared with ``against``, or with magnitude of its recipe if empty."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    against: str = ""

    def __post_init__(self) -> None:
        if not slug(self.name):
            raise ValueError(f"an arm needs a name with letters or digits, got {self.name!r}")
        for name in self.changes:
            if name in SHARED:
                raise ValueError(f"arm {self.name} changes {name}, which all arms share; put it in another study")
            if name in ELSEWHERE or name in UNCHANGED:
                where = f"; it is given by {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                raise ValueError(f"{name} cannot be changed by an arm{where}: arm {self.name}")

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.changes.items()) or "no change"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "changes": dict(self.changes), "against": self.against}


CONTROLS = (
    Arm("dense", {"score": "none"}),
    Arm("random", {"score": "random"}),
    Arm("magnitude", {"score": "magnitude"}),
)


def with_controls(arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """Dense, random and magnitude, which every comparison contains, then the others, each once."""
    by_name = {arm.name: arm for arm in CONTROLS}
    for arm in arms:
        if arm.name in by_name and dict(by_name[arm.name].changes) != dict(arm.changes):
            raise ValueError(f"two arms are named {arm.name}: {by_name[arm.name]} and {arm}; rename one")
        by_name[arm.name] = arm
    folders: dict[str, str] = {}
    for arm in by_name.values():
        other = folders.setdefault(slug(arm.name), arm.name)
        if other != arm.name:
            raise ValueError(f"arms {other!r} and {arm.name!r} would share a folder; rename one")
        if arm.against and arm.against not in by_name:
            raise ValueError(
                f"arm {arm.name} is against {arm.against!r}, which is not an arm; the arms are {', '.join(by_name)}"
            )
    return tuple(by_name.values())


def score_arm(score: str) -> Arm:
    """The arm for one of the names in ``--scores``."""
    if score in ("dense", "none"):
        return CONTROLS[0]
    if score not in get_args(ScoreName):
        raise ValueError(f"there is no score {score!r}; the scores are {', '.join(get_args(ScoreName))}")
    return Arm(score, {"score": score})


def parse_arm(text: str) -> Arm:
    """An arm from ``name: field=value field=value``; ``against=NAME`` may be among them, and NAME may have spaces."""
    name, colon, rest = text.partition(":")
    words, against = [], []
    for word in rest.split():
        if word.startswith("against="):
            against.append(word.removeprefix("against="))
        elif against and not ("=" in word and word.partition("=")[0] in FIELDS):
            against.append(word)
        else:
            words.append(word)
    changes = parse_fields(words, f"arm {name.strip()}")
    if not colon or not changes or against == [""]:
        raise ValueError(f"an arm must be written as 'name: field=value field=value against=ARM', got {text!r}")
    return Arm(name.strip(), changes, " ".join(against))


def parse_fields(words: Iterable[str], where: str) -> dict[str, Any]:
    """Values by field of Run from ``field=value``; ``where`` begins an error message."""
    fields: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name in fields:
            raise ValueError(f"{where}: expected field=value, each field once, got {word!r}")
        literal: Any = value
        with suppress(tomllib.TOMLDecodeError):  # a number, true, false or list as TOML writes it, or .95; else text
            literal = tomllib.loads(f"x = {'0' * value.startswith('.')}{value}")["x"]
        fields[name] = typed(name, literal, where)
    return fields


def read_base(path: Path) -> tuple[Run, list[Arm], tuple[float, ...]]:
    """Base run, arms and sparsities of a TOML file: fields of Run (a score is an arm too) and ``[[arm]]`` tables."""
    check_regular(path)
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; --base takes a TOML file with fields of a run") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    tables = values.pop("arm", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) and "name" in table for table in tables):
        raise ValueError(f"{path}: an arm must be a table [[arm]] with a name and the fields that it changes")
    if "seed" in values:
        raise ValueError(f"{path}: --seeds sets the seeds of a study ('5,' is seed 5 alone); leave seed out")
    base = Run(**{name: typed(name, value, str(path)) for name, value in values.items()})
    arms = [score_arm(base.score)] if "score" in values else []
    for table in tables:
        name, against = str(table.pop("name")), str(table.pop("against", ""))
        arms.append(Arm(name, {key: typed(key, value, f"arm {name}") for key, value in table.items()}, against))
    return base, arms, (base.sparsity,) if base.sparsity and "sparsity" in values else ()


def typed(name: str, value: Any, where: str) -> Any:
    """``value`` as the field ``name`` of Run has it; ValueError where the field does not take it."""
    if option := OF_THE_STUDY.get(name):
        raise ValueError(f"{where}: the runs of a study do not choose {name}; leave it out and pass {option}")
    if name not in FIELDS:
        near = get_close_matches(name, FIELDS, n=1)
        raise ValueError(f"{where}: a run has no field {name!r}{f'; did you mean {near[0]}?' if near else ''}")
    kinds = FIELDS[name]
    if get_origin(kinds[0]) is tuple and isinstance(value, list | str):
        value = [value] if isinstance(value, str) else list(map(str, value))
    check_field(name, value, where)
    if isinstance(value, list):
        return tuple(value)
    if Path in kinds:
        return Path(value)
    return float(value) if float in kinds and int not in kinds else value


PresetName = Literal["gpt2-variants", "schedules", "eps", "beta2", "lenet-mnist", "resnet-cifar10", "compile", "rates"]


@dataclass(frozen=True)
class Preset:
    """A study by name; the user says where its data is, unless it reads nothing but Python's own source."""

    base: Run
    arms: tuple[Arm, ...]
    sparsities: tuple[float, ...]
    reads: str = "a file of tokens, and --validation its held-out file"  # what --data is; empty where the base names it


# the recipe of the first studies, which later ones continue
COSINE: dict[str, Any] = {"lr_schedule": "cosine", "min_lr": 0.1, "rate_power": 0.0}
RAMP: dict[str, Any] = {"schedule": "linear", "begin": 0.1, "end": 0.85, **COSINE}
FAST: dict[str, Any] = {"precision": "bfloat16", "compile": True}
IMAGES: dict[str, Any] = {"beta2": 0.999, "eval_size": 0}
# one pass over 59 M tokens with 8 layers of width 512
BATCHES: dict[str, Any] = {"context": 512, "batch": 96, "steps": 1200, "eval_every": 400, "eval_size": 1920}
GPT = Run(model="gpt2-small8", lr=1e-3, warmup=60, beta2=0.95, every=25, **RAMP, **FAST, **BATCHES)
# 10 epochs of MNIST, 30 of CIFAR-10
LENET = Run(model="lenet5", every=50, batch=128, steps=4690, lr=2e-3, warmup=100, eval_every=1173, **RAMP, **IMAGES)
EPOCHS: dict[str, Any] = {"augment": True, "batch": 256, "steps": 5880, "eval_every": 1470}
RESNET = Run(model="resnet20", every=50, lr=4e-3, warmup=300, **EPOCHS, **RAMP, **FAST, **IMAGES)
# 1.2 M bytes of Python's own source with 4 layers of width 128: minutes on a core
LATE: dict[str, Any] = {"schedule": "linear", "begin": 0.4, "end": 0.8, "every": 12}
SMALL: dict[str, Any] = {"context": 128, "batch": 16, "steps": 600, "eval_every": 300, "eval_size": 256}
WSD: dict[str, Any] = {"lr": 2e-3, "lr_schedule": "wsd", "warmup": 100, "beta2": 0.99, "rate_power": 0.0}
TINY = Run(model="gpt2-tiny", data="stdlib", **WSD, **LATE, **SMALL)


def arms_of(scores: str, *texts: str) -> tuple[Arm, ...]:
    return (*map(score_arm, scores.split()), *map(parse_arm, texts))


def crossed(scores: Sequence[str], variations: Mapping[str, Mapping[str, Any]]) -> tuple[Arm, ...]:
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
EPS = {f"eps {eps}": {"eps": float(eps)} for eps in ("1e-12", "1e-8")}
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
    "eps": Preset(GPT, arms_of("bitter3 bitter7") + crossed(("bitter3", "bitter7"), EPS), (0.8,)),
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
    "rates": Preset(
        TINY,
        arms_of(
            "bitter7",
            "bitter7 rate 0.5: score=bitter7 rate_power=0.5 against=bitter7",
            "bitter7 rate 1: score=bitter7 rate_power=1 against=bitter7",
            "magnitude rate 1: score=magnitude rate_power=1",
            "dense replays bitter7 rate 1 at 50 %: score=none replay=bitter7-rate-1-0.5-s{seed} against=dense",
        ),
        (0.5, 0.8),
        reads="",
    ),
}
