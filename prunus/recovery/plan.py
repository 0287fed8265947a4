"""Which learning rate each step has: one rate for the whole run, or one that short trials before it tell."""

import math
from dataclasses import dataclass, field

LR = 1e-3
FACTORS = (0.5, 1.0, 2.0)  # of LR, one for each of the first trials
HARM = 2.0  # times the value before: a trial that ends with more has done harm
LOWER, MOST_LOWER = 0.25, 4  # while all trials do harm: the next rate over the lowest, and how many may follow
LONGER = 2.0  # times the rate of the best trial, for the run: few steps favour rates that are too low for hundreds
LEAST_STEPS = 300  # for trials; below, they would take a large part of the run
TRIAL = 20, 0.02  # steps of a trial: at least so many, and this share of the run
WARM_UP = 0.1


@dataclass
class Plan:
    """``lr=None`` tries three rates, each from the same weights over the same batches, with its own warm-up and decay.

    Where all of them are far too high, as for wide models with small weights, lower ones follow. The run takes twice
    the rate of the best trial. The steps of trials count: the run that follows has so many fewer. ``results`` are the
    held-out values of the trials so far, of which the least wins, and ``before`` is the value without learning.
    """

    steps: int
    lr: float | None = None
    results: list[float] = field(default_factory=list)
    before: float = math.inf

    @property
    def trial_steps(self) -> int:
        """Steps of each trial; 0 without trials."""
        return max(TRIAL[0], round(TRIAL[1] * self.steps)) if self.lr is None and self.steps >= LEAST_STEPS else 0

    @property
    def rates(self) -> list[float]:
        """Of the trials, as far as the results so far tell."""
        rates = [LR * factor for factor in FACTORS] if self.trial_steps else []
        for _ in range(MOST_LOWER if rates else 0):
            if len(self.results) < len(rates) or any(r <= HARM * self.before for r in self.results[: len(rates)]):
                break
            rates.append(LOWER * min(rates))
        return rates

    @property
    def trial_ends(self) -> list[int]:
        """Steps after which a trial is measured."""
        return [self.trial_steps * (i + 1) for i in range(len(self.rates))]

    @property
    def num_trial_steps(self) -> int:
        return self.trial_steps * len(self.rates)

    def spread(self, num: int) -> list[int]:
        """Steps of the run, evenly apart; the last of them is its end."""
        first, length = self.num_trial_steps, self.steps - self.num_trial_steps
        return [first + -(-length * (i + 1) // num) for i in range(num)]

    @property
    def chosen(self) -> float:
        """The rate of the run: twice that of the best trial, or where the batches ended in a trial, that of it."""
        if self.lr is not None or not self.trial_steps:
            return LR if self.lr is None else self.lr
        rates = self.rates
        if len(self.results) < len(rates):
            return rates[len(self.results)]
        best = min(range(len(rates)), key=lambda i: (math.isnan(self.results[i]), self.results[i]))
        return LONGER * rates[best]

    @property
    def reason(self) -> str:
        if self.lr is not None:
            return "given"
        if not self.trial_steps:
            return f"the default, since {self.steps} steps are too few for trials, which take {LEAST_STEPS}"
        rates = self.rates
        if len(self.results) < len(rates):
            return f"that of trial {len(self.results) + 1} of {len(rates)}, in which the batches ended"
        pairs = ", ".join(f"{rate:g}: {result:.4g}" for rate, result in zip(rates, self.results, strict=True))
        best = f"the best of {len(rates)} trials of {self.trial_steps} steps on held-out batches ({pairs})"
        return f"{LONGER:g} times that of {best}"

    def phase(self, step: int) -> tuple[int, int, float]:
        """First step, number of steps and learning rate of the trial or the run that ``step`` belongs to."""
        rates = self.rates
        if step < self.num_trial_steps:
            number = step // self.trial_steps
            return number * self.trial_steps, self.trial_steps, rates[number]
        return self.num_trial_steps, self.steps - self.num_trial_steps, self.chosen

    def lr_at(self, step: int) -> float:
        """The rate climbs over a tenth of its phase, then falls to zero along a line."""
        first, length, lr = self.phase(step)
        done, warm_up = step - first, max(1, round(WARM_UP * length))
        return lr * min((done + 1) / warm_up, (length - done) / max(1, length - warm_up))
