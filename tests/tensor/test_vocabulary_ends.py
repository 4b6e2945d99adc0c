"""Both ends of a decoder: the embedding, and the output matrix where logits are wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tensor_ranks import Array, assert_same
from torch import Tensor, nn
from vocabularies import ROWS_DIVIDED, Case, differences

from shoal.comm.differentiable import part_size
from shoal.comm.world import World
from shoal.tensor.ports import Extent, Positions
from shoal.tensor.vocabulary import VocabularyEmbedding, VocabularyHead
from shoal.train.pool import Pool

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
