"""Rates of a pruned run, replayed in a dense one: the control that tells a better network from a better schedule."""

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ..eligible import eligible
from ..rate import rates_of
from .run import Run
from .run_files import read_metrics


def recorded_rates(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Steps at which the rates of the pruned run changed, and the factor of each weight from then on."""
    folder = Path(run.replay.replace("{seed}", str(run.seed)))
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} has no metrics.jsonl; replay names the folder of a run that was pruned before")
    if not (folder / "result.json").is_file():
        raise ValueError(f"the run in {folder} has not ended; replay its rates when it has")
    lines = read_metrics(folder)
    names = next((list(line["layers"]) for line in lines if isinstance(line.get("layers"), dict)), [])
    events = [(line["step"], line["event"].get("rates")) for line in lines if isinstance(line.get("event"), dict)]
    rows = [(step, rates) for step, rates in events if isinstance(rates, list) and len(rates) == len(names) > 0]
    if any(not isinstance(rate, float | int) for _, rates in rows for rate in rates):
        raise ValueError(f"{folder / 'metrics.jsonl'} has rates that are no numbers")
    found = [(step, dict(zip(names, rates, strict=True))) for step, rates in rows]
    if not found:
        raise ValueError(f"the run in {folder} has no rates to replay; it must be pruned with --rate-power above 0")
    return found


class Replay:
    """Sets, before each step of a dense run, the factors that the pruned run had in that step."""

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer) -> None:
        self.changes = recorded_rates(run)
        weights = {weight.name: weight.parameter for weight in eligible(model, run.include, run.exclude).weights}
        if unknown := sorted(set(self.changes[0][1]) ^ set(weights)):
            raise ValueError(f"the run to replay pruned other weights than this one has: {unknown[0]}")
        self.rates = rates_of(optimizer, weights)
        self.rates.attach()

    def before(self, step: int) -> None:
        """Factors for the step that follows ``step`` others."""
        now = [factors for changed, factors in self.changes if changed <= step]
        factors = now[-1] if now else dict.fromkeys(self.rates.factors, 1.0)
        if factors != self.rates.factors:
            self.rates.set(factors)
