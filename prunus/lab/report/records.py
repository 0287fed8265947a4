"""What is recorded of runs, read without torch; whatever is missing is said in ``notes``."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...files.json_file import is_deep
from ..run import Run, run_of
from ..run_files import RunFiles
from ..schema import COUNT, FAILED, LINE, RESULT, check
from ..study.intervals import ACCURACY, PERPLEXITY, Metric
from .numbers import number

Json = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What is stored of one run; one that goes on, that was killed, or that failed has no result."""

    name: str
    run: Run
    environment: Json
    lines: list[Json]  # of metrics.jsonl, in order
    result: Json | None = None
    failure: str = ""  # why there will be no result
    more: Json = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sparsity(self) -> float:
        """What was asked for; 0 for a dense run."""
        return 0.0 if self.run.score == "none" else self.run.sparsity

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def arm(self) -> str:
        """The arm of a study; of another run its folder's name without sparsity and seed."""
        name = self.name.removesuffix(f"-s{self.seed}").removesuffix(f"-{self.sparsity:.12g}")
        return self.more.get("arm", name)

    @property
    def is_open(self) -> bool:
        return self.result is None and not self.failure

    @cached_property
    def logs(self) -> list[Json]:
        return [line for line in self.lines if "loss" in line]

    @cached_property
    def evals(self) -> list[Json]:
        return [line for line in self.lines if isinstance(line.get("eval"), dict)]

    @cached_property
    def events(self) -> list[Json]:
        return [line["event"] | {"step": line["step"]} for line in self.lines if isinstance(line.get("event"), dict)]

    @cached_property
    def layers(self) -> dict[str, int]:
        """Number of weights by prunable layer, which a pruned run logs before its first step."""
        lines = [line["layers"] for line in self.lines if isinstance(line.get("layers"), dict)]
        return lines[0] if lines else {}

    @property
    def is_language(self) -> bool:
        return self.run.model.startswith("gpt")

    @property
    def unit(self) -> str:
        return "tokens" if self.is_language else "images"

    @property
    def metric(self) -> Metric:
        return PERPLEXITY if self.is_language else ACCURACY

    @property
    def per_step(self) -> int:
        return self.run.batch * self.run.accumulate * (self.run.context if self.is_language else 1)

    @property
    def last_step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def has_diverged(self) -> bool:
        """Whether it ended with a loss or quality that is not finite."""
        ended = self.result or {}
        return any(name in ended and number(ended[name]) is None for name in ("loss", self.metric.name))

    @property
    def quality(self) -> float | None:
        """The metric at the end, accuracy in percent; None while there is no end, and of a run that diverged."""
        value = None if self.has_diverged else number((self.result or {}).get(self.metric.name))
        return value and value * self.metric.scale

    def layer_sparsity(self, line: Json) -> dict[str, float]:
        zeros = line.get("zeros")
        if not isinstance(zeros, list) or len(zeros) != len(self.layers):
            return {}
        return {name: zero / total for (name, total), zero in zip(self.layers.items(), zeros, strict=True) if total}


def read_record(run: RunFiles) -> RunRecord:
    metrics = run.path / "metrics.jsonl"
    described = run.load("run.json")
    lines: list[Json] = []
    notes = [] if run.has("metrics.jsonl") else ["has no metrics.jsonl"]
    for place, line in enumerate(() if notes else run.metrics(), 1):
        if not isinstance(line, dict) or is_deep(line) or not COUNT.holds(line.get("step")):  # it may just be written
            what = "is damaged" if line is None or is_deep(line) else "has no step"
            notes.append(f"line {place} of metrics.jsonl {what}; what follows it is left out")
            break
        check(line, LINE, f"{metrics}: line {place}: ", "it")
        lines.append(line)
    result, failure = None, ""
    if run.has("result.json"):
        result = run.load_checked("result.json", RESULT)
    elif run.has("failed.json"):
        failure = run.load_checked("failed.json", FAILED)["message"]
        notes.append(f"failed: {failure}")
    else:
        notes.append("has no result.json: it goes on, or was interrupted")
    environment = described.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    own = run_of(described, run.path / "run.json")
    record = RunRecord(run.name, own, environment, lines, result, failure)
    _check_result(record, f"{run.path / 'run.json'}")
    for line in record.evals:
        if max(record.layer_sparsity(line).values(), default=0) > 1:
            raise ValueError(f"{metrics}: at step {line['step']} a layer has more zeros than weights")
    if any(number(line["loss"]) is None for line in record.logs):
        notes.append("has losses that are not finite: it diverged")
    return replace(record, notes=tuple(notes))


def _check_result(record: RunRecord, path: str) -> None:
    """ValueError where run.json contradicts what the run counted; of other fields, such as lr, nothing is counted."""
    run, steps = record.run, record.run.total_steps
    counted = {"steps": ("steps", steps), "examples": ("batch or accumulate", steps * run.batch * run.accumulate)}
    if record.is_language:
        counted["tokens"] = ("context", steps * record.per_step)
    for name, (fields, expected) in counted.items():
        if (in_result := (record.result or {}).get(name, expected)) != expected:
            raise ValueError(
                f"{path}: {fields} make {expected} {name}, but result.json counted {in_result}: one is damaged"
            )
