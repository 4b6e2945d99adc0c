from __future__ import annotations

import pytest

from shoal.comm.ledger import Entry, Ledger


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("broadcast", 1), ("reduce", 1)],
)
def test_words_follow_the_ring_convention(collective: str, factor: int) -> None:
    ledger = Ledger()
    ledger.record(collective, 7, 3, "dp", "gradients", 4)
    assert ledger.words() == pytest.approx(factor * 2 / 3 * 7)


def test_words_and_calls_add_up_by_axis_and_purpose() -> None:
    ledger = Ledger()
    ledger.record("all_reduce", 100, 2, "dp", "gradients", 4)
    ledger.record("all_reduce", 300, 2, "dp", "gradients", 4)
    ledger.record("all_reduce", 8, 4, "pp·dp", "norm", 4)
    ledger.record("all_gather", 10, 2, "dp", "weights", 4)
    assert ledger.table() == {"dp/gradients": 400.0, "dp/weights": 5.0, "pp·dp/norm": 12.0}
    assert (ledger.words(), ledger.words("dp"), ledger.words(purpose="norm")) == (417, 405, 12)
    assert ledger.words("dp", "gradients") == 400
    assert (ledger.calls(), ledger.calls("dp"), ledger.calls("dp", "gradients"), ledger.calls("tp")) == (4, 3, 2, 0)
    ledger.clear()
    assert (ledger.words(), ledger.calls(), ledger.table()) == (0, 0, {})


def test_a_message_counts_its_words_where_it_is_received() -> None:
    ledger = Ledger()
    ledger.receive(7, "pp", "boundary", 4)
    ledger.receive(5, "pp", "boundary", 4)
    ledger.record("all_reduce", 4, 2, "pp", "norm", 4)
    assert (ledger.words("pp", "boundary"), ledger.calls("pp", "boundary")) == (12, 2)
    assert (ledger.words("pp"), ledger.calls()) == (16, 3)


def test_entries_tell_collectives_of_one_purpose_apart_and_count_bytes() -> None:
    ledger = Ledger()
    ledger.record("all_gather", 12, 4, "dp", "parameters", 2)
    ledger.record("broadcast", 12, 4, "dp", "parameters", 4)
    ledger.receive(7, "pp", "boundary", 2)
    ledger.receive(5, "pp", "boundary", 8)
    assert ledger.entries() == [
        Entry("all_gather", "dp", "parameters", 1, 9.0, 18.0),
        Entry("broadcast", "dp", "parameters", 1, 9.0, 36.0),
        Entry("message", "pp", "boundary", 2, 12.0, 54.0),
    ]
    assert ledger.table() == {"dp/parameters": 18.0, "pp/boundary": 12.0}
