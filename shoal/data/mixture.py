"""Several sources in one run: which of them each sample is read from, as a pure function of the seed and its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from shoal.data.hashing import derive
from shoal.data.order import Permutation
from shoal.data.packing import Rows, Statistics
from shoal.data.samples import Samples
from shoal.data.store import kept_tokenizer
from shoal.data.tokenize import check_tokenizer
from shoal.errors import DataError, setting

BLOCK = 10_000
"""Samples in which every source has exactly its share, rounded to one sample."""

_Ints = NDArray[np.int64]


class Mixture:
    """``sources``, each with a share of the samples that is its weight over the sum of ``weights``.

    Of each BLOCK samples of the run in turn, source s has a fixed number q_s, and a permutation keyed by (seed, block)
    scatters them: place p of block k is read from the source whose range of [0, BLOCK) holds π(p), and is its sample
    k q_s + (π(p) − the range's start). So every source's samples are used one by one, each once an epoch of its own,
    and any of them is found without a count of those before.

    The validation split is all of the sources' own, in an order that depends on no seed.

    Raises DataError when the sources were tokenised by different tokenizers, and when a weight is too small to have a
    sample in BLOCK.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        assert len(sources) == len(weights) > 0
        self._sources, self._seed = list(sources), seed
        self.stores = tuple(store for source in sources for store in source.stores)
        if (known := kept_tokenizer(self.stores)) is not None:
            for store in self.stores:
                check_tokenizer(store, known, "data.sources")
        self._quotas = _quotas(weights)
        self._bounds = np.cumsum([0, *self._quotas])
        self.shares = tuple(quota / BLOCK for quota in self._quotas)
        self.n_train = sum(source.n_train for source in sources)
        self._validation_bounds = np.cumsum([0, *(source.n_validation for source in sources)])
        self.n_validation = int(self._validation_bounds[-1])
        parts = [f"{one.fingerprint} {quota}" for one, quota in zip(sources, self._quotas, strict=True)]
        self.fingerprint = sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        return tuple(one for source in self._sources for one in source.statistics)

    def train(self, numbers: _Ints) -> Rows:
        blocks, places = self._places(numbers)
        which = self._which(places)
        own = blocks * np.array(self._quotas)[which] + places - self._bounds[which]
        return _gather(which, lambda s: self._sources[s].train(own[which == s]))

    def validation(self, places: _Ints) -> Rows:
        mixed = Permutation(self.n_validation, derive("validation mixture"))(places)
        which = np.searchsorted(self._validation_bounds, mixed, side="right") - 1
        own = mixed - self._validation_bounds[which]
        return _gather(which, lambda s: self._sources[s].validation(own[which == s]))

    def origins(self, numbers: _Ints) -> _Ints:
        return self._which(self._places(numbers)[1])

    def _places(self, numbers: _Ints) -> tuple[_Ints, _Ints]:
        """The block of each sample, and where the permutation of its block sends it."""
        blocks, places = np.divmod(numbers, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            places[here] = Permutation(BLOCK, derive("mixture", self._seed, int(block)))(places[here])
        return blocks, places

    def _which(self, places: _Ints) -> _Ints:
        return np.searchsorted(self._bounds, places, side="right") - 1


def _gather(which: _Ints, rows_of: Callable[[int], Rows]) -> Rows:
    """The rows in the order of the samples, of which ``which`` names the sources; ``rows_of(s)`` are those of one."""
    parts = {s: rows_of(s) for s in np.unique(which).tolist()}
    rows = Rows.empty(len(which), next(iter(parts.values())).tokens.shape[1], 0)
    for s, part in parts.items():
        rows.put(which == s, part)
    return rows


def _quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block: its share, the largest remainders rounded up."""
    exact = np.array(weights) * (BLOCK / sum(weights))
    quotas = np.floor(exact).astype(np.int64)
    short = BLOCK - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:short]] += 1
    if (quotas == 0).any():
        s = int(np.argmin(quotas))
        problem = f"less than one sample in {BLOCK}"
        raise DataError(setting(f"data.sources.{s}.weight", weights[s], problem, "leave it out, or give it more"))
    return [int(quota) for quota in quotas]
