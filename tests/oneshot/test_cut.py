"""Tensors lose slices and get them back, bit for bit and in the order of memory that they had, whatever happens."""

import pytest
import torch
from torch import nn

from prunus.oneshot.cuts import Cuts

LAST = torch.channels_last


class Small(nn.Module):
    """A convolution, a buffer, and numbers; one of them cannot be set."""

    def __init__(self):
        super().__init__()
        self.conv, self.width = nn.Conv2d(6, 8, 3), 8
        self.register_buffer("scale", torch.randn(8))

    @property
    def fixed(self):
        return 8


def state(model):
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(name, id(t), t.clone(), t.stride(), t.requires_grad) for name, t in tensors], {
        key: value for key, value in vars(model).items() if not key.startswith("_")
    }


def assert_equal(state, other):
    assert state[1] == other[1]
    for (*one, stride, flag), (*two, other_stride, other_flag) in zip(state[0], other[0], strict=True):
        assert one[:2] == two[:2] and torch.equal(one[2], two[2])
        assert (stride, flag) == (other_stride, other_flag)


def drop(*units):
    places = torch.tensor(units, dtype=torch.long)
    return {("conv.weight", 0): places, ("conv.bias", 0): places, ("scale", 0): places, ("conv.weight", 1): places}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("units", [(), (0,), (5, 1), (0, 1, 2, 3, 4)])
def test_what_was_cut_comes_back_bit_for_bit_as_it_lay_in_memory(units, memory_format, dtype):
    model = Small().to(dtype=dtype, memory_format=memory_format)
    model.conv.bias.requires_grad_(False)
    before = state(model)
    stays = [unit for unit in range(8) if unit not in units]
    weight = model.conv.weight[stays][:, stays[:-2]]
    cuts = Cuts.of(model, drop(*units), [(model, "width", 8 - len(units)), (model, "added", 1)])
    for _ in range(2):
        cuts.apply_()
        cuts.apply_()
        assert torch.equal(model.conv.weight, weight) and model.conv.weight.is_contiguous(memory_format=memory_format)
        assert not model.conv.bias.requires_grad and model.conv.weight.requires_grad
        assert (model.width, model.added, len(model.scale)) == (8 - len(units), 1, 8 - len(units))
        cuts.undo_()
        cuts.undo_()
        assert_equal(before, state(model))


def test_changes_of_what_stays_are_kept():
    model = Small()
    cuts = Cuts.of(model, drop(2), [])
    cuts.apply_()
    with torch.no_grad():
        model.conv.weight.zero_()
    cuts.undo_()
    assert int((model.conv.weight != 0).any((2, 3)).sum()) == 6 + 8 - 1  # of the unit that went


def test_an_exception_while_cutting_leaves_everything_as_it_was():
    model = Small()
    before = state(model)
    cuts = Cuts.of(model, drop(1), [(model, "width", 7), (model, "fixed", 7), (model, "added", 7)])
    with pytest.raises(AttributeError):
        cuts.apply_()
    assert_equal(before, state(model))
    assert not cuts.is_applied


@pytest.mark.parametrize("call", range(8))
def test_where_memory_ends_while_cutting_everything_is_as_it_was(call, monkeypatch):
    model, num_calls, select = Small(), 0, torch.Tensor.index_select
    before = state(model)

    def failing(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == call + 1:
            raise MemoryError
        return select(*args)

    monkeypatch.setattr(torch.Tensor, "index_select", failing)
    with pytest.raises(MemoryError):
        Cuts.of(model, drop(1), [(model, "width", 7)]).apply_()
    assert_equal(before, state(model))
