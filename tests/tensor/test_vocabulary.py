from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import Array, assert_same
from vocabularies import ROWS_DIVIDED, Case, differences, plain

from shoal.comm.differentiable import part_size
from shoal.comm.world import World
from shoal.meter import Meter
from shoal.model import loss as loss_module
from shoal.model.loss import IGNORED
from shoal.tensor.ports import Ports, Repeated, Still
from shoal.tensor.vocabulary import Vocabulary, VocabularyCrossEntropy
from shoal.train.pool import Pool

# ---- loss --------------------------------------------------------------------------------------------------


def loss_and_gradients(world: World, case: Case) -> tuple[float, Array, Array, float]:
    """The loss, its gradients times 0.3, and the words moved."""
    x, weight, labels = case.tensors()
    labels = case.own_samples(world).of(labels, IGNORED)
    mine, own = case.stream(world, x, 9.0).requires_grad_(), case.matrix(world, weight).requires_grad_()
    before, loss_module.CHUNK = loss_module.CHUNK, loss_module.CHUNK if case.chunk is None else case.chunk
    try:
        loss = case.cross_entropy(world)(mine, own, labels)
    finally:
        loss_module.CHUNK = before
    (loss * 0.3).backward()
    assert mine.grad is not None
    assert own.grad is not None
    return loss.item(), mine.grad.numpy(), own.grad.numpy(), world.ledger.words()


LONG = {"ranks": 2, "samples": 1, "length": 40, "vocab": 40, "chunk": 0}  # chunks as small as they get
CASES = [
    Case(),
    Case(chunk=0),  # the smallest there are: as many rows as the hidden size
    Case(chunk=24),
    Case(3, "positions"),
    Case(3, "positions", chunk=0),
    Case(4, "positions", chunk=24),
    Case(4, "positions", length=1, vocab=13),
    Case(3, "features"),
    Case(4, "features", chunk=0, hidden=8),
    Case(4, "features", vocab=5, hidden=8),
    Case(3, "samples"),  # one rank has none
    Case(2, "samples", samples=5, chunk=0),
    Case(4, "samples", samples=4, hidden=8, chunk=24),
    Case(3, "terms"),
    Case(3, "terms", chunk=0),  # rows of a chunk that ranks do not divide
    Case(4, "terms", samples=1, length=3, hidden=8),  # one rank has no rows
    *(Case(**LONG, kind=kind) for kind in ("repeated", "positions", "features", "samples", "terms")),  # type: ignore[arg-type]
    Case(1),
    Case(1, "positions"),
    *(Case(kind=kind, masked=True) for kind in ("repeated", "positions", "features", "samples", "terms")),
    *(Case(kind=kind, z_loss=0.1) for kind in ("repeated", "features", "samples", "terms")),
    Case(4, "positions", z_loss=0.1, chunk=24),
    Case(**LONG, z_loss=0.1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", CASES, ids=differences)
def test_loss_and_gradients_equal_pytorchs_however_rows_are_chunked(pool: Pool, case: Case) -> None:
    x, weight, labels = case.tensors()
    expected = plain(x.requires_grad_(), weight.requires_grad_(), labels, case.z_loss)
    grad_x, grad_weight = torch.autograd.grad(expected * 0.3, (x, weight))
    losses, of_x, of_weight, words = zip(*pool.run(loss_and_gradients, case, ranks=case.ranks), strict=True)
    assert_same(case.total(losses), expected.item())
    assert_same(case.streams(of_x), grad_x)
    assert_same(case.matrices(of_weight), grad_weight)
    # Several chunks of terms have padding each; all else moves the same however rows are chunked.
    if case.chunk is None or case.kind != "terms":
        assert words == pytest.approx([case.words()] * case.ranks, rel=1e-12)


def known_logits(world: World) -> tuple[float, list[list[float]]]:
    """The hidden states are the unit vectors, so that the logits are the output matrix, transposed, and the gradient of
    the matrix is that of the logits."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    rows = logits.t().split(2)[world.rank].clone().requires_grad_()
    loss = VocabularyCrossEntropy(Ports(Repeated(world.everyone), Still(), Still()), Vocabulary(4, world.everyone))
    total = loss(torch.eye(2, dtype=torch.float64)[None], rows, torch.tensor([[2, 0]]))
    total.backward()
    assert rows.grad is not None
    return total.item(), rows.grad.t().tolist()


def test_two_positions_over_four_tokens_on_two_ranks_by_hand(pool: Pool) -> None:
    (loss, left), (other, right) = pool.run(known_logits, ranks=2)
    assert loss == other == pytest.approx(1.4401897 + 1.00640887, abs=1e-7)
    gradient = torch.cat([torch.tensor(left), torch.tensor(right)], 1)
    expected = [[0.0320586, 0.0871443, -0.7631172, 0.6439143], [-0.6344707, 0.1344707, 0.1344707, 0.3655293]]
    torch.testing.assert_close(gradient, torch.tensor(expected), rtol=0, atol=1e-7)


def test_logits_far_from_zero_neither_overflow_nor_lose_the_loss(pool: Pool) -> None:
    case = Case(scale=1e4, dtype=torch.float32, ranks=2)
    x, weight, labels = case.tensors()
    expected = plain(x.double(), weight.double(), labels).item()
    for loss, grad_x, grad_weight, _ in pool.run(loss_and_gradients, case, ranks=2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert all(torch.from_numpy(gradient).isfinite().all() for gradient in (grad_x, grad_weight))


def beside_an_overflow(world: World, case: Case) -> tuple[float, Array, Array]:
    """The loss and its gradients, where logits of a row that does not count are more than there are numbers for."""
    x, weight, labels = case.tensors()
    x[0, 3] = 1e308
    labels = case.own_samples(world).of(labels, IGNORED)
    mine, own = case.stream(world, x).requires_grad_(), case.matrix(world, weight).requires_grad_()
    loss = case.cross_entropy(world)(mine, own, labels)
    loss.backward()
    assert mine.grad is not None
    assert own.grad is not None
    return loss.item(), mine.grad.numpy(), own.grad.numpy()


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("kind", [*ROWS_DIVIDED, "samples", "terms"])
def test_a_row_that_does_not_count_may_overflow(pool: Pool, kind: str, z_loss: float) -> None:
    case = Case(kind=kind, z_loss=z_loss)
    x, weight, labels = case.tensors()
    expected = plain(x.requires_grad_(), weight.requires_grad_(), labels, z_loss)
    expected.backward()
    losses, of_x, of_weight = zip(*pool.run(beside_an_overflow, case, ranks=case.ranks), strict=True)
    assert_same(case.total(losses), expected.item())
    assert_same(case.streams(of_x), x.grad)
    assert_same(case.matrices(of_weight), weight.grad)


def losses(world: World, case: Case) -> tuple[float, float]:
    """While training, and not."""
    x, weight, labels = case.tensors()
    loss = case.cross_entropy(world)
    given = case.stream(world, x), case.matrix(world, weight), labels
    trained = loss(*given).item()
    with torch.no_grad():
        return trained, loss(*given).item()


def test_an_evaluation_has_no_z_loss(pool: Pool) -> None:
    case = Case(ranks=2, z_loss=0.1)
    expected = [plain(*case.tensors(), z_loss).item() for z_loss in (0.1, 0.0)]
    for found in pool.run(losses, case, ranks=2):
        assert found == pytest.approx(expected, rel=1e-12)


def half_loss(world: World, case: Case) -> tuple[float, bool]:
    x, weight, labels = case.tensors()
    mine, rows = case.stream(world, x).requires_grad_(), case.matrix(world, weight).requires_grad_()
    loss = case.cross_entropy(world)(mine, rows, labels)
    loss.backward()
    assert mine.grad is not None
    return loss.item(), bool(mine.grad.isfinite().all() and mine.grad.any())


@pytest.mark.parametrize("kind", ROWS_DIVIDED)
def test_sums_over_a_vocabulary_are_not_made_in_half_precision(pool: Pool, kind: str) -> None:
    """The logits are rounded to bfloat16 and so are their exponentials, but not the sum: 1/256 of it would show."""
    case = Case(2, kind, dtype=torch.bfloat16, vocab=4000, hidden=2, samples=1, length=8)
    x, weight, labels = case.tensors()
    logits = (x @ weight.t()).double().flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
    for loss, useful in pool.run(half_loss, case, ranks=2):
        assert loss == pytest.approx(expected, rel=2e-5)
        assert useful


def frozen(world: World, case: Case) -> list[tuple[bool, bool, float]]:
    """Which of the inputs has a gradient, and the words moved: where only the first is to have one, then the second."""
    x, weight, labels = case.tensors()
    labels, found = case.own_samples(world).of(labels, IGNORED), []
    for which in range(2):
        inputs = [case.stream(world, x), case.matrix(world, weight)]
        inputs[which].requires_grad_()
        case.cross_entropy(world)(*inputs, labels).backward()
        found.append((inputs[0].grad is not None, inputs[1].grad is not None, world.ledger.words()))
        world.ledger.clear()
    return found


@pytest.mark.parametrize("kind", ["positions", "samples"])
def test_what_needs_no_gradient_gets_none_and_moves_none(pool: Pool, kind: str) -> None:
    case = Case(kind=kind)
    words = case.words()
    # Half of what hidden states or matrix move is for their gradient.
    rows = case.samples * part_size(case.length, 3) * 3
    without = words / 2 if kind == "samples" else words - 2 / 3 * rows * case.hidden
    moved = (words, without) if kind == "positions" else (without, words)
    for found in pool.run(frozen, case, ranks=3):
        assert [one[:2] for one in found] == [(True, False), (False, True)]
        assert [one[2] for one in found] == pytest.approx(moved)


def scratch(world: World, case: Case, grad: bool) -> int:
    """Most elements alive at one moment, besides what is given and the gradients that are to be kept."""
    before, loss_module.CHUNK = loss_module.CHUNK, case.chunk or 0
    x, weight, labels = case.tensors()
    mine, rows = case.stream(world, x).requires_grad_(grad), case.matrix(world, weight).requires_grad_(grad)
    del x, weight
    try:
        with Meter() as meter, torch.set_grad_enabled(grad):
            meter.label("given", (mine, rows, labels))
            given = meter.live()
            case.cross_entropy(world)(mine, rows, labels)
    finally:
        loss_module.CHUNK = before
    return (meter.peak() - given) // 4 - (mine.numel() + rows.numel() if grad else 0)


@pytest.mark.parametrize("kind", ROWS_DIVIDED)
def test_never_more_than_a_chunk_of_logits_exists(pool: Pool, kind: str) -> None:
    """Of 256 rows' logits a chunk, and smaller things."""
    for rows in (16, 64):
        case = Case(2, kind, 256, 1, 256, 4, dtype=torch.float32, chunk=rows * 128)
        for grad in (False, True):
            for found in pool.run(scratch, case, grad, ranks=2):
                assert rows * 128 <= found <= 1.35 * rows * 128
