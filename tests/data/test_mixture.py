from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches, batch_hash
from shoal.data.mixture import BLOCK, Mixture
from shoal.data.samples import StoreSamples
from shoal.data.store import TokenStore, kept_tokenizer
from shoal.data.store_writer import write_store
from shoal.data.tokenize import byte_tokenizer
from shoal.errors import DataError
from shoal.model.loss import IGNORED

T = 4


def store_of(folder: Path, first: int, windows: int, tokenizer: str = "{}") -> TokenStore:
    """``windows`` windows of T tokens; the tokens are ``first``, ``first`` + 1, ..."""
    folder.mkdir()
    (folder / "t.json").write_text(tokenizer)
    n = windows * T + 1
    with write_store(folder / "s", tokenizer=folder / "t.json", vocab=60_000, eod=0) as writer:
        writer.append(np.arange(first, first + n), np.array([n]))
    return TokenStore.open(folder / "s")


def megatron_of(stem: Path, tokens: int) -> TokenStore:
    """A pair of files in Megatron's format, which keeps no tokenizer."""
    stem.with_suffix(".bin").write_bytes(np.arange(tokens).astype("<u2").tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2)
    stem.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", tokens, 0, 0, 1))
    return TokenStore.open(stem)


FIRSTS, WINDOWS = (0, 10_000, 20_000), (7, 40, 300)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    folder = tmp_path_factory.mktemp("mixture")
    return [store_of(folder / str(s), FIRSTS[s], WINDOWS[s]) for s in range(3)]


def mixture(stores: Sequence[TokenStore], weights: Sequence[float], seed: int = 0, validation: float = 0.0) -> Mixture:
    sources = [StoreSamples(store, seq_len=T, seed=seed, validation=validation) for store in stores]
    return Mixture(sources, weights, seed)


def read(mixed: Mixture, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source, window) of each sample."""
    first = mixed.train(numbers).tokens[:, 0]
    return first // 10_000, first % 10_000 // T


def test_a_block_has_every_source_by_its_weight(stores: list[TokenStore]) -> None:
    mixed = mixture(stores, (1.0, 3.0, 0.5))
    assert mixed.shares == (0.2222, 0.6667, 0.1111)
    for block in (0, 3):
        numbers = np.arange(block * BLOCK, (block + 1) * BLOCK)
        which, _ = read(mixed, numbers)
        assert (np.bincount(which) / BLOCK).tolist() == list(mixed.shares)
        assert (mixed.origins(numbers) == which).all()
        # Scattered: each tenth of a block is near its share too.
        tenths = which.reshape(10, -1) == 1
        assert np.abs(tenths.mean(axis=1) - 2 / 3).max() < 0.06


def test_each_source_has_epochs_of_its_own_without_repeats_or_gaps(stores: list[TokenStore]) -> None:
    """Within a block the samples of a source come in any order; over whole blocks each comes once an epoch."""
    mixed = mixture(stores, (1.0, 3.0, 0.5))
    which, window = read(mixed, np.arange(3 * BLOCK))
    for s, windows in enumerate(WINDOWS):
        times = Counter(window[which == s].tolist())
        drawn = int((which == s).sum())
        assert set(times) == set(range(windows))
        assert set(times.values()) <= {drawn // windows, -(-drawn // windows)}


def test_a_sample_is_a_function_of_seed_and_number(stores: list[TokenStore]) -> None:
    mixed = mixture(stores, (1, 1, 1))
    numbers = np.arange(BLOCK - 20, BLOCK + 20)
    whole = mixed.train(numbers).tokens
    again = mixture(stores, (1, 1, 1))
    assert all((again.train(numbers[i : i + 1]).tokens[0] == whole[i]).all() for i in (39, 3, 20))
    assert (mixture(stores, (1, 1, 1), seed=1).train(numbers).tokens != whole).any()


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_any_number_of_parts_sees_the_same_batch(stores: list[TokenStore], parts: int) -> None:
    batches = Batches(mixture(stores, (1, 2, 3)), batch=12, documents=True)
    whole = batches.batch(5)
    divided = [batches.batch(5, part, parts) for part in range(parts)]
    for name in whole:
        assert torch.equal(torch.cat([part[name] for part in divided]), whole[name])
    assert (sum(batch_hash(part) for part in divided) - batch_hash(whole)) % 2**64 == 0


def test_validation_walks_the_splits_of_all_sources_once(stores: list[TokenStore]) -> None:
    mixed = mixture(stores, (1, 1, 1), validation=0.2)
    validation = Batches(mixed, batch=10, split="validation")
    assert mixed.n_validation == 1 + 8 + 60
    batches = [validation.batch(step) for step in range(validation.n_batches)]
    kept = torch.cat([batch["tokens"][(batch["labels"] != IGNORED).all(dim=1), 0] for batch in batches]).tolist()
    assert len(set(kept)) == len(kept) == 69
    trained = mixed.train(np.arange(2 * BLOCK)).tokens[:, 0].tolist()
    assert not set(kept) & set(trained)
    assert len(set(trained)) == sum(WINDOWS) - 69
    # The order is mixed: what a few batches show is of more than one source.
    assert {token // 10_000 for token in kept[:30]} >= {1, 2}


def test_the_fingerprint_tells_stores_and_weights_apart(stores: list[TokenStore]) -> None:
    prints = [
        mixture(stores, (1, 1, 1)).fingerprint,
        mixture(stores, (1, 1, 2)).fingerprint,
        mixture(stores[:2], (1, 1)).fingerprint,
    ]
    assert len(set(prints)) == 3
    assert mixture(stores, (2, 2, 2)).fingerprint == prints[0]


def test_a_weight_too_small_to_be_read_is_refused(stores: list[TokenStore]) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.1\.weight = 1e-05: less than one sample in 10000"):
        mixture(stores, (1, 1e-5, 1))


def tokenizer_json(*more: str, note: str = "") -> str:
    """The bytes and some tokens; ``note`` is white space that changes nothing."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(more))
    return tokenizer.to_str() + note


def test_sources_of_several_tokenizers_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    ours, other = (
        store_of(tmp_path / name, 0, 9, tokenizer=tokenizer_json(*more)) for name, more in (("a", ()), ("b", ("<x>",)))
    )
    unknown = megatron_of(tmp_path / "unknown", 40)
    message = r"data\.sources = .*b.s: made by another tokenizer than .*a.s.tokenizer\.json; make it again with"
    for stores in ([ours, other], [unknown, ours, other], [ours, unknown, other], [unknown, ours, ours, other]):
        with pytest.raises(DataError, match=message):
            mixture(stores, [1] * len(stores))


def test_tokenizers_are_the_same_when_their_entries_are(tmp_path: Path) -> None:
    """A file may say the same in other bytes; and a store that keeps no tokenizer is trusted."""
    one, same = (
        store_of(tmp_path / name, 0, 9, tokenizer=tokenizer_json(note=note)) for name, note in (("a", ""), ("b", "\n"))
    )
    assert one.tokenizer_path is not None
    assert same.tokenizer_path is not None
    assert one.tokenizer_path.read_bytes() != same.tokenizer_path.read_bytes()
    mixed = mixture([megatron_of(tmp_path / "unknown", 40), one, same], (1, 1, 1))
    assert kept_tokenizer(mixed.stores) == one.tokenizer_path
