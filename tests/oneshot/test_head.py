"""The loss from hidden states, in parts, is the loss of whole logits: its value, its gradients, and no logits stay."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prunus.oneshot import head as module
from prunus.oneshot.head import Head, head_divergence, head_qualities

pytestmark = pytest.mark.rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAW = torch.Generator().manual_seed(0)
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of the teacher for six of the student, so that few tokens are many parts."""
    monkeypatch.setattr(module, "LOGITS", 1)
    monkeypatch.setattr(module, "ROWS", 2)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def case(tokens=(3, 7), width=5, teacher=6, classes=11, bias=True, dtype=torch.float64) -> dict:
    """Hidden states and heads of a student, which learns all, and of a teacher of another width."""
    parts = {
        "hidden": normal(*tokens, width),
        "weight": normal(classes, width),
        "bias": normal(classes) if bias else None,
        "expected": normal(*tokens, teacher),
        "expected_weight": normal(classes, teacher),
        "expected_bias": normal(classes) if bias else None,
    }
    parts = {name: None if each is None else each.to(DEVICE, dtype) for name, each in parts.items()}
    for name in ("hidden", "weight", "bias"):
        if parts[name] is not None:
            parts[name].requires_grad_()
    return parts


def trained(parts: dict) -> list[Tensor]:
    return [parts[name] for name in ("hidden", "weight", "bias") if parts[name] is not None]


def loss_of(parts: dict, **options) -> Tensor:
    head, expected_head = Head(parts["weight"], parts["bias"]), Head(parts["expected_weight"], parts["expected_bias"])
    return head_divergence(parts["hidden"], head, parts["expected"], expected_head, **options)


def whole_loss(parts: dict, mask=None, labels=None, hard=0.0, soft=1.0, total=None) -> tuple[Tensor, list[Tensor]]:
    """From whole logits in float64, by torch's own functions, with the gradients of all that learns."""
    parts = {name: None if each is None else each.detach().double().clone() for name, each in parts.items()}
    for each in (learns := trained(parts)):
        each.requires_grad_()
    logits = F.linear(parts["hidden"], parts["weight"], parts["bias"]).flatten(0, -2)
    expected = F.linear(parts["expected"], parts["expected_weight"], parts["expected_bias"]).flatten(0, -2)
    counts = torch.ones(len(logits), dtype=torch.bool, device=DEVICE) if mask is None else mask.flatten().bool()
    logits, expected = logits[counts], expected[counts]
    loss = F.kl_div(logits.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True)
    loss = soft * loss / (total or counts.sum())
    if labels is not None:
        labels = labels.flatten()[counts]
        loss = loss + hard * F.cross_entropy(logits, labels, reduction="sum") / (total or (labels != -100).sum())
    loss.backward()
    return loss.detach(), [each.grad for each in learns]


def assert_same(parts: dict, tolerance: float, options: dict) -> None:
    loss = loss_of(parts, **options)
    (3 * loss).backward()
    right, grads = whole_loss(parts, **options)
    torch.testing.assert_close(loss.detach().double(), right, rtol=tolerance, atol=tolerance)
    for each, grad in zip(trained(parts), grads, strict=True):
        assert each.grad.dtype == each.dtype
        torch.testing.assert_close(
            each.grad.double(), 3 * grad, rtol=tolerance, atol=3 * tolerance * grad.abs().max().item()
        )


def labels_for(tokens: tuple[int, ...], classes: int = 11) -> Tensor:
    labels = torch.randint(classes, tokens, generator=DRAW)
    return labels.masked_fill(torch.rand(tokens, generator=DRAW) < 0.3, -100).to(DEVICE)


def mask_for(tokens: tuple[int, ...]) -> Tensor:
    return (torch.rand(tokens, generator=DRAW) < 0.6).to(DEVICE)


OPTIONS = {
    "divergence": lambda tokens: {},
    "mask": lambda tokens: {"mask": mask_for(tokens)},
    "mask of ones": lambda tokens: {"mask": torch.ones(tokens, dtype=torch.long, device=DEVICE)},
    "labels": lambda tokens: {"labels": labels_for(tokens), "hard": 0.4, "soft": 0.6},
    "labels alone": lambda tokens: {"labels": labels_for(tokens), "hard": 1.0, "soft": 0.0},
    "labels, mask": lambda tokens: {"labels": labels_for(tokens), "mask": mask_for(tokens), "hard": 2.0},
    "total": lambda tokens: {"labels": labels_for(tokens), "mask": mask_for(tokens), "hard": 2.0, "total": 50.0},
    "total of a tensor": lambda tokens: {"total": torch.tensor(40, device=DEVICE)},
    "labels that do not count": lambda tokens: {"labels": labels_for(tokens)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_whole_logits(name, dtype):
    assert_same(case(dtype=dtype), DTYPES[dtype], OPTIONS[name]((3, 7)))


SHAPES = {
    "one token": {"tokens": (1, 1)},
    "tokens alone": {"tokens": (9,)},
    "three dimensions": {"tokens": (2, 3, 2)},
    "one class": {"classes": 1},
    "one feature": {"width": 1, "teacher": 1},
    "no bias": {"bias": False},
    "many classes": {"classes": 301, "tokens": (2, 5)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_gives_the_loss_of_whole_logits(name):
    parts = case(**SHAPES[name])
    tokens = parts["hidden"].shape[:-1]
    options = {"labels": labels_for(tokens, len(parts["weight"])).clamp(min=0), "hard": 0.5}
    assert_same(parts, 1e-12, options)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 100])
def test_parts_of_any_size_give_the_same_loss(rows, monkeypatch):
    monkeypatch.setattr(module, "ROWS", rows)
    assert_same(case(), 1e-12, OPTIONS["labels, mask"]((3, 7)))


def test_inputs_that_are_not_contiguous_are_read_and_get_their_gradients():
    parts = case()
    wide = normal(7, 3, 10).to(DEVICE).requires_grad_()
    parts["hidden"] = wide.transpose(0, 1)[..., ::2]
    parts["hidden"].retain_grad()
    parts["expected"] = normal(6, 7, 3).to(DEVICE).permute(2, 1, 0)
    parts["weight"] = normal(5, 11).to(DEVICE).T.requires_grad_()
    parts["expected_weight"] = normal(11, 12).to(DEVICE)[:, ::2]
    assert_same(parts, 1e-12, OPTIONS["mask"]((3, 7)))
    assert wide.grad.shape == wide.shape


def test_no_tokens_that_count_are_a_loss_of_zero_with_gradients_of_zero():
    for options in ({"mask": torch.zeros(3, 7)}, {"labels": torch.full((3, 7), -100), "hard": 1.0, "soft": 0.0}):
        parts = case()
        loss = loss_of(
            parts, **{name: each.to(DEVICE) if isinstance(each, Tensor) else each for name, each in options.items()}
        )
        loss.backward()
        assert loss == 0 and not any(each.grad.any() for each in trained(parts))


def test_an_empty_batch_has_a_loss_of_zero():
    for tokens in ((0,), (2, 0)):
        parts = case(tokens=tokens)
        loss = loss_of(parts)
        loss.backward()
        assert loss == 0 and parts["hidden"].grad.shape == parts["hidden"].shape and not parts["weight"].grad.any()
        with torch.no_grad():
            assert loss_of(parts) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_that_do_not_count_may_hold_nan(dtype):
    parts, options = case(dtype=dtype), {"mask": mask_for((3, 7)), "labels": labels_for((3, 7)), "hard": 1.0}
    clean = loss_of(parts, **options)
    grads = torch.autograd.grad(clean, trained(parts))
    with torch.no_grad():
        parts["hidden"][~options["mask"]], parts["expected"][~options["mask"]] = torch.nan, torch.inf
    options["labels"] = options["labels"].masked_fill(~options["mask"], 10**6)
    loss = loss_of(parts, **options)
    assert torch.equal(loss, clean)
    for grad, right in zip(torch.autograd.grad(loss, trained(parts)), grads, strict=True):
        assert torch.equal(grad, right)
    assert not grads[0][~options["mask"]].any()


def test_banned_classes_give_a_finite_loss_and_gradient():
    parts = case()
    with torch.no_grad():
        parts["expected_bias"][2:5] = -torch.inf
        parts["bias"][2:4] = -torch.inf
    loss = loss_of(parts)
    loss.backward()
    assert loss.isfinite() and all(each.grad.isfinite().all() for each in trained(parts))
    assert not parts["weight"].grad[2:4].any() and parts["weight"].grad[4].any()


@pytest.mark.parametrize("learns", ["hidden", "weight", "bias"])
def test_what_does_not_learn_gets_no_gradient_and_costs_none(learns):
    parts = case()
    right = whole_loss(parts)[1][["hidden", "weight", "bias"].index(learns)]
    for name in {"hidden", "weight", "bias"} - {learns}:
        parts[name].requires_grad_(False)
    loss_of(parts).backward()
    torch.testing.assert_close(parts[learns].grad, right)
    assert sum(each.grad is not None for each in trained(parts)) == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_without_gradients_the_loss_is_the_same(name):
    parts, options = case(), OPTIONS[name]((3, 7))
    right = loss_of(parts, **options)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(parts, **options), right)
    for each in trained(parts):
        each.requires_grad_(False)
    assert not loss_of(parts, **options).requires_grad


def test_backward_can_be_repeated_and_gives_the_same():
    parts = case()
    loss = loss_of(parts)
    first = torch.autograd.grad(loss, trained(parts), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, trained(parts))))


def test_a_second_derivative_is_refused():
    parts = case()
    (grad,) = torch.autograd.grad(loss_of(parts).square(), parts["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_teacher_gets_no_gradient():
    parts = case()
    for name in ("expected", "expected_weight", "expected_bias"):
        parts[name].requires_grad_()
    loss_of(parts).backward()
    assert all(parts[name].grad is None for name in ("expected", "expected_weight", "expected_bias"))


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_logits_have_its_dtype_and_weights_sum_up_in_their_own(dtype, is_on):
    parts = case(tokens=(6, 10), dtype=torch.float32)
    with torch.autocast(DEVICE, dtype) if is_on else nullcontext():
        loss = loss_of(parts)
    loss.backward()
    _, grads = whole_loss(parts)
    assert loss.dtype == torch.float32
    tolerance = DTYPES[dtype if is_on else torch.float32]
    for each, grad in zip(trained(parts), grads, strict=True):
        assert each.grad.dtype == torch.float32
        error = (each.grad - grad).norm() / grad.norm()
        assert error < tolerance and (not is_on or error > 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_parts_in_half_precision_lose_nothing(dtype, monkeypatch):
    """Parts add 1.5 each to a sum of 256, to which bfloat16 would add 2."""
    monkeypatch.setattr(module, "ROWS", 1)
    expected, scale = torch.ones(121, 1, device=DEVICE, dtype=dtype), 1024.0
    expected[0] = 512
    hidden, weight = expected.clone().requires_grad_(), torch.zeros(2, 1, device=DEVICE, dtype=dtype).requires_grad_()
    teacher = Head(torch.tensor([[20.0], [0.0]], device=DEVICE, dtype=dtype))
    (scale * head_divergence(hidden, Head(weight), expected, teacher)).backward()
    sums = weight.grad.double() * 121 / scale
    torch.testing.assert_close(sums, sums.new_tensor([[-316.0], [316.0]]), rtol=1e-2, atol=0)


def test_qualities_are_the_sums_of_the_losses():
    parts, options = case(), OPTIONS["labels, mask"]((3, 7))
    mask, labels = options["mask"], options["labels"]
    heads = Head(parts["weight"], parts["bias"]), Head(parts["expected_weight"], parts["expected_bias"])
    sums = head_qualities(parts["hidden"], heads[0], parts["expected"], heads[1], mask, labels)
    counted = labels[mask]
    logits = [
        F.linear(parts[name], each.weight, each.bias)[mask]
        for name, each in zip(("hidden", "expected"), heads, strict=True)
    ]
    right = [
        F.kl_div(logits[0].log_softmax(-1), logits[1].log_softmax(-1), reduction="sum", log_target=True),
        *(F.cross_entropy(each, counted, reduction="sum") for each in logits),
        mask.sum(),
        (counted != -100).sum(),
    ]
    for each, value in zip(sums, right, strict=True):
        assert each.dtype == torch.float64 and not each.requires_grad
        torch.testing.assert_close(each, value.detach().double())
    unlabelled = head_qualities(parts["hidden"], heads[0], parts["expected"], heads[1])
    assert unlabelled.num_tokens == 21 and unlabelled.num_labels == unlabelled.cross_entropy == 0


BAD = {
    "same classes": lambda parts: parts | {"expected_weight": normal(12, 6), "expected_bias": normal(12)},
    "expected must have one value for each token": lambda parts: parts | {"expected": normal(3, 8, 6)},
}


@pytest.mark.parametrize("message", BAD)
def test_a_pair_that_does_not_fit_is_refused(message):
    with pytest.raises(ValueError, match=message):
        loss_of(BAD[message](case()))
    with pytest.raises(ValueError, match="mask must have one value for each token"):
        loss_of(case(), mask=torch.ones(3, 1))
    with pytest.raises(ValueError, match="but no labels were given"):
        loss_of(case(), hard=0.5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        self.numel = max([self.numel, *(each.numel() for each in tensors)])
        return output


@pytest.mark.parametrize("grad", [False, True])
def test_no_logits_of_all_tokens_exist(grad):
    parts = case(tokens=(20, 10), classes=50, bias=False)
    with torch.set_grad_enabled(grad), Largest() as largest:
        loss = loss_of(parts, mask=mask_for((20, 10)), labels=labels_for((20, 10)), hard=1.0)
        if grad:
            loss.backward()
    assert largest.numel == max(each.numel() for each in (parts["hidden"], parts["expected"])) < 20 * 10 * 50 / 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_vocabulary_of_128_k_adds_at_most_a_gibibyte(dtype, monkeypatch):
    monkeypatch.undo()
    shape, classes, width = (16, 2048), 128_256, 512
    hidden, expected = (torch.randn(*shape, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = [torch.randn(classes, width, device="cuda", dtype=each) / 16 for each in (dtype, torch.bfloat16)]
    hidden.requires_grad_(), weights[0].requires_grad_()
    labels = torch.randint(classes, shape, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss = head_divergence(hidden, Head(weights[0]), expected, Head(weights[1]), labels=labels, hard=0.5)
    loss.backward()
    added = torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes - weights[0].grad.nbytes
    assert added <= 1 << 30 and loss.isfinite()
