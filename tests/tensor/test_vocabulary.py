from __future__ import annotations

from dataclasses import dataclass, fields, replace

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
from shoal.tensor.ports import Even, Extent, Port, Ports, Positions, Repeated, Still
from shoal.tensor.samples import Samples
from shoal.tensor.vocabulary import Vocabulary, VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
from shoal.train.pool import Pool

ROWS_DIVIDED = ("repeated", "positions", "features")


@dataclass(frozen=True)
class Case:
    """Hidden states, an output matrix and labels, masked here and there; and what is divided over the ranks.

    Of ``repeated`` hidden states, their ``positions`` or their ``features``, with the rows of the vocabulary; of the
    ``samples``, with the in-features of a matrix that is gathered; or of the ``terms`` of the product, with features
    of both its factors.
    """

    ranks: int = 3
    kind: str = "repeated"
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

    # ---- how it lies

    def ports(self, world: World, *, loss: bool = False) -> Ports:
        """Of a linear that reads the stream; under the ``loss`` what has positions or samples are rows [1, rows, …]."""
        group = world.everyone
        x: dict[str, Port] = {
            "repeated": Repeated(group),
            "positions": Even(group, 1) if loss else Positions(group, extent=Extent(self.length)),
            "features": Even(group, -1),
        }
        y = Even(group, int(loss)) if self.kind == "terms" else Still()
        return Ports(x.get(self.kind, Still()), Even(group, -1) if self.kind == "samples" else Still(), y)

    def vocabulary(self, world: World) -> Vocabulary:
        alone = world.group((world.rank,), "none")
        return Vocabulary(self.vocab, world.everyone if self.kind in ROWS_DIVIDED else alone)

    def cross_entropy(self, world: World) -> VocabularyCrossEntropy:
        return VocabularyCrossEntropy(self.ports(world, loss=True), self.vocabulary(world), self.z_loss)

    def own_samples(self, world: World) -> Samples:
        return Samples(world.size, world.rank) if self.kind == "samples" else Samples()

    def matrix(self, world: World, weight: Tensor) -> Tensor:
        """This rank's block of an output matrix or embedding table."""
        if self.kind in ROWS_DIVIDED:
            return weight.split(split_evenly(self.vocab, world.size))[world.rank].clone()
        return weight.chunk(world.size, 1)[world.rank].clone()

    def stream(self, world: World, x: Tensor, padding: float = 0.0) -> Tensor:
        """This rank's block of the stream."""
        if self.kind == "positions":
            size = part_size(self.length, world.size)
            return pad(x, 1, size * world.size, padding)[:, world.rank * size :][:, :size].clone()
        if self.kind in ("features", "terms"):
            return x.chunk(world.size, -1)[world.rank].clone()
        return self.own_samples(world).of(x, padding).clone()

    # ---- from all ranks

    def streams(self, parts: list[Array], *, empty: bool = True) -> Array:
        """The stream from the ranks' blocks, in whose padding there is nothing if it is ``empty``."""
        if self.kind == "repeated":
            assert all((part == parts[0]).all() for part in parts)
            return parts[0]
        dim = {"positions": 1, "samples": 0}.get(self.kind, -1)
        whole = torch.cat([torch.from_numpy(part) for part in parts], dim)
        real = whole[: self.samples, : self.length]
        assert not empty or real.count_nonzero() == whole.count_nonzero(), "padding has no gradient and no contents"
        return real.numpy()  # type: ignore[no-any-return]

    def matrices(self, parts: list[Array]) -> Array:
        """The matrix from the ranks' blocks."""
        blocks = [torch.from_numpy(part) for part in parts]
        return torch.cat(blocks, 0 if self.kind in ROWS_DIVIDED else 1).numpy()  # type: ignore[no-any-return]

    def total(self, losses: list[float]) -> float:
        """The loss of all rows from the ranks', which have the same rows or each their own."""
        if self.kind not in ROWS_DIVIDED:
            return sum(losses)
        assert len(set(losses)) == 1, "the same on every rank, to the last bit"
        return losses[0]

    def words(self) -> float:
        """What the loss and its gradients move to and from each rank, if all rows are one chunk."""
        share, rows = (self.ranks - 1) / self.ranks, self.samples * self.length
        if self.kind == "samples":
            return 2 * share * self.vocab * self.hidden
        if self.kind == "terms":
            return 2 * share * part_size(rows, self.ranks) * self.ranks * self.vocab
        if self.kind == "positions":
            rows = self.samples * part_size(self.length, self.ranks) * self.ranks
        return 2 * share * rows * self.hidden + 3 * (self.ranks - 1) * rows


def differences(case: Case) -> str:
    """What sets a case apart."""
    values = {one.name: getattr(case, one.name) for one in fields(case) if getattr(case, one.name) != one.default}
    return "-".join(f"{name}={value}" for name, value in values.items()) or "plain"


def plain(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    logits, labels = (x @ weight.t()).flatten(0, -2), labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1).square()[labels != IGNORED].sum()


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


# ---- embedding ---------------------------------------------------------------------------------------------


def embed(world: World, case: Case) -> tuple[Array, Array]:
    tokens, weight, upstream = tokens_and_table(case)
    table = nn.Embedding(case.vocab, case.hidden, device="meta")
    table.weight = nn.Parameter(case.matrix(world, weight))
    module = VocabularyEmbedding(table, case.ports(world), case.vocabulary(world), case.own_samples(world))
    found = module(tokens)
    (found * case.stream(world, upstream)).sum().backward()
    assert table.weight.grad is not None
    return found.detach().numpy(), table.weight.grad.numpy()


def tokens_and_table(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    _, weight, _ = case.tensors()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, case.vocab, (case.samples, case.length), generator=generator)
    return tokens, weight, torch.randn(*tokens.shape, case.hidden, generator=generator, dtype=torch.float64)


STREAMS = [
    Case(),
    Case(4, "positions"),
    Case(2, "positions", length=1),
    Case(1, "positions"),
    Case(3, "features"),
    Case(3, "samples"),
    Case(2, "samples"),
    Case(3, "terms"),
]


@pytest.mark.parametrize("case", STREAMS, ids=differences)
def test_embedding_looks_up_what_one_process_does(pool: Pool, case: Case) -> None:
    tokens, weight, upstream = tokens_and_table(case)
    expected = F.embedding(tokens, weight.requires_grad_())
    (expected * upstream).sum().backward()
    outputs, tables = zip(*pool.run(embed, case, ranks=case.ranks), strict=True)
    assert (case.streams(outputs, empty=case.kind != "samples") == expected.detach().numpy()).all()
    assert_same(case.matrices(tables), weight.grad)


# ---- logits ------------------------------------------------------------------------------------------------


def all_logits(world: World, case: Case) -> tuple[Array, Array, Array]:
    x, weight, _ = case.tensors()
    linear = nn.Linear(case.hidden, case.vocab, bias=False, device="meta")
    linear.weight = nn.Parameter(case.matrix(world, weight))
    mine = case.stream(world, x).requires_grad_()
    rows = world.group((world.rank,), "none") if case.kind in ROWS_DIVIDED else world.everyone
    extent = Extent(case.length, case.samples)
    logits = VocabularyHead(linear, case.ports(world), case.vocabulary(world), rows, extent)(mine)
    logits.square().sum().backward()
    assert mine.grad is not None
    assert linear.weight.grad is not None
    return logits.detach().numpy(), mine.grad.numpy(), linear.weight.grad.numpy()


@pytest.mark.parametrize("case", STREAMS, ids=differences)
def test_all_logits_are_on_every_rank_and_their_gradient_comes_back(pool: Pool, case: Case) -> None:
    x, weight, _ = case.tensors()
    expected = x.requires_grad_() @ weight.requires_grad_().t()
    expected.square().sum().backward()
    outputs, inputs, matrices = zip(*pool.run(all_logits, case, ranks=case.ranks), strict=True)
    for logits in outputs:
        assert_same(logits, expected.detach())
    assert_same(case.streams(inputs), x.grad)
    assert_same(case.matrices(matrices), weight.grad)


def newest_logits(world: World, case: Case) -> tuple[Array, float]:
    """Those of the last position, and the words moved besides the matrix."""
    x, weight, _ = case.tensors()
    linear = nn.Linear(case.hidden, case.vocab, bias=False, device="meta")
    linear.weight = nn.Parameter(case.matrix(world, weight))
    ports = case.ports(world)
    rows = world.group((world.rank,), "none") if case.kind in ROWS_DIVIDED else world.everyone
    extent = Extent(case.length, case.samples, newest=True)
    if isinstance(ports.x, Positions):
        ports = replace(ports, x=Positions(world.everyone, extent=extent))
    mine = case.stream(world, x)
    at = (case.length - 1) % mine.shape[1]
    with torch.no_grad():
        logits = VocabularyHead(linear, ports, case.vocabulary(world), rows, extent)(mine[:, at : at + 1])
    matrix = weight.numel() * (1 - 1 / world.size) if case.kind == "samples" else 0
    return logits.numpy(), world.ledger.words() - matrix


@pytest.mark.parametrize("case", [*STREAMS, Case(3, "samples", samples=1)], ids=differences)
def test_of_the_newest_position_alone_logits_are_made(pool: Pool, case: Case) -> None:
    """They move a position's words: of the stream, of its logits between columns, and of these between samples."""
    x, weight, _ = case.tensors()
    found = pool.run(newest_logits, case, ranks=case.ranks)
    real, padded = case.samples, part_size(case.samples, case.ranks) * case.ranks
    share, rows = 1 - 1 / case.ranks, real if real == 1 else padded
    vocabulary = part_size(case.vocab, case.ranks) * case.ranks
    words = {
        "repeated": real * vocabulary,
        "positions": real * (case.hidden + vocabulary),
        "features": real * (case.hidden + vocabulary),
        "samples": rows * case.vocab,
        "terms": 2 * padded * case.vocab,
    }
    for logits, moved in found:
        assert_same(logits, (x @ weight.t())[:, -1:])
        assert moved == pytest.approx(share * words[case.kind])
