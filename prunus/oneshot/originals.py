"""Values of tensors before they were changed, so that every change can be taken back bit for bit."""

import torch
from torch import Tensor

from ..ops import bits


class Originals:
    """Values of tensors before they were changed, bit for bit: those at the changed places, or all."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor | None, Tensor]] = []  # tensor, packed places (None for all), values
        self.whole: dict[Tensor, Tensor] = {}  # values of tensors that are remembered as a whole

    @torch.no_grad()
    def save(self, parameter: Tensor, where: Tensor) -> Tensor:
        """Remember the elements of ``parameter`` at the boolean ``where``, and return them."""
        values = parameter.detach()[where]  # a copy: it never aliases the live weight
        self._before.append((parameter, bits.pack(where), values))
        return values

    @torch.no_grad()
    def save_all(self, tensor: Tensor) -> Tensor:
        """Remember all elements of ``tensor``, in main memory, unless they are known; returns them."""
        if tensor not in self.whole:
            self.whole[tensor] = tensor.detach().to("cpu", copy=True)
            self._before.append((tensor, None, self.whole[tensor]))
        return self.whole[tensor]

    @torch.no_grad()
    def prune_(self, parameter: Tensor, where: Tensor) -> None:
        """Set the elements at the boolean ``where`` to zero, and remember them."""
        self.save(parameter, where)
        parameter.detach()[where] = 0.0

    @torch.no_grad()
    def restore_(self) -> dict[Tensor, Tensor]:
        """Write everything back, the last change first.

        Returns what stood in the tensors that were changed as a whole, in the memory that their old values had.
        """
        self.whole = {}
        replaced: dict[Tensor, Tensor] = {}
        while self._before:
            tensor, packed, values = self._before.pop()
            if packed is None:
                changed = tensor.detach().clone()
                tensor.detach().copy_(values)
                replaced[tensor] = values.copy_(changed)
            else:
                tensor.detach()[bits.unpack(packed, tensor.shape)] = values
        return replaced
