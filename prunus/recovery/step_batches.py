"""Batches to learn from: the first are held out, each step reads its own, and a run that goes on reads the same."""

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from ..oneshot.samples import Tree, check_batches, digest, plain_batch
from .plan import Plan

HELD_OUT = 16  # batches, by default


class Batches:
    """Batches by number, from 0, without those that are held out.

    A sequence is read in its own order, and in later rounds in others. A loader is read again for every round, with
    the same random numbers, so that the batches that it gives first stay held out; a generator is read once.
    """

    def __init__(self, batches: Iterable[Any], held_out: int | Sequence[Any], seed: int) -> None:
        check_batches(batches)
        self.source: Any = batches
        self.seed, self.num_skipped = seed, 0
        self._random: Any = getattr(batches, "generator", None)
        self._random_state = self._random.get_state() if isinstance(self._random, torch.Generator) else None
        self._is_read_once = isinstance(batches, Iterator)
        self._seen: list[Tree] = []  # of what is read once: what was read and is still needed
        self.is_split = isinstance(getattr(batches, "sampler", None), DistributedSampler)  # over ranks already
        if not isinstance(held_out, int):
            check_batches(held_out)
            self.held_out = [plain_batch(batch) for batch in held_out]
            self._rest = self._read() if self._is_read_once else None
        else:
            self.held_out = self._hold_out(held_out)
        if not self.held_out:
            raise ValueError("held_out must hold at least one batch, to choose the best state on")

    def _hold_out(self, num: int) -> list[Tree]:
        if num < 1:
            raise ValueError(f"held_out must be a number of batches, at least 1, or the batches themselves; got {num}")
        if not isinstance(self.source, Sequence):
            reading = self._read()
            first = list(islice(reading, num + 1))
            if len(first) > num:
                self.num_skipped = num
                self._rest = reading if self._is_read_once else None
                self._seen = first[num:]
                return first[:num]
            self.source, self._is_read_once = first, False  # so few that they are kept
        if len(self.source) < 2:
            count = "no batch was" if not len(self.source) else "one batch was"
            raise ValueError(f"{count} given, but recovery needs one to learn from and one to measure on; give more")
        self.num_skipped = min(num, max(1, len(self.source) // 5))
        return [plain_batch(self.source[i]) for i in range(self.num_skipped)]

    def starting_at(self, number: int) -> Iterator[Tree]:
        """Batches ``number``, ``number + 1`` and so on; endless unless they can be read only once."""
        if isinstance(self.source, Sequence):
            yield from self._of_sequence(number)
        elif self._is_read_once:
            yield from islice(self._once(), number, None)
        else:
            yield from self._again_and_again(number)

    def _of_sequence(self, number: int) -> Iterator[Tree]:
        num = len(self.source) - self.num_skipped
        while True:
            round_, at = divmod(number, num)
            order = torch.randperm(num, generator=torch.Generator().manual_seed(self.seed + round_)) if round_ else None
            for i in range(at, num):
                yield plain_batch(self.source[self.num_skipped + (i if order is None else int(order[i]))])
            number += num - at

    def _once(self) -> Iterator[Tree]:
        """A generator that began with the held-out batches; what trials read is kept, since the run reads it again."""
        known = self._seen
        for i in range(10**18):
            if i == len(known):
                batch = next(self._rest, None) if self._rest is not None else None
                if batch is None:
                    return
                known.append(batch)
            yield known[i]
            if not self.keeps_read:
                known[i] = None

    keeps_read = True  # until the trials are over

    def _again_and_again(self, number: int) -> Iterator[Tree]:
        while True:
            with random_kept():  # what is passed over must not move the random numbers of the run
                reading = self._read()
                held = list(islice(reading, self.num_skipped))
                if held and digest(held[0]) != digest(self.held_out[0]):
                    raise ValueError(
                        "the batches change their order when read again, so training would see held-out ones; pass "
                        "separate batches as held_out="
                    )
                num_passed = sum(1 for _ in islice(reading, number))
            num_read = num_passed
            for batch in reading:
                num_read += 1
                yield batch
            if not num_read:
                return
            number = max(0, number - num_read)  # where a round is shorter than what was to be passed over

    def _read(self) -> Iterator[Tree]:
        """All batches; a loader that shuffles draws its order from ``seed``, in every round the same."""
        if self._random_state is not None:
            self._random.set_state(self._random_state)
        with random_kept(self.seed):
            reading = iter(self.source)
            first = list(islice(reading, 1))
        yield from map(plain_batch, chain(first, reading))


@contextmanager
def random_kept(seed: int | None = None, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Random numbers, of ``seed`` where it is given; then those of Python, NumPy and torch go on as before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(list(devices)):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Steps(IterableDataset):
    """The batches of one rank, from a step on, as ``Plan`` says which; ``accumulate`` of them a step."""

    def __init__(self, batches: Batches, plan: Plan, accumulate: int, rank: int, num_ranks: int) -> None:
        self.batches, self.plan, self.accumulate = batches, plan, accumulate
        self.rank, self.num_ranks = (0, 1) if batches.is_split else (rank, num_ranks)
        self.first_step = 0

    def __iter__(self) -> Iterator[Tree]:
        # loaders read a step ahead, so a step that begins a trial or the run may not know yet which of them it is
        first, per_step, reading = -1, self.accumulate * self.num_ranks, iter(())
        for step in range(self.first_step, self.plan.steps):
            begin, *_ = self.plan.phase(step)
            self.batches.keeps_read = begin < self.plan.num_trial_steps or step == begin
            if begin != first:
                first, reading = begin, self.batches.starting_at((step - begin) * per_step)
            mine = [batch for i, batch in enumerate(islice(reading, per_step)) if i % self.num_ranks == self.rank]
            if len(mine) < self.accumulate:
                warnings.warn(
                    f"the batches ended after {step} of {self.plan.steps} steps, so the best state so far is kept; "
                    "give batches that can be read again, or fewer steps",
                    stacklevel=2,
                )
                return
            yield from mine
