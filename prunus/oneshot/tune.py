"""Tuning: kept weights, biases and norms learn the outputs of the dense model, block by block or as a whole.

The loss of a block is the mean square between its outputs, on the pruned stream, and those of the dense block on the
dense stream. That of the whole model is the distance of its outputs from the dense model's (see distance).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .blocks import Reached, Stream
from .calibration import Calibration
from .distance import Distance, distance_of, output_of
from .forward import first_tensor, outputs, requiring_grad, swapped
from .offload import Offload, gradients, saving
from .resources import is_out_of_memory, release
from .samples import Pick, Tree, mask_of

HELD_OUT = 10  # one sample of so many decides which epoch stays
SCALE = 1024  # of the loss of models in float16, whose gradients would vanish; Adam does not see it

Loss = Callable[[Pick], Tensor]  # mean over the samples of a pick
Rows = Sequence[tuple[int, int]]  # of samples: numbers of the stack and in it


@dataclass(frozen=True)
class Tuned:
    """Loss on held-out samples; nothing was changed unless it fell."""

    before: float
    after: float
    loss: str = str(Distance())

    @property
    def helped(self) -> bool:
        return self.after < self.before


def tunable(calibration: Calibration, module: nn.Module) -> list[nn.Parameter]:
    """Prunable weights, biases and norms of ``module`` that no other module holds."""
    inside = {*module.modules()}
    shared = {
        p for other in calibration.model.modules() if other not in inside for p in other.parameters(recurse=False)
    }
    prunable = {weight.parameter for weight in calibration.weights.values()}
    return [
        parameter
        for parameter in dict.fromkeys(module.parameters())
        if parameter.is_floating_point() and parameter not in shared and (parameter in prunable or parameter.ndim < 2)
    ]


def tune(
    calibration: Calibration,
    parameters: Sequence[nn.Parameter],
    loss: Loss,
    *,
    epochs: int,
    lr: float,
    batch: int,
    size: int,
    offload: Offload | None = None,
) -> Tuned:
    """Adam over steps of ``batch`` samples, in passes of at most ``size``; all is as before after an exception."""
    before = [parameter.detach().clone() for parameter in parameters]
    with requiring_grad(parameters):
        while True:
            try:
                return _Tuner(calibration, parameters, loss, size, offload).run(epochs, lr, batch)
            except BaseException as error:
                torch._foreach_copy_(list(parameters), before)
                if not is_out_of_memory(error) or size == 1:
                    raise
            size = max(1, min(size, batch) // 2)
            release(calibration.device)


@dataclass
class _Tuner:
    calibration: Calibration
    parameters: Sequence[nn.Parameter]
    loss: Loss
    size: int
    offload: Offload | None

    @torch.no_grad()
    def run(self, epochs: int, lr: float, batch: int) -> Tuned:
        samples = [(i, row) for i, stack in enumerate(self.calibration.samples.stacks) for row in range(stack.size)]
        held_out = samples[HELD_OUT - 1 :: HELD_OUT] or samples[-1:]
        training = sorted({*samples} - {*held_out}) or samples
        best = [parameter.detach().clone() for parameter in self.parameters]
        masters = [value.to(torch.promote_types(value.dtype, torch.float32), copy=True) for value in best]
        kept = [value != 0 if value.ndim > 1 else None for value in masters]
        optimizer = torch.optim.Adam(masters, lr, fused=True)
        generator = torch.Generator().manual_seed(0)
        num_steps = -(-len(training) // batch)
        first = least = self._error(held_out)
        for epoch in range(epochs):
            order = torch.randperm(len(training), generator=generator).tolist()
            for step in range(num_steps):
                optimizer.param_groups[0]["lr"] = lr * (1 - (epoch + step / num_steps) / epochs)
                here = [training[i] for i in order[step * batch : (step + 1) * batch]]
                self._backward(here, masters, kept)
                optimizer.step()
                torch._foreach_copy_(list(self.parameters), masters)
            for parameter, mask in zip(self.parameters, kept, strict=True):
                if mask is not None:  # a weight that stays is not to count as pruned
                    parameter.masked_fill_(mask & (parameter == 0), torch.finfo(parameter.dtype).tiny)
            if (error := self._error(held_out)) < least:
                least = error
                torch._foreach_copy_(best, list(self.parameters))
            self.calibration.meter.step(self.calibration.meter.phase)
        torch._foreach_copy_(list(self.parameters), best)
        return Tuned(first, least)

    def _backward(self, samples: Rows, masters: Sequence[Tensor], kept: Sequence[Tensor | None]) -> None:
        """Gradients of the mean loss, zero for weights that are pruned."""
        scale = SCALE if self.parameters[0].dtype == torch.float16 else 1
        for master in masters:
            master.grad = None
        for pick in _picks(samples, self.size):
            with torch.enable_grad(), saving(self.offload):
                total = self.loss(pick) * (scale * pick.size / len(samples))
                grads = gradients(self.offload, total, self.parameters)
            for master, mask, grad in zip(masters, kept, grads, strict=True):
                if grad is None:
                    continue
                grad = grad.to(master.device, master.dtype)
                grad = grad if mask is None else grad * mask
                master.grad = grad if master.grad is None else master.grad.add_(grad)

    def _error(self, samples: Rows) -> float:
        picks = _picks(samples, self.size)
        return torch.stack([self.loss(pick).double() * (pick.size / len(samples)) for pick in picks]).sum().item()


def _picks(samples: Rows, size: int) -> list[Pick]:
    """Samples (stack, row) as picks of at most ``size``, each within one stack."""
    rows: dict[int, list[int]] = {}
    for stack, row in samples:
        rows.setdefault(stack, []).append(row)
    return [Pick(stack, own[i : i + size]) for stack, own in rows.items() for i in range(0, len(own), size)]


def block_loss(calibration: Calibration, k: int, pruned: Stream, dense: Stream) -> Loss:
    """Mean square between what block ``k`` gives and what it gives in the dense model."""

    def loss(pick: Pick) -> Tensor:
        seen: list[Tensor] = []

        def stop(module: nn.Module, args: object, output: Tree) -> None:
            seen.append(first_tensor(output))
            raise Reached

        batch = calibration.batch(pick)
        with pruned.blocks[k].register_forward_hook(stop), suppress(Reached), pruned.starting_at(k, pick):
            outputs(calibration.model, batch)
        return Distance()(seen[0], first_tensor(dense.stored(k + 1, pick)), mask_of(batch))

    return loss


class WholeLoss:
    """How far the model's outputs are from those with the ``dense`` values of its tensors, and ``restored`` layers."""

    def __init__(
        self,
        calibration: Calibration,
        dense: Mapping[Tensor, Tensor],
        restored: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.calibration, self.restored = calibration, restored
        self.dense = {tensor: values.to(tensor.device) for tensor, values in dense.items()}
        self.distance: Distance | None = None  # known after the first pass

    def __call__(self, pick: Pick) -> Tensor:
        model, batch = self.calibration.model, self.calibration.batch(pick)
        with torch.no_grad(), swapped(self.dense), self.restored():
            expected = outputs(model, batch)
        if self.distance is None:
            self.distance = distance_of(expected, self.calibration.samples.stacks[pick.stack].tree, model)
        return self.distance(output_of(outputs(model, batch)), output_of(expected), mask_of(batch))
