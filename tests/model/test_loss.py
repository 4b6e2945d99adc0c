from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.meter import Meter
from shoal.model import loss as loss_module
from shoal.model.loss import IGNORED, LinearCrossEntropy, linear_cross_entropy

ROWS, HIDDEN, VOCAB = 37, 6, 11


def case(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype) * scale
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[5:9] = IGNORED
    labels[20:30] = IGNORED  # with chunks of four, two of them have nothing that counts
    return x.requires_grad_(), weight.requires_grad_(), labels


def plain(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits = x @ weight.t()
    log_z = logits.logsumexp(1)[labels != IGNORED]
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") + z_loss * log_z.square().sum()


@pytest.mark.parametrize("z_loss", [0.0, 0.1], ids=["plain", "z-loss"])
@pytest.mark.parametrize("chunk_rows", [0, 1, 4, ROWS - 1, ROWS, 1000], ids="{}-rows".format)
def test_loss_and_gradients_equal_pytorchs_however_rows_are_chunked(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, z_loss: float
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK", chunk_rows * VOCAB)
    x, weight, labels = case()
    found, expected = linear_cross_entropy(x, weight, labels, z_loss), plain(x, weight, labels, z_loss)
    grads = [torch.autograd.grad(total * 0.3, (x, weight)) for total in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    assert grads[0][0][5:9].eq(0).all()


@pytest.mark.parametrize("z_loss", [0.0, 0.1], ids=["plain", "z-loss"])
def test_gradients_equal_finite_differences(z_loss: float) -> None:
    x, weight, labels = case()
    grads = torch.autograd.grad(linear_cross_entropy(x, weight, labels, z_loss), (x, weight))
    for number, grad in enumerate(grads):
        direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(number), dtype=grad.dtype)
        moved = [
            [t + sign * 1e-5 * direction if i == number else t for i, t in enumerate((x, weight))] for sign in (1, -1)
        ]
        up, down = (linear_cross_entropy(*one, labels, z_loss).item() for one in moved)
        assert (up - down) / 2e-5 == pytest.approx((grad * direction).sum().item(), rel=1e-8)


@pytest.mark.parametrize("which", [0, 1])
def test_what_needs_no_gradient_gets_none(which: int) -> None:
    inputs = case()
    inputs[1 - which].requires_grad_(False)
    linear_cross_entropy(*inputs).backward()
    (expected,) = torch.autograd.grad(plain(*inputs), inputs[which])
    torch.testing.assert_close(inputs[which].grad, expected)
    assert inputs[1 - which].grad is None


def test_an_evaluation_has_no_z_loss() -> None:
    x, weight, labels = case()
    loss = LinearCrossEntropy(z_loss=0.1)
    for training, z_loss in ((True, 0.1), (False, 0.0)):
        with torch.set_grad_enabled(training):
            found = loss(x[None], weight, labels[None])
        torch.testing.assert_close(found, plain(x, weight, labels, z_loss))


def test_the_gradients_of_many_chunks_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 each of the later ones would be off by as much as half of it is small."""
    x, weight, labels = case(torch.bfloat16)
    whole = torch.autograd.grad(linear_cross_entropy(x, weight, labels), weight)[0].float()
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *sizes: 1)
    apart = torch.autograd.grad(linear_cross_entropy(x, weight, labels), weight)[0].float()
    assert (apart - whole).norm() < 2**-8 * whole.norm()


def test_in_half_precision_only_the_logits_are_rounded() -> None:
    """Log-probabilities in bfloat16 would be off by 1/256 of each."""
    x, weight, labels = case(torch.bfloat16)
    found = linear_cross_entropy(x, weight, labels, 0.1)
    logits = (x @ weight.t()).double()
    expected = plain(logits, torch.eye(VOCAB, dtype=torch.float64), labels, 0.1)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, exact in zip(*(torch.autograd.grad(total, (x, weight)) for total in (found, expected)), strict=True):
        assert (grad - exact).norm() < 0.01 * exact.norm()


def test_when_nothing_counts_loss_and_gradients_are_zero() -> None:
    x, weight, _ = case()
    loss = linear_cross_entropy(x, weight, torch.full((ROWS,), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_logits_far_from_zero_do_not_overflow() -> None:
    x, weight, labels = case(torch.float32, scale=1e3)
    loss = linear_cross_entropy(x, weight, labels)
    loss.backward()
    torch.testing.assert_close(loss, plain(x, weight, labels))
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_second_backward_pass_is_refused_rather_than_scaled_twice() -> None:
    loss = linear_cross_entropy(*case()) * 2
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def scratch(*, grad: bool, hidden: int, rows: int = 512, vocab: int = 256) -> int:
    """Most elements alive at one moment, besides inputs, labels and the gradients that are to be kept."""
    x = torch.randn(rows, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    with Meter() as meter, torch.set_grad_enabled(grad):
        meter.label("given", (x, weight, labels))
        given = meter.live()
        loss = linear_cross_entropy(x if grad else x.detach(), weight, labels)
        if grad:
            loss.backward()
    kept = (x.numel() + weight.numel()) if grad else 0
    return (meter.peak() - given) // 4 - kept


def test_never_more_than_a_few_chunks_of_logits_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, their log-softmax, and the last chunk's: of all 512 rows' logits a fraction."""
    for rows in (8, 32):
        monkeypatch.setattr(loss_module, "CHUNK", rows * 256)
        assert rows * 256 <= scratch(grad=True, hidden=4) <= 3.2 * rows * 256


def test_without_grad_no_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of x and of the weight would be 512·64 and 256·64 elements more than three chunks of 64 rows."""
    monkeypatch.setattr(loss_module, "CHUNK", 256)
    assert scratch(grad=False, hidden=64) < 3.2 * 64 * 256
