"""A model whose blocks stay on disk computes as one in memory, and one block at a time is there."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from prunus.eligible import eligible
from prunus.oneshot.disk_offload import DiskOffload, disk_offload_of, nothing_like, opened
from prunus.oneshot.offload import Offload


class Chain(nn.Module):
    """Blocks in a row, the last two of which share a layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Tanh()) for _ in range(4))
        shared = nn.Linear(4, 4, dtype=dtype)
        for block in self.blocks[2:]:
            block.append(shared)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def on_disk(dtype=torch.float32):
    """A model in memory, the same one on disk, and its offload."""
    held, model = Chain(dtype), Chain(dtype)
    values = {name: value.detach().clone() for name, value in held.named_parameters()}
    return held, model, DiskOffload(model, list(model.blocks), lambda name: values[name].clone())


def is_here(block):
    return not bool(block[0].weight.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_computes_what_the_model_in_memory_does(dtype):
    held, model, offload = on_disk(dtype)
    x = torch.randn(5, 3).to(dtype)
    for _ in range(2):
        with opened(model):
            assert torch.equal(model(x), held(x))
    assert offload.num_reads == 8 and disk_offload_of(model) is offload and disk_offload_of(held) is None


@pytest.mark.parametrize("is_on_disk_first", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moved_to_a_device_it_computes_the_same_whichever_was_opened_first(device, is_on_disk_first):
    held, model, offload = on_disk()
    moved, x = Offload(model, eligible(model).weights, torch.device(device)), torch.randn(5, 3)
    expected = held(x)
    with ExitStack() as stack:
        if is_on_disk_first:
            stack.enter_context(opened(model))
        stack.enter_context(moved.open())
        stack.enter_context(opened(model))
        for _ in range(2):
            assert torch.allclose(model(x.to(device)).cpu(), expected, rtol=1e-5, atol=1e-6)
        for _ in range(2):  # of samples that pass one block after another
            y = model.blocks[0](held.first(x).to(device)).cpu()
            assert torch.allclose(y, held.blocks[0](held.first(x)), rtol=1e-5, atol=1e-6)
    assert not any(is_here(block) for block in model.blocks) and offload.num_reads == 9


def test_blocks_that_are_lists_of_layers_are_read_before_their_first_layer_runs():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(3, 3) for _ in range(2)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                for layer in block:
                    x = layer(x)
            return x

    held, model = Lists(), Lists()
    offload = DiskOffload(model, list(model.blocks), lambda name: held.get_parameter(name).detach().clone())
    x = torch.randn(2, 3)
    with opened(model):
        assert torch.equal(model(x), held(x)) and offload.num_reads == 3


def test_one_block_is_in_memory_while_it_runs_and_none_afterwards():
    _, model, _ = on_disk()
    here = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: here.append([is_here(block) for block in model.blocks]))
    with opened(model), opened(model):
        model(torch.randn(1, 3))
    assert here == [[i == k for i in range(4)] for k in range(4)]
    assert not any(map(is_here, model.blocks))


def test_between_uses_a_parameter_has_its_shape_and_type_but_one_element_of_memory_which_is_nan():
    _, model, offload = on_disk(torch.bfloat16)
    assert sorted(offload.names) == sorted(
        f"blocks.{i}.0.{name}" for i in range(4) for name in ("weight", "bias")
    )  # what two blocks share stays
    for name, parameter in model.named_parameters():
        if name in offload.names:
            assert parameter.dtype == torch.bfloat16 and parameter.isnan().all()
            assert parameter.untyped_storage().nbytes() == 2
        else:
            assert not parameter.isnan().any()
    assert model(torch.randn(1, 3, dtype=torch.bfloat16)).isnan().all()  # it is not open
    assert [offload.num_bytes(block) for block in model.blocks] == [2 * (16 + 4)] * 4


@pytest.mark.parametrize("like", [torch.zeros(0, 3), torch.zeros(()), torch.zeros(2, 3, dtype=torch.int8)])
def test_placeholders_take_one_element_of_any_shape_and_type(like):
    value = nothing_like(like)
    assert value.shape == like.shape and value.dtype == like.dtype
    assert value.untyped_storage().nbytes() == like.element_size()


def test_changes_last_while_a_block_is_held_and_are_lost_when_it_is_dropped():
    held, model, offload = on_disk()
    weight, x = model.blocks[1][0].weight, torch.randn(2, 3)
    with opened(model), torch.no_grad():
        with offload.holding(["blocks.1.0.weight", "first.weight"]):
            weight.zero_()
            model(x)
            assert bool((weight == 0).all())
        model(x)
        assert torch.equal(model(x), held(x))
    assert weight.isnan().all()


def test_stored_values_replace_those_on_disk_but_not_the_ones_that_were_read_before():
    held, model, offload = on_disk()
    name, x = "blocks.1.0.weight", torch.randn(2, 3)
    before = offload.now()
    offload.stored[name] = lambda name: torch.zeros(4, 4)
    with torch.no_grad(), opened(model):
        with offload.reading(before):
            assert torch.equal(model(x), held(x))
        held.blocks[1][0].weight.zero_()
        assert torch.equal(model(x), held(x))
    assert bool((offload.value(name) == 0).all()) and not bool((before(name) == 0).any())
    assert bool((offload.now()(name) == 0).all())


def test_an_error_in_a_forward_leaves_no_block_in_memory_and_no_hook():
    _, model, _ = on_disk()
    with pytest.raises(RuntimeError), opened(model):
        model(torch.randn(1, 2))
    assert not any(map(is_here, model.blocks)) and not any(block._forward_pre_hooks for block in model.blocks)


@pytest.mark.parametrize("value", [torch.zeros(4, 5), torch.zeros(4, 4, dtype=torch.float16)])
def test_values_of_another_shape_or_type_are_refused_by_name(value):
    _, model, offload = on_disk()
    offload.stored["blocks.2.0.weight"] = lambda name: value
    with pytest.raises(OSError, match=r"blocks\.2\.0\.weight is .* on disk, but .* in the model"), opened(model):
        model(torch.randn(1, 3))
