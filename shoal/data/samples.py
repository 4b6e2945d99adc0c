"""The samples of one token store, in an order, some of them kept for validation."""

from __future__ import annotations

from hashlib import sha256
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.order import Order
from shoal.data.packing import Kind, Rows, Statistics, pack
from shoal.data.store import TokenStore
from shoal.errors import DataError, setting


class Samples(Protocol):
    """Samples of a run, by number: what trains goes on through epochs without end, what validates is walked once."""

    stores: tuple[TokenStore, ...]
    fingerprint: str
    """Hex digits that identify the stores, and how samples are made of them."""
    n_train: int
    """Samples of one epoch; of a mixture, the samples of all stores together."""
    n_validation: int

    shares: tuple[float, ...]
    """The share of the training samples that is read from each store."""

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        """Of each store, what is kept for validation included."""

    def train(self, numbers: NDArray[np.int64]) -> Rows:
        """The training samples ``numbers`` (int64, counted from 0 through all epochs)."""

    def validation(self, places: NDArray[np.int64]) -> Rows:
        """The samples at ``places`` (int64, in [0, n_validation)) of the validation split."""

    def origins(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The place in ``stores`` of the one that each of the training samples ``numbers`` is read from."""


class StoreSamples:
    """Samples of ``seq_len`` positions from one store; ``packing`` says how its documents become samples, ``Order``
    which of them each sample of the run is.

    Raises DataError when the store holds no sample, or ``validation`` leaves no sample for training; and with
    ``validates`` when it keeps none.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        seed: int,
        validation: float = 0.0,
        packing: Kind = "stream",
        validates: bool = False,
    ) -> None:
        self.stores: tuple[TokenStore, ...] = (store,)
        self.shares: tuple[float, ...] = (1.0,)
        self._packing = pack(store, seq_len, packing)
        self._order = Order(len(self._packing), validation, seed)
        self.n_train, self.n_validation = self._order.n_train, self._order.n_validation
        if validates and self.n_validation == 0:
            samples = len(self._packing)
            problem = f"keeps none of the {samples} samples of {store.path} for validation"
            least = ceil(510_000 / samples) / 1_000_000
            legal = f"use at least {least:g}, or 0" if samples > 1 else "use 0, or more text"
            raise DataError(setting("data.validation", validation, problem, legal))
        made = "" if packing == "stream" else f" {packing}"
        self.fingerprint = sha256(f"{store.fingerprint}{made}".encode()).hexdigest()[:16] if made else store.fingerprint

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        return (self._packing.statistics,)

    def train(self, numbers: NDArray[np.int64]) -> Rows:
        return self._packing.rows(self._order.train(numbers))

    def validation(self, places: NDArray[np.int64]) -> Rows:
        return self._packing.rows(self._order.validation(places))

    def origins(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(numbers)
