"""The kernels of the masked AdamW step compute what its definition says; over ranks, what one step of all would."""

import pytest
import torch

from prunus import AdamWPrune, Spam
from prunus.ops import bits
from prunus.optim import Update, adamw_, spike_clipped

triton = pytest.importorskip("triton", reason="kernels need triton")

from prunus.ops._triton.adamw import AdamWStep, Extras, Operand  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(37, 41), (8, 128), (3,), (5, 5, 7)]


@pytest.mark.rounding
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("extras", [Extras(), Extras(max_norm=0.5), Extras(theta=2.0)], ids=["plain", "clip", "spam"])
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_the_step_is_its_definition(masked, extras, types):
    weight_type, moment_type = types
    numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1)
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(DEVICE, weight_type) for shape in SHAPES]
    keeps = [torch.rand(shape, device=DEVICE) > 0.5 for shape in SHAPES]
    moments = [[torch.zeros(shape, dtype=moment_type, device=DEVICE) for shape in SHAPES] for _ in range(2)]
    counts = [torch.zeros((), device=DEVICE) for _ in SHAPES]
    wide, wide_moments = [w.float() for w in weights], [[m.clone() for m in part] for part in moments]
    step = AdamWStep()
    for number in range(1, 4):
        grads = [torch.randn(shape).to(DEVICE, weight_type) for shape in SHAPES]
        masks = [bits.pack(keep) if masked else None for keep in keeps]
        rows = zip(weights, grads, *moments, counts, masks, strict=True)
        norm = step([Operand(*row, numbers) for row in rows], extras, tile=512)
        seen = [g.float() * keep if masked else g.float() for g, keep in zip(grads, keeps, strict=True)]
        if extras.max_norm:
            length = torch.stack([g.norm() for g in seen]).norm()
            assert torch.allclose(norm, length, rtol=1e-5)
            seen = [g * min(1.0, extras.max_norm / (length.item() + 1e-6)) for g in seen]
        for i, grad in enumerate(seen):
            m, v = wide_moments[0][i], wide_moments[1][i]
            grad = spike_clipped(grad, v, extras.theta) if extras.theta else grad
            adamw_(wide[i], grad, m, v, Update(*numbers, number))
            if weight_type == torch.bfloat16:
                wide[i] = wide[i].to(weight_type).float()
            ulp = torch.finfo(weight_type).eps
            assert torch.allclose(weights[i].float(), wide[i], rtol=4 * ulp, atol=ulp)
            assert torch.allclose(moments[0][i], m, rtol=1e-5, atol=1e-7)
            assert torch.allclose(moments[1][i], v, rtol=1e-5, atol=1e-9)
            assert counts[i].item() == number


def test_a_step_with_infinite_gradients_is_skipped_and_scales_are_taken_off():
    weight, grad = torch.ones(40, device=DEVICE), torch.full((40,), 8.0, device=DEVICE)
    moments = [torch.zeros(40, device=DEVICE) for _ in range(2)]
    count, step = torch.zeros((), device=DEVICE), AdamWStep()
    part = Operand(weight, grad, *moments, count, None, (0.1, 0.9, 0.99, 1e-8, 0.0))
    scale = torch.tensor(8.0, device=DEVICE)
    step([part], Extras(grad_scale=scale, found_inf=torch.ones((), device=DEVICE)), tile=512)
    assert count.item() == 0 and torch.equal(weight, torch.ones_like(weight)) and not moments[0].any()
    step([part], Extras(grad_scale=scale, found_inf=torch.zeros((), device=DEVICE)), tile=512)
    assert count.item() == 1 and torch.allclose(moments[0], torch.full_like(weight, 0.1))


def operand(grad, keep, is_owner):
    """That of a first step for a weight of 1."""
    moments = torch.zeros_like(grad), torch.zeros_like(grad)
    count, numbers = torch.zeros((), device=DEVICE), (1e-2, 0.9, 0.99, 1e-8, 0.1)
    return Operand(torch.ones_like(grad), grad, *moments, count, bits.pack(keep), numbers, is_owner=is_owner)


@pytest.mark.parametrize("owned", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_norm_over_ranks_has_the_squares_of_others_and_of_what_this_rank_owns(owned, scale):
    torch.manual_seed(0)
    shapes = [(37, 41), (8, 128)]
    grads = [torch.randn(shape, device=DEVICE) for shape in shapes]
    keeps = [torch.rand(shape, device=DEVICE) > 0.5 for shape in shapes]
    others, handed = 900.0, []

    def total(squares):
        handed.append(squares.clone())
        return squares + others

    grad_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    given = [*map(operand, grads, keeps, owned)]
    norm = AdamWStep()(given, Extras(max_norm=0.5, grad_scale=grad_scale, total=total), tile=512)
    kept = [grad * keep for grad, keep in zip(grads, keeps, strict=True)]
    squares = sum(float(grad.square().sum()) for grad, own in zip(kept, owned, strict=True) if own)
    length = (squares + others) ** 0.5 / (scale or 1.0)
    assert len(handed) == 1 and handed[0].shape == (1,)
    assert handed[0].item() == pytest.approx(squares, rel=1e-5) and norm.item() == pytest.approx(length, rel=1e-5)
    for part, grad in zip(given, kept, strict=True):  # owned or not, every weight is updated
        clipped = grad / (scale or 1.0) * min(1.0, 0.5 / (length + 1e-6))
        assert torch.allclose(part.exp_avg, 0.1 * clipped, rtol=1e-4, atol=1e-8)
        assert part.step.item() == 1 and not part.exp_avg[grad == 0].any()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_optimizers_step_goes_by_elements_and_not_by_memory(max_norm):
    """Kernels read memory in order, which of channels_last is not the order that masks count in."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(6, 5, 3, 3, device=DEVICE).to(memory_format=layout))
        keep = torch.rand(weight.shape, device=DEVICE) > 0.5
        optimizer = AdamWPrune([weight], max_norm=max_norm)
        optimizer._on_gpu = True  # here too: by kernels
        optimizer.state[weight]["mask"] = bits.pack(keep)
        weight.data.mul_(keep)
        for _ in range(3):
            weight.grad = torch.randn(weight.shape, device=DEVICE).to(memory_format=layout)
            optimizer.step()
        state = optimizer.state[weight]
        assert weight.is_contiguous(memory_format=layout) and torch.equal(weight != 0, keep)
        ends.append([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(*ends, strict=True))


def test_spam_counts_no_step_that_a_scaler_skips():
    weight = torch.nn.Parameter(torch.ones(40, device=DEVICE))
    optimizer = AdamWPrune([weight], spam=Spam(every=3, warmup=2, hold=1))
    optimizer._on_gpu = True  # here too: by kernels
    scaler, counted = torch.amp.GradScaler(DEVICE, init_scale=8.0), []
    for factor in (1.0, float("inf"), 1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        counted.append((optimizer.num_steps, optimizer.state[weight]["step"].item()))
    assert counted == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_rate_on_the_gpu_is_read_as_what_it_is(dtype):
    ends = []
    for rate in (torch.tensor(0.125, dtype=dtype, device="cuda"), 0.125):
        weight = torch.nn.Parameter(torch.ones(40, device="cuda"))
        weight.grad = torch.ones_like(weight)
        AdamWPrune([weight], lr=rate).step()
        ends.append(weight.detach())
    assert torch.equal(*ends)
