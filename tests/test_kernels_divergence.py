"""The losses of rows and their gradient by the kernel are those of the definition."""

from functools import partial

import pytest
import torch
from torch import Tensor

from prunus.ops.divergence import divergence, divergence_, divergence_reference, divergence_reference_

triton = pytest.importorskip("triton", reason="kernels need triton")

from test_divergence import CASES, INF, labels_of, normal  # noqa: E402

from prunus.ops._triton import divergence as kernels  # noqa: E402

pytestmark = [
    pytest.mark.rounding,
    pytest.mark.filterwarnings("ignore:invalid value"),  # of numbers that the interpreter computes and a mask drops
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four classes, so that few classes are many blocks, the last of them ragged."""
    monkeypatch.setattr(kernels, "BLOCK", 4)


def run(logits: Tensor, expected: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
    losses = torch.full((len(logits), 3), torch.nan, device=DEVICE)
    kernels.divergence_(losses, logits, expected, labels, list(weights))
    return losses


def assert_same(logits: Tensor, expected: Tensor, labels: Tensor, *weights: Tensor) -> None:
    """Losses to a few units of float32, the gradient to one of its own dtype."""
    before, row_losses = logits.clone(), torch.stack(divergence_reference(logits, expected, labels), 1)
    sizes = torch.cat([logits.flatten(), expected.flatten()]).float().abs()
    scale = max([1.0, *sizes[sizes < 1e6].tolist()[:10_000]])
    close = partial(torch.testing.assert_close, rtol=2e-5, atol=4e-7 * scale, equal_nan=True)
    close(run(logits, expected, labels), row_losses)
    assert torch.equal(logits, before)
    if weights:
        row_losses = torch.stack(divergence_reference_(before, expected, labels, *weights), 1)
        close(run(logits, expected, labels, *weights), row_losses)
        unit = torch.finfo(logits.dtype).eps
        torch.testing.assert_close(logits, before, rtol=max(2e-5, unit), atol=max(2e-6, 1e-3 * unit), equal_nan=True)


def weights_of(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(0.5, 2, num_rows, device=DEVICE), torch.full((), 0.3, device=DEVICE).expand(num_rows)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_definition_to_rounding(case, types, monkeypatch):
    if case == "wide":
        monkeypatch.setattr(kernels, "BLOCK", 64)
    logits, expected = (each.to(DEVICE, dtype) for each, dtype in zip(CASES[case](), types, strict=True))
    assert_same(logits, expected, labels_of(logits), *weights_of(len(logits)))


@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 8, 9, 31])
def test_rows_of_any_length_are_covered_once(classes):
    logits, expected = (normal(3, classes).to(DEVICE, torch.float32) for _ in range(2))
    assert_same(logits, expected, torch.tensor([classes - 1, -100, 0], device=DEVICE), *weights_of(3))


@pytest.mark.parametrize("first", [0, 4, 8])
def test_a_block_that_is_banned_whole_has_no_probability(first):
    logits, expected = (normal(3, 10).to(DEVICE, torch.float32) for _ in range(2))
    expected[:, first : first + 4] = -INF
    assert_same(logits.clone(), expected, torch.full((3,), -100, device=DEVICE), *weights_of(3))
    logits[:, first : first + 4] = -INF
    assert_same(logits.clone(), expected, torch.full((3,), -100, device=DEVICE), *weights_of(3))
    logits[0, first : first + 4] = torch.finfo(torch.float32).min
    expected[1, first : first + 4] = torch.finfo(torch.float32).min
    assert_same(logits, expected, torch.full((3,), -100, device=DEVICE), *weights_of(3))


def test_what_is_expected_and_impossible_is_infinite_and_what_is_nan_is_not_hidden():
    logits, expected = (normal(4, 10).to(DEVICE, torch.float32) for _ in range(2))
    logits[0, 3], logits[1, 5], expected[2, 9] = -INF, torch.nan, torch.nan
    losses = run(logits, expected, torch.full((4,), -100, device=DEVICE), *weights_of(4))[:, 0]
    assert losses[0] == INF and losses[1:3].isnan().all() and losses[3].isfinite()
    assert logits[[0, 3]].isfinite().all() and logits[1:3].isnan().all()


def test_a_row_that_does_not_count_is_zero_whatever_it_holds():
    logits, expected = (normal(5, 10).to(DEVICE, torch.bfloat16) for _ in range(2))
    logits[1], expected[3] = torch.nan, INF
    soft, labels = torch.tensor([1.0, 0, 1, 0, 0], device=DEVICE), torch.tensor([1, -100, 2, -100, 3], device=DEVICE)
    losses = run(logits, expected, labels, soft, weights_of(5)[1])
    assert not logits[[1, 3]].any() and not losses[[1, 3]].any()
    assert logits.isfinite().all() and losses.isfinite().all() and logits[4].any()


def test_a_label_that_is_no_class_is_nan_and_reads_nothing_outside():
    logits, expected = (normal(3, 10).to(DEVICE, torch.float32) for _ in range(2))
    losses = run(logits, expected, torch.tensor([10, -1, 9], device=DEVICE))
    assert losses[:2, 1:].isnan().all() and losses[:, 0].isfinite().all() and losses[2].isfinite().all()


def test_rows_of_wider_tensors_are_overwritten_and_nothing_beside_them():
    wide, expected = normal(5, 16).to(DEVICE, torch.float32), normal(5, 13).to(DEVICE, torch.float32)[:, 1:12]
    before = wide.clone()
    assert_same(wide[:, 2:13], expected, torch.full((5,), 3, device=DEVICE), *weights_of(5))
    assert torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, 13:], before[:, 13:])


@pytest.mark.parametrize("classes", [50_257, 151_936])
def test_a_vocabulary_in_blocks_of_their_usual_size(classes, monkeypatch):
    monkeypatch.undo()
    logits, expected = ((3 * normal(2, classes)).to(DEVICE, torch.bfloat16) for _ in range(2))
    assert_same(logits, expected, torch.tensor([classes - 1, 5], device=DEVICE), *weights_of(2))


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_rows_on_a_gpu_take_the_kernel_and_those_of_float64_the_definition(types, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("prunus.ops._triton.divergence.divergence_", None)
    wide = [normal(3, 9).cuda() for _ in range(2)]
    divergence(*wide), divergence_(*wide)
    logits, expected = (each.to(dtype) for each, dtype in zip(wide, types, strict=True))
    with pytest.raises(TypeError):
        divergence(logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("classes", [10, 1000, 50_257, 128_256])
def test_many_rows_on_a_gpu_are_those_of_the_definition(classes, types, monkeypatch):
    monkeypatch.undo()
    logits, expected = (5 * torch.randn(700, classes + 7, device="cuda").to(dtype)[:, :classes] for dtype in types)
    labels = torch.randint(classes, (700,), device="cuda").masked_fill_(torch.rand(700, device="cuda") < 0.2, -100)
    assert_same(logits, expected, labels, *weights_of(700))
