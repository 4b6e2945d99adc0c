"""Collectives and messages are tried over everything that carries them between processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.train.pool import Pool


class Carried:
    """A pool whose worlds may ``share`` memory or may not."""

    def __init__(self, pool: Pool, share: bool) -> None:
        self._pool, self._share = pool, share

    def run(self, task: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return self._pool.run(task, *arguments, share=self._share, **options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" in metafunc.fixturenames and not metafunc.module.__name__.startswith("test_shared"):
        metafunc.parametrize("pool", ["shared", "gloo"], indirect=True)


@pytest.fixture
def pool(request: pytest.FixtureRequest, pool: Pool) -> Carried:
    return Carried(pool, getattr(request, "param", "shared") == "shared")
