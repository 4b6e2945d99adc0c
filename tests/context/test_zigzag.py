"""Which positions a rank has, and how much work they are."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from shoal.context.zigzag import Division, score_entries
from shoal.model.loss import IGNORED


def test_the_ranks_of_a_zigzag_have_a_chunk_from_either_end() -> None:
    two = Division(ring=2)
    assert [two.places(8, rank) for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert Division(ulysses=2).places(8, 1) == [4, 5, 6, 7], "without a ring they are in a row"
    both = Division(ulysses=2, ring=2)
    assert [both.places(8, rank) for rank in range(4)] == [[0, 6], [1, 7], [2, 4], [3, 5]]


@pytest.mark.parametrize(
    ("ranks", "length", "zigzag", "striped", "contiguous"),
    [(2, 8, [18, 18], [16, 20], [10, 26]), (4, 32, [132] * 4, [120, 128, 136, 144], [36, 100, 164, 228])],
)
def test_a_zigzag_is_the_same_work_for_every_rank(
    ranks: int, length: int, zigzag: list[int], striped: list[int], contiguous: list[int]
) -> None:
    """Two other orders for comparison: every P-th position, and positions in a row."""
    each = length // ranks
    assert [score_entries(Division(ring=ranks).places(length, rank)) for rank in range(ranks)] == zigzag
    assert [score_entries(range(rank, length, ranks)) for rank in range(ranks)] == striped
    assert [score_entries(range(rank * each, (rank + 1) * each)) for rank in range(ranks)] == contiguous


@pytest.mark.parametrize("length", [1, 5, 24, 61])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (1, 3), (3, 1), (2, 2), (3, 2), (2, 3)])
def test_ranks_have_every_position_once_and_as_many_with_padding(length: int, ulysses: int, ring: int) -> None:
    division = Division(ulysses, ring)
    places = [division.places(length, rank) for rank in range(ulysses * ring)]
    padded = division.padded(length)
    assert sorted(chain.from_iterable(places)) == list(range(padded))
    assert len({len(one) for one in places}) == 1
    assert all(one == sorted(one) for one in places)
    assert 0 <= padded - length < ulysses * ring * (2 if ring > 1 else 1)
    for at in range(ring):
        together = chain.from_iterable(places[at * ulysses + part] for part in range(ulysses))
        assert sorted(together) == [place for span in division.spans(length, at) for place in range(*span)]


def test_rows_with_fewer_samples_have_positions_of_all_one_row_after_another() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    batch = {"tokens": tokens, "positions": torch.arange(8)[None], "sample": torch.tensor([3, 4])}
    found = Division().folded(batch, 0, 2)
    assert found["tokens"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15], [2, 3, 4, 5], [10, 11, 12, 13]]
    assert found["places"].tolist() == [[0, 1, 6, 7]] * 2 + [[2, 3, 4, 5]] * 2
    assert torch.equal(found["positions"], found["places"])
    assert found["sample"].tolist() == [3, 4, 3, 4]
    first, second = (Division(ring=2).folded(batch, rank, 2) for rank in range(2))
    assert first["places"].tolist() == [[0, 7]] * 2 + [[1, 6]] * 2
    assert second["places"].tolist() == [[2, 5]] * 2 + [[3, 4]] * 2


def test_a_part_of_a_batch_has_what_is_at_its_places_and_padding_that_counts_in_no_loss() -> None:
    tokens = torch.arange(10).reshape(2, 5)
    documents = torch.zeros(2, 5, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens + 1, "positions": torch.arange(5)[None], "documents": documents}
    found = Division(ring=2).part({**batch, "sample": torch.tensor([3, 4])}, 0)
    assert found["places"].tolist() == [0, 1, 6, 7]
    assert found["tokens"].tolist() == [[0, 1, 4, 4], [5, 6, 9, 9]]
    assert found["labels"].tolist() == [[1, 2, IGNORED, IGNORED], [6, 7, IGNORED, IGNORED]]
    assert found["positions"].tolist() == [[0, 1, 4, 4]]
    assert found["documents"] is documents
    assert found["length"] == 5
    assert found["sample"].tolist() == [3, 4]


def test_a_folded_batch_has_the_positions_of_one_row_after_those_of_another() -> None:
    """Whoever trains without dropout need not number samples."""
    tokens = torch.arange(8)[None]
    found = Division().folded({"tokens": tokens, "labels": tokens + 1, "positions": tokens}, 0, 2)
    assert found["places"].tolist() == found["tokens"].tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert found["counted"].tolist() == [8]
    assert "sample" not in found
    numbered = {"tokens": tokens, "positions": tokens, "sample": torch.tensor([5])}
    assert Division().folded(numbered, 0, 2)["sample"].tolist() == [5, 5]
