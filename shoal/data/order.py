"""The order of samples, as a pure function of the seed and the sample's number, in O(1) memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.data.hashing import derive, mix
from shoal.errors import DataError, setting

_ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of [0, n), chosen by ``key``, that stores only ``n`` and its round keys.

    A balanced Feistel network permutes [0, 4^h), the smallest such range that holds n; a value that falls
    outside [0, n) is enciphered again until it falls inside ("cycle walking": Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002). The range is at most 4n: no more than four tries are expected.
    """

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= 2**62, n
        self.n = n
        self._half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        self._round_keys = [derive("feistel", key, r) for r in range(_ROUNDS)]

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values (int64, the shape of ``places``) at ``places``, each in [0, n)."""
        assert places.size == 0 or (places.min() >= 0 and places.max() < self.n), "place outside [0, n)"
        x = self._encipher(places.astype(np.uint64).reshape(-1))
        while (outside := x >= self.n).any():
            x[outside] = self._encipher(x[outside])
        return x.astype(np.int64).reshape(places.shape)

    def _encipher(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, drop = np.uint64(self._half_bits), np.uint64(64 - self._half_bits)
        left, right = x >> half, x & np.uint64((1 << self._half_bits) - 1)
        for key in self._round_keys:
            left, right = right, left ^ (mix(right ^ np.uint64(key)) >> drop)
        return (left << half) | right


class Order:
    """Which of the samples that a token store is packed into each sample of a run is.

    The packed samples are permuted once by a key that does not depend on the seed, and the last
    ``round(validation * packed)`` places are the validation split: no seed moves one across. The rest
    is permuted again for every epoch by a key of (seed, epoch), and sample g of the run is place
    ``g % n_train`` of epoch ``g // n_train``.

    ``packed`` is how many the store makes, ``validation`` the fraction kept for validation, in [0, 1).
    Raises DataError when the fraction is out of range or leaves no sample for training.
    """

    def __init__(self, packed: int, validation: float, seed: int) -> None:
        if not 0 <= validation < 1:
            raise DataError(setting("data.validation", validation, "no share", "at least 0 and below 1"))
        self.n_validation = round(validation * packed)
        self.n_train = packed - self.n_validation
        if self.n_train < 1:
            problem = f"leaves none of the {packed} samples for training"
            raise DataError(setting("data.validation", validation, problem, "a smaller one, or more text"))
        self._seed = seed
        self._split = Permutation(packed, derive("split"))

    def train(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Packed samples (int64) of the training samples ``samples`` (int64, counted from 0 through all epochs)."""
        epochs, places = np.divmod(samples, self.n_train)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            shuffle = Permutation(self.n_train, derive("epoch", self._seed, int(epoch)))
            places[here] = shuffle(places[here])
        return self._split(places)

    def validation(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Packed samples (int64) at ``places`` (int64, in [0, n_validation)) of the validation split."""
        return self._split(self.n_train + places)
