from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import packing as packing_module
from shoal.data.batches import Batches
from shoal.data.packing import Packing, pack
from shoal.data.samples import StoreSamples
from shoal.data.store import TokenStore
from shoal.data.store_writer import write_store
from shoal.errors import DataError
from shoal.model.loss import IGNORED

EOD = 9999


def store_of(folder: Path, lengths: Sequence[int], counts: np.ndarray | None = None) -> TokenStore:
    """Documents of these lengths; token k of all is k."""
    (folder / "t.json").write_text("{}")
    tokens = np.arange(sum(lengths))
    with write_store(
        folder / "s", tokenizer=folder / "t.json", vocab=EOD + 1, eod=EOD, masked=counts is not None
    ) as writer:
        writer.append(tokens, np.cumsum(lengths), counts)
    return TokenStore.open(folder / "s")


def every(packing: Packing) -> packing_module.Rows:
    return packing.rows(np.arange(len(packing)))


def masks(lengths: Sequence[int]) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)).filter(any)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), seq_len=st.integers(1, 12))
def test_whole_documents_lie_side_by_side_and_each_label_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seq_len: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
    counts = np.array(data.draw(masks(lengths)))
    store = store_of(tmp_path_factory.mktemp("p"), lengths, counts)
    first = np.isin(np.arange(len(store)), store.documents[:-1])
    expected = np.flatnonzero(counts & ~first)
    if len(expected) == 0:
        with pytest.raises(DataError, match=r"no sample of .* has a token that counts"):
            pack(store, seq_len, "documents")
        return
    packing = pack(store, seq_len, "documents")
    rows = every(packing)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    predicted: list[int] = []
    for tokens, counted, opens, filled in zip(rows.tokens, rows.counts, rows.opens, rows.filled, strict=True):
        assert counted.any()
        assert (tokens[filled:] == EOD).all()
        assert not counted[filled:].any()
        assert opens[0]
        # A document that begins in the middle is all there; none but a long one lacks its beginning.
        for at in np.flatnonzero(opens[:filled]):
            whose = owner[tokens[at]]
            if not first[tokens[at]]:
                assert lengths[whose] > seq_len + 1
            elif lengths[whose] <= seq_len + 1:
                assert (owner[tokens[at : at + lengths[whose]]] == whose).all()
        inside = ~opens[1:filled]
        assert (tokens[1:filled][inside] == tokens[: filled - 1][inside] + 1).all()
        assert not counted[opens].any()
        predicted += tokens[counted].tolist()
    assert sorted(predicted) == expected.tolist()
    found = packing.statistics
    assert found.samples == len(packing)
    assert found.positions == len(packing) * seq_len
    assert found.padded == sum(seq_len + 1 - rows.filled)
    assert found.counted == len(expected)
    assert found.cut == sum(length > seq_len + 1 for length in lengths)
    seen = {token for tokens, filled in zip(rows.tokens, rows.filled, strict=True) for token in tokens[:filled]}
    assert found.left_out == len(store) - len(seen)


def test_without_a_mask_all_but_the_first_token_of_a_document_counts(tmp_path: Path) -> None:
    packing = pack(store_of(tmp_path, [3, 5, 2]), 6, "documents")
    rows = every(packing)
    assert rows.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 9], [0, 1, 2, EOD, EOD, EOD, EOD]]
    assert np.flatnonzero(rows.counts[0]).tolist() == [1, 2, 3, 4, 6]
    assert np.flatnonzero(rows.opens[0]).tolist() == [0, 5]
    assert np.flatnonzero(rows.opens[1]).tolist() == [0, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), seq_len=st.integers(1, 9), block=st.integers(1, 50))
def test_a_stream_passes_over_windows_in_which_nothing_counts(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seq_len: int, block: int
) -> None:
    lengths = [seq_len + 1, *data.draw(st.lists(st.integers(1, 20), max_size=6))]
    counts = np.array(data.draw(masks(lengths)))
    store = store_of(tmp_path_factory.mktemp("p"), lengths, counts)
    windows = (len(store) - 1) // seq_len
    kept = [k for k in range(windows) if counts[k * seq_len + 1 : (k + 1) * seq_len + 1].any()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "_BLOCK", block)
        if not kept:
            with pytest.raises(DataError, match=r"no sample of .* has a token that counts"):
                pack(store, seq_len, "stream")
            return
        packing = pack(store, seq_len, "stream")
    rows = every(packing)
    assert rows.tokens[:, 0].tolist() == [k * seq_len for k in kept]
    assert (rows.counts == counts[rows.tokens]).all()
    assert packing.statistics.counted == sum(counts[k * seq_len + 1 : (k + 1) * seq_len + 1].sum() for k in kept)


class Watched(np.ndarray):
    """A mask that notes which slices of it are read."""

    read: list[tuple[int, int]]

    def __getitem__(self, key: Any) -> Any:
        self.read.append((key.start, key.stop))
        return np.asarray(self)[key]


@pytest.mark.parametrize("kind", ["stream", "documents"])
def test_packing_reads_the_mask_once_a_block_at_a_time(
    tmp_path: Path, kind: Literal["stream", "documents"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "_BLOCK", 10)
    store = store_of(tmp_path, [3, 20, 1, 2, 9], np.arange(35) % 3 > 0)
    assert store.counts is not None
    mask = np.array(store.counts).view(Watched)
    mask.read = []
    packing = pack(replace(store, counts=mask), 4, kind)
    assert mask.read == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert packing.statistics.counted == pack(store, 4, kind).statistics.counted > 0


def test_a_stream_counts_the_documents_that_it_cuts(tmp_path: Path) -> None:
    #                                  |0 1 2 3|4 5 6 7|8 9 ...    T = 4
    packing = pack(store_of(tmp_path, [5, 2, 1, 3, 2]), 4, "stream")
    found = packing.statistics
    assert (found.samples, found.positions, found.padded, found.counted) == (3, 12, 0, 12)
    # Tokens 0-4 are read and predicted by sample 0 alone; 8-10 by sample 2 alone: what is predicted in it counts.
    assert found.cut == 0
    assert pack(store_of_in(tmp_path / "other", [3, 4, 6]), 4, "stream").statistics.cut == 2


def store_of_in(folder: Path, lengths: Sequence[int]) -> TokenStore:
    folder.mkdir()
    return store_of(folder, lengths)


def test_a_batch_of_packed_documents_keeps_padding_out(tmp_path: Path) -> None:
    samples = StoreSamples(store_of(tmp_path, [3, 2, 2]), seq_len=5, seed=0, packing="documents")
    batch = Batches(samples, batch=2, documents=True).batch(0)
    row = int((batch["tokens"][:, 0] == 5).nonzero()[0]) if (batch["tokens"][:, 0] == 5).any() else 1
    packed = 1 - row
    assert batch["labels"].shape == (2, 5)
    assert batch["labels"][packed].tolist() == [1, 2, IGNORED, 4, IGNORED]
    assert batch["documents"][packed].tolist() == [0, 0, 0, 1, 1]
    assert batch["positions"][packed].tolist() == [0, 1, 2, 0, 1]
    assert batch["labels"][row].tolist() == [6, *[IGNORED] * 4]
    assert batch["documents"][row].tolist() == [0, 0, 1, 1, 1]
    joint = Batches(samples, batch=2).batch(0)
    assert "documents" not in joint
    assert joint["labels"].tolist() == batch["labels"].tolist()


def test_packing_belongs_to_the_fingerprint(tmp_path: Path) -> None:
    store = store_of(tmp_path, [30, 2])
    stream, whole = (StoreSamples(store, seq_len=5, seed=0, packing=kind) for kind in ("stream", "documents"))
    assert stream.fingerprint == store.fingerprint != whole.fingerprint
