from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.batch_size import BatchSize
from shoal.data.batches import Batch, Batches, Synthetic, batch_hash, mask_labels
from shoal.data.samples import StoreSamples
from shoal.data.store import TokenStore
from shoal.data.store_writer import write_store
from shoal.errors import DataError
from shoal.model.loss import IGNORED

EOD = 9999


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """403 tokens, each its own place; documents of 1, 2, 3, ... tokens."""
    ends = np.cumsum(np.arange(1, 29))
    return store_of(tmp_path_factory.mktemp("store"), np.arange(403), np.array([*ends[ends < 403], 403]))


def store_of(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> TokenStore:
    (folder / "t.json").write_text("{}")
    with write_store(folder / "s", tokenizer=folder / "t.json", vocab=EOD + 1, eod=EOD) as writer:
        writer.append(tokens, ends)
    return TokenStore.open(folder / "s")


def batches_of(
    store: TokenStore,
    *,
    batch: int | BatchSize,
    split: Literal["train", "validation"] = "train",
    documents: bool = False,
    **of_samples: Any,
) -> Batches:
    samples = StoreSamples(store, validates=split == "validation", **of_samples)
    return Batches(samples, batch=batch, split=split, documents=documents)


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_shapes_dtypes_and_labels(counting: TokenStore) -> None:
    batch = batches_of(counting, seq_len=10, batch=4, seed=0).batch(3)
    for name in ("tokens", "labels", "positions"):
        assert batch[name].shape == (4, 10)
        assert batch[name].dtype == torch.int64
    assert batch["sample"].tolist() == [12, 13, 14, 15]
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert (batch["tokens"][:, 0] % 10 == 0).all()
    assert torch.equal(batch["positions"], torch.arange(10).expand(4, 10))
    assert "documents" not in batch


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_any_number_of_parts_sees_the_same_global_batch(counting: TokenStore, split: str, parts: int) -> None:
    batches = batches_of(
        counting, seq_len=8, batch=12, seed=1, split=split, validation=0.4, documents=True
    )  # fmt: skip
    for step in (0, batches.n_batches - 1):
        whole = batches.batch(step)
        divided = [batches.batch(step, part, parts) for part in range(parts)]
        assert {part["tokens"].shape for part in divided} == {(12 // parts, 8)}
        assert equal(joined(divided), whole)


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(counting: TokenStore) -> None:
    batches = batches_of(counting, seq_len=10, batch=8, seed=0)
    assert (batches.n_samples, batches.n_batches) == (40, 5)
    first = joined([batches.batch(step) for step in range(5)])["tokens"][:, 0].tolist()
    second = joined([batches.batch(step) for step in range(5, 10)])["tokens"][:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(0, 400, 10))
    assert first != second


def test_a_batch_may_span_two_epochs(counting: TokenStore) -> None:
    batches = batches_of(counting, seq_len=10, batch=16, seed=0)
    windows = joined([batches.batch(step) for step in range(5)])["tokens"][:, 0].tolist()
    assert sorted(windows[:40]) == sorted(windows[40:]) == list(range(0, 400, 10))


def test_validation_is_walked_once_and_filled_up_with_labels_that_do_not_count(counting: TokenStore) -> None:
    common = {"seq_len": 10, "batch": 4, "validation": 0.25}
    validation = batches_of(counting, seed=0, split="validation", **common)
    assert (validation.n_samples, validation.n_batches) == (10, 3)
    batches = [validation.batch(step) for step in range(3)]
    counted = [(batch["labels"] != IGNORED).all(dim=1).tolist() for batch in batches]
    assert counted == [[True] * 4, [True] * 4, [True, True, False, False]]
    assert (batches[2]["labels"][2:] == IGNORED).all()
    validated = joined(batches)["tokens"][:10, 0].tolist()
    train = batches_of(counting, seed=5, **common)
    trained = joined([train.batch(step) for step in range(20)])["tokens"][:, 0].tolist()
    assert len(set(validated)) == 10
    assert set(validated) | set(trained) == set(range(0, 400, 10))
    assert not set(validated) & set(trained)
    assert equal(batches[0], batches_of(counting, seed=77, split="validation", **common).batch(0))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), seq_len=st.integers(1, 12))
def test_documents_are_numbered_and_apart(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int
) -> None:
    lengths = [*lengths, seq_len + 1]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(length) for length in lengths])
    store = store_of(tmp_path_factory.mktemp("d"), np.arange(len(owner)), np.cumsum(lengths))
    batch = batches_of(store, seq_len=seq_len, batch=3, seed=0, documents=True).batch(0)
    for row in range(3):
        at = batch["tokens"][row].numpy()
        whose = owner[at]
        _, number = np.unique(whose, return_inverse=True)
        assert batch["documents"][row].tolist() == number.tolist()
        # A document that began before the sample counts from the sample's start.
        positions = np.where(whose == whose[0], np.arange(seq_len), place[at])
        assert batch["positions"][row].tolist() == positions.tolist()
        expected = np.where(owner[at + 1] == whose, at + 1, IGNORED)
        assert batch["labels"][row].tolist() == expected.tolist()


def test_a_store_without_one_sample_is_refused(counting: TokenStore) -> None:
    batches_of(counting, seq_len=402, batch=1, seed=0)
    with pytest.raises(DataError, match=r"data\.seq_len = 403: .*404 tokens and .* has 403; at most 402"):
        batches_of(counting, seq_len=403, batch=1, seed=0)


def test_a_validation_split_without_a_sample_is_refused(counting: TokenStore) -> None:
    with pytest.raises(DataError, match=r"data\.validation = 0\.01: keeps none of the 40 .*use at least 0\.01275"):
        batches_of(counting, seq_len=10, batch=1, seed=0, split="validation", validation=0.01)


def test_synthetic_tokens_are_a_function_of_seed_and_sample() -> None:
    source = Synthetic(vocab=50, seq_len=16, batch=12, seed=3)
    whole = source.batch(2)
    assert equal(joined([source.batch(2, part, 4) for part in range(4)]), whole)
    assert torch.equal(whole["labels"][:, :-1], whole["tokens"][:, 1:])
    assert whole["sample"].tolist() == list(range(24, 36))
    assert 0 <= whole["tokens"].min() < whole["tokens"].max() < 50
    smaller = Synthetic(vocab=50, seq_len=16, batch=6, seed=3)
    assert torch.equal(smaller.batch(4)["tokens"], whole["tokens"][:6])
    assert not torch.equal(Synthetic(vocab=50, seq_len=16, batch=12, seed=4).batch(2)["tokens"], whole["tokens"])
    assert not torch.equal(source.batch(3)["tokens"], whole["tokens"])
    every = torch.cat([source.batch(step)["tokens"] for step in range(50)]).flatten()
    assert every.unique().tolist() == list(range(50))


def test_the_hash_tells_tokens_and_labels_apart(counting: TokenStore) -> None:
    batches = batches_of(counting, seq_len=10, batch=4, seed=0)
    batch = batches.batch(0)
    assert batch_hash(batch) == batch_hash(batches.batch(0))
    parts = [batch_hash(batches.batch(0, part, 2)) for part in range(2)]
    assert (sum(parts) - batch_hash(batch)) % 2**64 == 0
    for name in ("tokens", "labels"):
        changed = {**batch, name: batch[name].clone()}
        changed[name][2, 5] += 1
        assert batch_hash(changed) != batch_hash(batch)
    assert batch_hash(batches.batch(1)) != batch_hash(batch)


def test_masked_labels_are_unequal_and_follow_the_sample() -> None:
    source = Synthetic(vocab=50, seq_len=400, batch=24, seed=0)
    whole = source.batch(1)
    masked = mask_labels(whole, seed=8)
    divided = [mask_labels(source.batch(1, part, 6), seed=8) for part in range(6)]
    assert equal(joined(divided), masked)
    gone = masked["labels"] == IGNORED
    assert torch.equal(masked["labels"][~gone], whole["labels"][~gone])
    share = gone.double().mean(dim=1)
    assert share.min() < 0.15
    assert 0.8 < share.max() < 1
    assert abs(share.mean() - 0.475) < 0.2
    assert not torch.equal(masked["labels"], mask_labels(whole, seed=9)["labels"])
    assert torch.equal(mask_labels(whole, 8, low=0.0, high=0.0)["labels"], whole["labels"])
