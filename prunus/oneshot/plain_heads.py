"""Heads of attentions that are written in plain torch: candidates from a number of heads and the sizes of layers.

A unit is a head of keys and values with the heads of queries that read it. Sizes do not say how a layer that computes
query, key and value in one orders them, nor which attributes its module reads: each way is a candidate of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from .call_order import Calls, Candidate, Count
from .unit_layouts import places_of
from .units import Slices

HEADS = ("num_heads", "n_heads", "n_head", "nheads", "heads", "num_attention_heads", "n_local_heads")
GROUPS = ("num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_heads", "n_local_kv_heads")


def head_candidates(model: nn.Module, calls: Calls) -> Iterator[Candidate]:
    """Of modules with an attribute that counts heads, the innermost first."""
    names = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for module in reversed([*model.modules()]):
        counts = {key: value for key, value in vars(module).items() if type(value) is int and value > 1}
        num = next((counts[key] for key in HEADS if key in counts), 0)
        num_groups = next((counts[key] for key in GROUPS if key in counts), num)
        if not num or num % num_groups or isinstance(module, nn.MultiheadAttention):
            continue
        parts = set(module.modules())
        layers = [part for part in calls.order if part in calls.layers and part in parts]
        for place, consumer in enumerate(layers):
            dim, rest = divmod(calls.num_inputs(consumer), num)
            for producers in (layers[place - n : place] for n in (1, 2, 3) if n <= place and not rest):
                if sum(map(calls.num_outputs, producers)) == (num + 2 * num_groups) * dim:
                    attention = _Attention(calls, module, names, num, num_groups, dim)
                    yield from attention.candidates(producers, consumer)


@dataclass(frozen=True)
class _Attention:
    """A module with ``num`` heads of queries, ``num_groups`` of keys and values, and ``dim`` channels in each."""

    calls: Calls
    module: nn.Module
    names: Mapping[Tensor, str]  # of the model's tensors
    num: int
    num_groups: int
    dim: int

    @property
    def num_queries(self) -> int:
        """Heads of queries in a group."""
        return self.num // self.num_groups

    def candidates(self, producers: Sequence[nn.Module], consumer: nn.Module) -> Iterator[Candidate]:
        columns = torch.arange(self.calls.num_inputs(consumer)).view(self.num_groups, -1)
        ways = product(self._by_head(), self._numbers(), product(*map(self._layouts, producers)))
        for number, (by_head, numbers, layouts) in enumerate(ways):
            rows, layout = dict(zip(producers, layouts, strict=True)), f"{type(self.module).__name__} {number}"
            yield self.calls.candidate("heads", consumer, columns, rows, by_head, numbers, layout)

    def _by_head(self) -> Iterator[dict[str, Slices]]:
        """Tensors beside those of layers that have a place for each head: none, or all that can (position biases)."""
        yield {}
        layers = {tensor for layer in self.calls.layers for tensor in self.calls.tensors[layer].values()}
        one_each = torch.arange(self.num)[:, None]
        by_head = {
            self.names[tensor]: Slices(tensor.shape.index(self.num), one_each)
            for tensor in (*self.module.parameters(), *self.module.buffers())
            if tensor not in layers and tensor.shape.count(self.num) == 1 and self.num == self.num_groups
        }
        if by_head:
            yield by_head

    def _numbers(self) -> Iterator[list[Count]]:
        """Attributes that count heads, then beside them those that may count the channels of all heads."""
        values = {key: value for key, value in vars(self.module).items() if type(value) is int}
        counts = [(self.module, key, self.num_queries) for key in HEADS if values.get(key) == self.num]
        counts += [(self.module, key, 1) for key in GROUPS if values.get(key) == self.num_groups]
        widths = {self.num * self.dim: self.num_queries * self.dim, self.num_groups * self.dim: self.dim}
        others = {key: widths[value] for key, value in values.items() if value in widths}
        others = [(self.module, key, width) for key, width in others.items() if key not in HEADS + GROUPS]
        yield counts
        if others:
            yield counts + others
        if len(others) > 1:
            yield from ([*counts, other] for other in others)

    def _layouts(self, producer: nn.Module) -> Iterator[Tensor]:
        """Rows of each group, (group, row), where a layer computes some of query, key and value."""
        q, size = self.num_queries, self.calls.num_outputs(producer)
        for parts in dict.fromkeys([(q,), (1,), (q, 1, 1), (1, 1)]):  # heads of a group in each
            if size == sum(parts) * self.num_groups * self.dim:
                for sizes in dict.fromkeys([tuple(part * self.dim for part in parts), (sum(parts) * self.dim,)]):
                    yield places_of(self.num_groups, sizes)
