"""Workers for the tests that need several ranks: forked once, before anything in this process starts a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.train.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(4) as workers:
        yield workers


@pytest.fixture(scope="session")
def eight() -> Iterator[Pool]:
    with Pool(8) as workers:
        yield workers
