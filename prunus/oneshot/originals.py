"""Values of tensors before they were changed, so that every change can be taken back bit for bit."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..eligible import plain_name
from ..ops import bits
from ..ranks import is_dtensor

SAMPLE = 65_536  # elements of a parameter that its sum of bits reads, at most
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Originals:
    """Values of tensors before they were changed, bit for bit: at the changed places, or all; none if ``on_disk``."""

    def __init__(self, on_disk: Collection[Tensor] = ()) -> None:
        self.on_disk = on_disk
        self._before: list[tuple[Tensor, Tensor | None, Tensor]] = []  # tensor, packed places (None for all), values
        self.whole: dict[Tensor, Tensor] = {}  # values of tensors that are remembered as a whole
        self._is_lent = False  # whether a model uses the memory of ``whole``

    @property
    def is_empty(self) -> bool:
        return not self._before

    @torch.no_grad()
    def save(self, parameter: Tensor, where: Tensor) -> Tensor:
        """Remember the elements of ``parameter`` at the boolean ``where``, and return them."""
        values = parameter.detach()[where]  # a copy: it never aliases the live weight
        if parameter not in self.on_disk:
            self._before.append((parameter, bits.pack(where), values))
        return values

    @torch.no_grad()
    def save_all(self, tensor: Tensor) -> Tensor:
        """Remember all elements of ``tensor``, in main memory, unless they are known; returns them."""
        if tensor in self.on_disk:
            return tensor.detach().to("cpu", copy=True)
        if tensor not in self.whole:
            self.whole[tensor] = tensor.detach().to("cpu", copy=True)
            self._before.append((tensor, None, self.whole[tensor]))
        return self.whole[tensor]

    @torch.no_grad()
    def prune_(self, parameter: Tensor, where: Tensor) -> None:
        """Set the elements at the boolean ``where`` to zero, and remember them."""
        where = where.to(parameter.device)
        self.save(parameter, where)
        parameter.detach()[where] = 0.0

    @torch.no_grad()
    def restore_(self) -> dict[Tensor, Tensor]:
        """Write everything back, the last change first; returns what tensors that changed as a whole had held."""
        is_lent, self._is_lent, self.whole = self._is_lent, False, {}
        replaced: dict[Tensor, Tensor] = {}
        while self._before:
            tensor, packed, values = self._before[-1]  # which goes once it is written: an interruption loses nothing
            changed = None if packed is not None else tensor.detach().clone()
            _write_(tensor.detach(), packed, values)
            self._before.pop()
            if changed is not None:
                replaced[tensor] = changed.cpu() if is_lent else values.copy_(changed)
        return replaced

    @torch.no_grad()
    def lend(self) -> dict[Tensor, Tensor]:
        """What each changed tensor was before; whole ones are lent, and nothing is written there any more."""
        self._is_lent = True
        old: dict[Tensor, Tensor] = {}
        for tensor, packed, values in reversed(self._before):
            if packed is None:
                old[tensor] = values
            else:
                old[tensor] = old.get(tensor, tensor).detach().clone()
                _write_(old[tensor], packed, values)
        return old

    def follow_(self, moved: Mapping[Tensor, Tensor]) -> None:
        """Keep what is remembered of some tensors for those that took their places."""
        self._before = [(moved.get(tensor, tensor), packed, values) for tensor, packed, values in self._before]
        self.whole = {moved.get(tensor, tensor): values for tensor, values in self.whole.items()}


def _write_(tensor: Tensor, packed: Tensor | None, values: Tensor) -> None:
    if packed is None:
        tensor.copy_(values)
    else:
        tensor[bits.unpack(packed.to(tensor.device), tensor.shape)] = values.to(tensor.device)


@torch.no_grad()
def sums_of_bits(model: nn.Module) -> dict[str, int]:
    """By name of each parameter, an exact sum of at most ``SAMPLE`` of its words, which any training changes."""
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(2**62, (SAMPLE,), generator=generator, device="cpu") | 1  # odd: no bit is multiplied away
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not is_dtensor(parameter):
            flat = parameter.detach().reshape(-1)
            flat = flat[:: -(-len(flat) // SAMPLE) | 1]  # an odd step reads other columns in the next row
            values = flat.view(INTEGERS[flat.itemsize]).to(torch.int64)
            factors = factors.to(flat.device)
            by_device.setdefault(flat.device, {})[plain_name(name)] = (values * factors[: len(flat)]).sum()
    read = {device: torch.stack([*sums.values()]).tolist() for device, sums in by_device.items()}
    return {name: value for device, sums in by_device.items() for name, value in zip(sums, read[device], strict=True)}
