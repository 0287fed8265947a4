"""Which learning rate each step has: one rate for the whole run, or one that three short trials before it tell."""

from dataclasses import dataclass, field

LR = 1e-3
FACTORS = (0.5, 1.0, 2.0)  # of LR, one for each trial
LONGER = 2.0  # times the rate of the best trial, for the run: few steps favour rates that are too low for hundreds
LEAST_STEPS = 300  # for trials; below, they would take a large part of the run
TRIAL = 20, 0.02  # steps of a trial: at least so many, and this share of the run
WARM_UP = 0.1


@dataclass
class Plan:
    """``lr=None`` tries three rates, each from the same weights over the same batches, with its own warm-up and decay.

    The run takes twice the rate of the best trial. The steps of trials count: the run that follows has so many fewer.
    ``results`` are the held-out values of the trials so far, of which the least wins.
    """

    steps: int
    lr: float | None = None
    results: list[float] = field(default_factory=list)

    @property
    def trial_steps(self) -> int:
        """Steps of each trial; 0 without trials."""
        return max(TRIAL[0], round(TRIAL[1] * self.steps)) if self.lr is None and self.steps >= LEAST_STEPS else 0

    @property
    def trial_ends(self) -> list[int]:
        """Steps after which a trial is measured."""
        return [self.trial_steps * (i + 1) for i in range(len(FACTORS))] if self.trial_steps else []

    @property
    def num_trial_steps(self) -> int:
        return self.trial_steps * len(FACTORS)

    def spread(self, num: int) -> list[int]:
        """Steps of the run, evenly apart; the last of them is its end."""
        first, length = self.num_trial_steps, self.steps - self.num_trial_steps
        return [first + -(-length * (i + 1) // num) for i in range(num)]

    @property
    def chosen(self) -> float:
        """The rate of the run: twice that of the best trial, or where the batches ended in a trial, that of it."""
        if self.lr is not None or not self.trial_steps:
            return LR if self.lr is None else self.lr
        if len(self.results) < len(FACTORS):
            return LR * FACTORS[len(self.results)]
        best = min(range(len(self.results)), key=lambda i: (self.results[i] != self.results[i], self.results[i]))
        return LONGER * LR * FACTORS[best]

    @property
    def reason(self) -> str:
        if self.lr is not None:
            return "given"
        if not self.trial_steps:
            return f"the default: {self.steps} steps are too few for trials, which take {LEAST_STEPS}"
        if len(self.results) < len(FACTORS):
            return f"that of trial {len(self.results) + 1} of {len(FACTORS)}, in which the batches ended"
        pairs = ", ".join(f"{LR * f:g}: {r:.4g}" for f, r in zip(FACTORS, self.results, strict=False))
        best = f"the best of {len(FACTORS)} trials of {self.trial_steps} steps on held-out batches ({pairs})"
        return f"{LONGER:g} times that of {best}"

    def phase(self, step: int) -> tuple[int, int, float]:
        """First step, number of steps and learning rate of the trial or the run that ``step`` belongs to."""
        number = step // self.trial_steps if self.trial_steps else len(FACTORS)
        if number < len(FACTORS):
            return number * self.trial_steps, self.trial_steps, LR * FACTORS[number]
        return self.num_trial_steps, self.steps - self.num_trial_steps, self.chosen

    def lr_at(self, step: int) -> float:
        """The rate climbs over a tenth of its phase, then falls to zero along a line."""
        first, length, lr = self.phase(step)
        done, warm_up = step - first, max(1, round(WARM_UP * length))
        return lr * min((done + 1) / warm_up, (length - done) / max(1, length - warm_up))
