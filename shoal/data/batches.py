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

from shoal.data.batch_size import BatchSize
from shoal.data.hashing import derive, uniform
from shoal.data.packing import Rows
from shoal.data.samples import Samples
from shoal.model.loss import IGNORED

Batch = dict[str, torch.Tensor]
_Ints = NDArray[np.int64]


class Batches:
    """Batches of one split of some samples.

    ``batch`` counts the samples of a step over all parts, and may depend on the step. With ``documents`` positions
    restart at each document, and none is predicted from the one before.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch: int | BatchSize,
        split: Literal["train", "validation"] = "train",
        documents: bool = False,
    ) -> None:
        assert split == "train" or samples.n_validation > 0, "a validation split without a sample"
        self.samples = samples
        self._size = _size(batch)
        self._split, self._documents = split, documents

    @property
    def n_samples(self) -> int:
        """Samples in the split."""
        return self.samples.n_train if self._split == "train" else self.samples.n_validation

    @property
    def n_batches(self) -> int:
        """Batches that cover the split once, where all are of one size."""
        return -(-self.n_samples // self._size.samples)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Part ``part`` of ``parts`` equal, contiguous parts of the global batch of ``step``, counted from 0.

        Training goes on through epochs without end. Validation has ``n_batches`` steps; the last is filled
        up with samples whose labels do not count, so that every part always has the same shapes.
        """
        numbers, rows = self.rows(step, part, parts)
        labels = np.where(rows.counts[:, 1:], rows.tokens[:, 1:], IGNORED)
        return _to_torch(rows.tokens[:, :-1], labels, numbers, rows.opens[:, :-1] if self._documents else None)

    def rows(self, step: int, part: int = 0, parts: int = 1) -> tuple[_Ints, Rows]:
        """The numbers in the run of the samples of a batch, and what they hold; ``counts`` as in the batch."""
        numbers = _numbers(step, self._size, part, parts)
        if self._split == "train":
            rows = self.samples.train(numbers)
        else:
            assert step < self.n_batches, (step, self.n_batches)
            rows = self.samples.validation(np.minimum(numbers, self.n_samples - 1))
            rows.counts[numbers >= self.n_samples] = False
        if self._documents:
            rows.counts[rows.opens] = False
        return numbers, rows


class Synthetic:
    """Random tokens in [0, vocab) that need no file, each sample a function of (seed, its number)."""

    def __init__(self, *, vocab: int, seq_len: int, batch: int | BatchSize, seed: int) -> None:
        self._vocab, self._seq_len, self._size, self._seed = vocab, seq_len, _size(batch), seed

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """As ``Batches.batch``."""
        numbers = _numbers(step, self._size, part, parts)
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


def _size(batch: int | BatchSize) -> BatchSize:
    return batch if isinstance(batch, BatchSize) else BatchSize(batch)


def _numbers(step: int, size: BatchSize, part: int, parts: int) -> _Ints:
    """Numbers in the run of the samples of one part of a step."""
    begin, batch = size.at(step)
    assert batch % parts == 0, (batch, parts)
    assert 0 <= part < parts, (part, parts)
    share = batch // parts
    first = begin + part * share
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
