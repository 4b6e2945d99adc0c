"""The batch of any step, as a pure function of the seed and the step: there is no position to resume.

Shapes: b samples of this part, T = ``seq_len``. A batch is a dictionary of int64 tensors:

    tokens     [b, T]
    labels     [b, T]  the token that follows each; IGNORED where no loss is taken
    positions  [b, T]  place in the sample, or in the document when documents are kept apart
    documents  [b, T]  number of the document in the sample: 0, 1, ...; absent when they are not kept apart
    sample     [b]     number of the sample in the run, the key of everything random about it
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.hashing import derive, uniform
from shoal.data.order import Order
from shoal.data.store import TokenStore
from shoal.errors import DataError, setting
from shoal.model.loss import IGNORED

Batch = dict[str, torch.Tensor]
_Ints = NDArray[np.int64]


class Batches:
    """Batches of one split of a token store.

    Window k of the store covers the tokens [k T, k T + T + 1), so that no token is predicted twice; ``Order``
    says which window each sample reads. ``batch`` counts the samples of a step over all parts. With
    ``documents`` positions restart at each document, and none is predicted from the one before.

    Raises DataError when the store holds not one window, and when ``validation`` leaves the split none.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        batch: int,
        seed: int,
        split: Literal["train", "validation"] = "train",
        validation: float = 0.0,
        documents: bool = False,
    ) -> None:
        windows = (len(store) - 1) // seq_len
        if windows < 1:
            problem = f"a sample takes {seq_len + 1} tokens and {store.path} has {len(store)}"
            raise DataError(setting("data.seq_len", seq_len, problem, f"at most {len(store) - 1}, or more text"))
        self._order = Order(windows, validation, seed)
        if split == "validation" and self._order.n_validation == 0:
            problem = f"keeps none of the {windows} windows for validation"
            legal = f"use at least {0.51 / windows:.2g}, or 0" if windows > 1 else "use 0, or more text"
            raise DataError(setting("data.validation", validation, problem, legal))
        self.store = store
        self._seq_len, self._batch = seq_len, batch
        self._split, self._documents = split, documents

    @property
    def n_samples(self) -> int:
        """Samples in the split."""
        return self._order.n_train if self._split == "train" else self._order.n_validation

    @property
    def n_batches(self) -> int:
        """Batches that cover the split once."""
        return -(-self.n_samples // self._batch)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Part ``part`` of ``parts`` equal, contiguous parts of the global batch of ``step``, counted from 0.

        Training goes on through epochs without end. Validation has ``n_batches`` steps; the last is filled
        up with samples whose labels do not count, so that every part always has the same shapes.
        """
        numbers = _numbers(step, self._batch, part, parts)
        if self._split == "train":
            windows, filler = self._order.train(numbers), np.zeros(len(numbers), bool)
        else:
            assert step < self.n_batches, (step, self.n_batches)
            filler = numbers >= self.n_samples
            windows = self._order.validation(np.minimum(numbers, self.n_samples - 1))

        starts = windows * self._seq_len
        rows = [self.store.tokens[at : at + self._seq_len + 1] for at in starts.tolist()]
        text = np.stack(rows).astype(np.int64)
        if not self._documents:
            return _to_torch(text[:, :-1], np.where(filler[:, None], IGNORED, text[:, 1:]), numbers)
        opens = self._document_starts(starts)
        labels = np.where(opens[:, 1:] | filler[:, None], IGNORED, text[:, 1:])
        return _to_torch(text[:, :-1], labels, numbers, opens[:, :-1])

    def _document_starts(self, starts: _Ints) -> NDArray[np.bool_]:
        """Which tokens [b, T + 1] of the samples that begin at ``starts`` are the first of a document."""
        opens = np.zeros((len(starts), self._seq_len + 1), bool)
        for row, at in zip(opens, starts.tolist(), strict=True):
            first, last = np.searchsorted(self.store.documents, [at, at + len(row)])
            row[self.store.documents[first:last] - at] = True
        return opens


class Synthetic:
    """Random tokens in [0, vocab) that need no file, each sample a function of (seed, its number)."""

    def __init__(self, *, vocab: int, seq_len: int, batch: int, seed: int) -> None:
        self._vocab, self._seq_len, self._batch, self._seed = vocab, seq_len, batch, seed

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """As ``Batches.batch``."""
        numbers = _numbers(step, self._batch, part, parts)
        text = np.stack([self._sample(number) for number in numbers.tolist()])
        return _to_torch(text[:, :-1], text[:, 1:], numbers)

    def _sample(self, number: int) -> _Ints:
        philox = np.random.Philox(key=derive("synthetic", self._seed, number))
        return np.random.Generator(philox).integers(0, self._vocab, self._seq_len + 1)


def batch_hash(batch: Batch) -> int:
    """A 64-bit hash of the batch's tokens and labels, to see that two runs read the same.

    It is the sum, modulo 2^64 and as a signed number, of one hash per sample: the parts of a batch add up to the
    whole's, however it was divided.
    """
    total = 0
    for number, *rows in zip(*(batch[name].cpu().numpy() for name in ("sample", "tokens", "labels")), strict=True):
        digest = blake2b(str(number).encode(), digest_size=8)
        for row in rows:
            digest.update(row.astype("<i8").tobytes())
        total += int.from_bytes(digest.digest(), "little")
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def mask_labels(batch: Batch, seed: int, low: float = 0.0, high: float = 0.95) -> Batch:
    """The batch with labels left out unequally: each sample loses a share drawn uniformly from [low, high).

    The share is a function of (seed, sample), and which labels go of (seed, sample, place): every division
    of the batch loses the same. A mean taken in two stages (over a rank, then over ranks) then differs from
    the mean.
    """
    sample_b1 = batch["sample"].cpu().numpy()[:, None]
    place_1T = np.arange(batch["labels"].shape[1], dtype=np.int64)[None]
    share_b1 = low + (high - low) * uniform(derive("mask share", seed), sample_b1)
    gone = torch.from_numpy(uniform(derive("mask", seed), sample_b1, place_1T) < share_b1)
    labels = batch["labels"]
    return {**batch, "labels": labels.masked_fill(gone.to(labels.device), IGNORED)}


def _numbers(step: int, batch: int, part: int, parts: int) -> _Ints:
    """Numbers in the run of the samples of one part of a step."""
    assert batch % parts == 0, (batch, parts)
    assert 0 <= part < parts, (part, parts)
    share = batch // parts
    first = step * batch + part * share
    return np.arange(first, first + share, dtype=np.int64)


def _to_torch(tokens: _Ints, labels: _Ints, numbers: _Ints, opens: NDArray[np.bool_] | None = None) -> Batch:
    """The dictionary of a batch; ``opens`` [b, T] marks the tokens that open a document, if they are kept apart."""
    place_bT = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    arrays = {"tokens": tokens, "labels": labels, "positions": place_bT, "sample": numbers}
    if opens is not None:
        arrays["positions"] = place_bT - np.maximum.accumulate(np.where(opens, place_bT, 0), axis=1)
        documents = np.cumsum(opens, axis=1, dtype=np.int64)
        arrays["documents"] = documents - documents[:, :1]
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
