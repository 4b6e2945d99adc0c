from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import Array, assert_same
from torch import Tensor, nn

from shoal.comm.differentiable import pad, part_size
from shoal.comm.world import World
from shoal.layout.kinds import split_evenly
from shoal.meter import Meter
from shoal.model import loss as loss_module
from shoal.model.loss import IGNORED
from shoal.tensor.stream import Divided, FullSizes, Repeated
from shoal.tensor.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
from shoal.train.pool import Pool


@dataclass(frozen=True)
class Case:
    """Hidden states, an output matrix and labels, masked here and there."""

    ranks: int = 3
    sequence: bool = False
    vocab: int = 11
    samples: int = 2
    length: int = 7
    hidden: int = 6
    scale: float = 1.0
    dtype: torch.dtype = torch.float64
    chunk: int | None = None
    masked: bool = False
    z_loss: float = 0.0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, self.length, self.hidden, generator=generator, dtype=torch.float64) * self.scale
        weight = torch.randn(self.vocab, self.hidden, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, self.vocab, (self.samples, self.length), generator=generator)
        labels[0, 2:5] = IGNORED
        return x.to(self.dtype), weight.to(self.dtype), labels.fill_(IGNORED) if self.masked else labels

    def stream(self, world: World) -> tuple[Any, FullSizes]:
        sizes = FullSizes(self.vocab, self.length)
        return (Divided(world.everyone, sizes) if self.sequence else Repeated(world.everyone)), sizes

    def rows(self, world: World, weight: Tensor) -> Tensor:
        return weight.split(split_evenly(self.vocab, world.size))[world.rank].clone()

    def own(self, world: World, x: Tensor, padding: float = 0.0) -> Tensor:
        if not self.sequence:
            return x.clone()
        size = part_size(self.length, world.size)
        return pad(x, 1, size * world.size, padding)[:, world.rank * size :][:, :size].clone()

    def joined(self, parts: list[Array]) -> Array:
        """The stream from the ranks' parts."""
        if not self.sequence:
            assert all((part == parts[0]).all() for part in parts)
            return parts[0]
        whole = torch.cat([torch.from_numpy(part) for part in parts], 1)
        assert not whole[:, self.length :].any(), "padding has no gradient and no contents"
        return whole[:, : self.length].numpy()  # type: ignore[no-any-return]


def differences(case: Case) -> str:
    """What sets a case apart."""
    values = {one.name: getattr(case, one.name) for one in fields(case) if getattr(case, one.name) != one.default}
    return "-".join(f"{name}={value}" for name, value in values.items()) or "plain"


def plain(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits, labels = (x @ weight.t()).flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1).square()[labels != IGNORED].sum()


# ---- loss --------------------------------------------------------------------------------------------------


def loss_and_gradients(world: World, case: Case) -> tuple[float, Array | None, Array | None, float]:
    """The loss, its gradients times 0.3 where the inputs are to have any, and the words moved."""
    x, weight, labels = case.tensors()
    stream, sizes = case.stream(world)
    mine, rows = case.own(world, x, 9.0).requires_grad_(), case.rows(world, weight).requires_grad_()
    before, loss_module.CHUNK = loss_module.CHUNK, loss_module.CHUNK if case.chunk is None else case.chunk
    try:
        loss = VocabularyCrossEntropy(stream, sizes, case.z_loss)(mine, rows, labels)
    finally:
        loss_module.CHUNK = before
    (loss * 0.3).backward()
    assert mine.grad is not None
    assert rows.grad is not None
    return loss.item(), mine.grad.numpy(), rows.grad.numpy(), world.ledger.words()


CASES = [
    Case(),
    Case(chunk=0),  # the smallest there are: as many rows as the hidden size
    Case(chunk=24),
    Case(sequence=True),
    Case(sequence=True, chunk=0),
    Case(sequence=True, chunk=24, ranks=4),
    Case(sequence=True, length=1, ranks=4, vocab=13),
    Case(ranks=2, samples=1, length=40, chunk=0, vocab=40),
    Case(ranks=2, samples=1, length=40, chunk=0, vocab=40, sequence=True),
    Case(ranks=1),
    Case(masked=True),
    Case(masked=True, sequence=True),
    Case(z_loss=0.1),
    Case(z_loss=0.1, sequence=True, chunk=24, ranks=4),
    Case(z_loss=0.1, ranks=2, samples=1, length=40, chunk=0, vocab=40),
]


@pytest.mark.parametrize("case", CASES, ids=differences)
def test_loss_and_gradients_equal_pytorchs_however_rows_are_chunked(pool: Pool, case: Case) -> None:
    x, weight, labels = case.tensors()
    expected = plain(x.requires_grad_(), weight.requires_grad_(), labels, case.z_loss)
    grad_x, grad_weight = torch.autograd.grad(expected * 0.3, (x, weight))
    losses, of_x, of_weight, words = zip(*pool.run(loss_and_gradients, case, ranks=case.ranks), strict=True)
    assert len(set(losses)) == 1, "the same on every rank, to the last bit"
    assert_same(losses[0], expected.item())
    assert_same(case.joined(of_x), grad_x)
    assert_same(torch.cat([torch.from_numpy(rows) for rows in of_weight]), grad_weight)
    # Hidden states go in and their gradients out; three numbers for each position come from each other rank.
    rows = case.samples * (part_size(case.length, case.ranks) * case.ranks if case.sequence else case.length)
    formula = 2 * (case.ranks - 1) / case.ranks * rows * case.hidden + 3 * (case.ranks - 1) * rows
    assert words == pytest.approx([formula] * case.ranks, rel=1e-12)


def known_logits(world: World) -> tuple[float, list[list[float]]]:
    """The hidden states are the unit vectors, so that the logits are the output matrix, transposed, and the gradient of
    the matrix is that of the logits."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    rows = logits.t().split(2)[world.rank].clone().requires_grad_()
    loss = VocabularyCrossEntropy(Repeated(world.everyone), FullSizes(vocabulary=4))
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


def losses(world: World, case: Case) -> tuple[float, float]:
    """While training, and not."""
    x, weight, labels = case.tensors()
    loss = VocabularyCrossEntropy(*case.stream(world), case.z_loss)
    given = case.own(world, x), case.rows(world, weight), labels
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
    stream, sizes = case.stream(world)
    mine, rows = case.own(world, x).requires_grad_(), case.rows(world, weight).requires_grad_()
    loss = VocabularyCrossEntropy(stream, sizes)(mine, rows, labels)
    loss.backward()
    assert mine.grad is not None
    return loss.item(), bool(mine.grad.isfinite().all() and mine.grad.any())


@pytest.mark.parametrize("sequence", [False, True])
def test_sums_over_a_vocabulary_are_not_made_in_half_precision(pool: Pool, sequence: bool) -> None:
    """The logits are rounded to bfloat16 and so are their exponentials, but not the sum: 1/256 of it would show."""
    case = Case(2, sequence, dtype=torch.bfloat16, vocab=4000, hidden=2, samples=1, length=8)
    x, weight, labels = case.tensors()
    logits = (x @ weight.t()).double().flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum").item()
    for loss, useful in pool.run(half_loss, case, ranks=2):
        assert loss == pytest.approx(expected, rel=2e-5)
        assert useful


def frozen(world: World, case: Case) -> list[bool]:
    x, weight, labels = case.tensors()
    stream, sizes = case.stream(world)
    found = []
    for which in range(2):
        inputs = [case.own(world, x), case.rows(world, weight)]
        inputs[which].requires_grad_()
        VocabularyCrossEntropy(stream, sizes)(*inputs, labels).backward()
        found += [one.grad is not None for one in inputs]
    return found


def test_what_needs_no_gradient_gets_none(pool: Pool) -> None:
    assert pool.run(frozen, Case(sequence=True), ranks=3) == [[True, False, False, True]] * 3


def scratch(world: World, case: Case, grad: bool) -> int:
    """Most elements alive at one moment, besides what is given and the gradients that are to be kept."""
    before, loss_module.CHUNK = loss_module.CHUNK, case.chunk or 0
    x, weight, labels = case.tensors()
    stream, sizes = case.stream(world)
    mine, rows = case.own(world, x).requires_grad_(grad), case.rows(world, weight).requires_grad_(grad)
    del x, weight
    try:
        with Meter() as meter, torch.set_grad_enabled(grad):
            meter.label("given", (mine, rows, labels))
            given = meter.live()
            VocabularyCrossEntropy(stream, sizes)(mine, rows, labels)
    finally:
        loss_module.CHUNK = before
    return (meter.peak() - given) // 4 - (mine.numel() + rows.numel() if grad else 0)


@pytest.mark.parametrize("sequence", [False, True])
def test_never_more_than_a_chunk_of_logits_exists(pool: Pool, sequence: bool) -> None:
    """Of 256 rows' logits a chunk, and smaller things."""
    for rows in (16, 64):
        case = Case(2, sequence, 256, 1, 256, 4, dtype=torch.float32, chunk=rows * 128)
        for grad in (False, True):
            for found in pool.run(scratch, case, grad, ranks=2):
                assert rows * 128 <= found <= 1.35 * rows * 128


# ---- embedding ---------------------------------------------------------------------------------------------


def embed(world: World, case: Case) -> tuple[Array, Array, int]:
    tokens, weight, upstream = tokens_and_table(case)
    stream, sizes = case.stream(world)
    sizes.positions = 0
    table = nn.Embedding(case.vocab, case.hidden, device="meta")
    table.weight = nn.Parameter(case.rows(world, weight))
    found = VocabularyEmbedding(table, stream, sizes)(tokens)
    (found * case.own(world, upstream)).sum().backward()
    assert table.weight.grad is not None
    return found.detach().numpy(), table.weight.grad.numpy(), sizes.positions


def tokens_and_table(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    _, weight, _ = case.tensors()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, case.vocab, (case.samples, case.length), generator=generator)
    return tokens, weight, torch.randn(*tokens.shape, case.hidden, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", [Case(), Case(4, True), Case(2, True, length=1), Case(1, True)], ids=differences)
def test_embedding_looks_up_what_one_process_does(pool: Pool, case: Case) -> None:
    tokens, weight, upstream = tokens_and_table(case)
    expected = F.embedding(tokens, weight.requires_grad_())
    (expected * upstream).sum().backward()
    outputs, tables, lengths = zip(*pool.run(embed, case, ranks=case.ranks), strict=True)
    assert (case.joined(outputs) == expected.detach().numpy()).all()
    assert_same(torch.cat([torch.from_numpy(rows) for rows in tables]), weight.grad)
    assert lengths == (case.length,) * case.ranks, "what follows is told how many positions there are"


# ---- logits ------------------------------------------------------------------------------------------------


def all_logits(world: World, case: Case) -> tuple[Array, Array, Array]:
    x, weight, _ = case.tensors()
    stream, sizes = case.stream(world)
    linear = nn.Linear(case.hidden, case.vocab, bias=False, device="meta")
    linear.weight = nn.Parameter(case.rows(world, weight))
    mine = case.own(world, x).requires_grad_()
    logits = VocabularyHead(linear, stream, sizes)(mine)
    logits.square().sum().backward()
    assert mine.grad is not None
    assert linear.weight.grad is not None
    return logits.detach().numpy(), mine.grad.numpy(), linear.weight.grad.numpy()


@pytest.mark.parametrize("case", [Case(), Case(4, True), Case(2, True, length=1)], ids=differences)
def test_all_logits_are_on_every_rank_and_their_gradient_comes_back(pool: Pool, case: Case) -> None:
    x, weight, _ = case.tensors()
    expected = x.requires_grad_() @ weight.requires_grad_().t()
    expected.square().sum().backward()
    outputs, inputs, matrices = zip(*pool.run(all_logits, case, ranks=case.ranks), strict=True)
    for logits in outputs:
        assert_same(logits, expected.detach())
    assert_same(case.joined(inputs), x.grad)
    assert_same(torch.cat([torch.from_numpy(rows) for rows in matrices]), weight.grad)
