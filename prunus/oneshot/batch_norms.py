"""Running statistics of batch norms, renewed for the weights that pruning has changed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ranks import Ranks
from .blocks import Reached, seen_calls
from .calibration import Calibration
from .forward import outputs, swapped
from .originals import Originals
from .resources import fits
from .samples import Chunk
from .shared_work import agreed, all_of


@dataclass(frozen=True)
class Channels:
    num: int
    mean: Tensor
    var: Tensor

    def __add__(self, other: "Channels") -> "Channels":
        num, step = self.num + other.num, other.mean - self.mean
        var = (self.num * self.var + other.num * other.var + step.square() * (self.num * other.num / num)) / num
        return Channels(num, self.mean + step * (other.num / num), var)


@torch.no_grad()
def renew_batch_norms(calibration: Calibration, blocks: Sequence[nn.Module], size: int, originals: Originals) -> None:
    """Running statistics of batch norms change as those of the samples: means by a difference, variances by ratio.

    The samples' own statistics would not do: they are few and not augmented. Norms are renewed in the order of calls,
    in one pass that holds all samples, or each in passes of its own, which may start at any of the ``blocks``.
    """
    norms = [m for m in calibration.model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms or len(calibration.samples) < 2:
        return
    reader = _Passes(calibration.shared(), blocks, size)
    with swapped({tensor: values.to(tensor.device) for tensor, values in originals.whole.items()}):
        before = reader.read(norms)
    done: set[_BatchNorm] = set()

    def renew(norm: _BatchNorm, new: Channels) -> None:
        if norm in done:
            return
        old, running_mean, running_var = before[norm], norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        step, ratio = new.mean - old.mean, (new.var + norm.eps) / (old.var + norm.eps)
        for buffer in (running_mean, running_var):
            originals.save_all(buffer)
            calibration.renewed.add(buffer)
        running_mean += step
        running_var *= ratio
        done.add(norm)
        calibration.meter.show(f"statistics of batch norms, {len(done)} of {len(before)}")

    reader.read_in_one_pass(list(before), renew)
    for norm in sorted([norm for norm in before if norm not in done], key=lambda norm: reader.starts[norm]):
        if (new := reader.read_alone(norm)) is not None:
            renew(norm, new)


class _Passes:
    def __init__(self, calibration: Calibration, blocks: Sequence[nn.Module], size: int) -> None:
        self.calibration, self.blocks, self.size = calibration, blocks, size
        self.starts: dict[_BatchNorm, int] = {}  # blocks that have ended when a norm is first called
        self.num_calls: dict[_BatchNorm, int] = {}  # in a pass, at most
        self._stream = calibration.stream(blocks)
        self._position = 0  # blocks that the stream has left behind

    def read(self, norms: Sequence[_BatchNorm], num_calls: int = 0) -> dict[_BatchNorm, Channels]:
        """What norms read over all samples, in the order of their first calls; a pass ends after ``num_calls``."""
        channels: dict[_BatchNorm, Channels] = {}

        def add(call: tuple[_BatchNorm, Channels]) -> None:
            norm, inputs = call
            channels[norm] = channels[norm] + inputs if norm in channels else inputs

        ranks = self.calibration.ranks
        agreed(ranks, partial(self.calibration.visit, self.size, partial(self._calls, norms, num_calls), add))
        return channels if ranks is None else self._of_all_ranks(norms, channels, ranks)

    def _of_all_ranks(
        self, norms: Sequence[_BatchNorm], own: Mapping[_BatchNorm, Channels], ranks: Ranks
    ) -> dict[_BatchNorm, Channels]:
        """What norms read on all ranks, in the order of the first rank's calls."""
        numbers, channels = {norm: number for number, norm in enumerate(norms)}, dict[_BatchNorm, Channels]()
        here = [(numbers[norm], read, self.starts[norm], self.num_calls[norm]) for norm, read in own.items()]
        for number, read, start, num_calls in chain(*all_of(ranks, here, self.calibration.device)):
            norm = norms[number]
            channels[norm] = channels[norm] + read if norm in channels else read
            self.starts[norm] = min(self.starts.get(norm, start), start)
            self.num_calls[norm] = max(self.num_calls.get(norm, 1), num_calls)
        return channels

    def read_alone(self, norm: _BatchNorm) -> Channels | None:
        """What one norm reads, if it is called; the stream moves on to the block that calls it."""
        visit = partial(self.calibration.visit, self.size)
        while self._position < self.starts[norm]:
            agreed(self.calibration.ranks, partial(self._stream.advance, self._position, self._forward, visit))
            self._position += 1
        return self.read([norm], self.num_calls[norm]).get(norm)

    def read_in_one_pass(self, norms: Sequence[_BatchNorm], act: Callable[[_BatchNorm, Channels], None]) -> None:
        """Call ``act`` with what a norm reads before it runs, while memory lasts, if one pass calls each just once."""
        first, *others = self.calibration.samples.chunks(self.size)
        if not others and max(self.num_calls.values(), default=1) == 1 and self.calibration.ranks is None:
            fits(lambda: self._calls(norms, 0, first, act), self.calibration.device)

    def _forward(self, chunk: Chunk) -> None:
        outputs(self.calibration.model, self.calibration.batch(chunk))

    def _calls(
        self,
        norms: Sequence[_BatchNorm],
        num_calls: int,
        chunk: Chunk,
        act: Callable[[_BatchNorm, Channels], None] | None = None,
    ) -> list[tuple[_BatchNorm, Channels]]:
        """What norms read in one pass, call by call; ``act`` is called with it before the norm runs."""
        calls: list[tuple[_BatchNorm, Channels]] = []

        def store(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter(args or kwargs.values())).detach().transpose(0, 1).flatten(1)
            var, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), 1, correction=0)
            calls.append((norm, Channels(x.shape[1], mean, var)))
            start = self._position + len(ended)
            self.starts[norm] = min(self.starts.get(norm, start), start)
            self.num_calls[norm] = max(self.num_calls.get(norm, 1), sum(other is norm for other, _ in calls))
            if act is not None:
                act(*calls[-1])
            if len(calls) == num_calls:
                raise Reached

        with ExitStack() as stack, seen_calls(self.blocks[self._position :]) as (_, ended):
            for norm in norms:
                stack.enter_context(norm.register_forward_pre_hook(store, with_kwargs=True))
            with suppress(Reached), self._stream.starting_at(self._position, chunk):
                self._forward(chunk)
        return calls
