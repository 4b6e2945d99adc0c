"""Collectives and messages are tried over everything that carries them between processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lending import lending

from shoal.train.pool import Pool


class Carried:
    """A pool whose worlds share memory, or read each other's (``"lent"``) however little it is, or use gloo."""

    def __init__(self, pool: Pool, carrier: str) -> None:
        self._pool, self._carrier = pool, carrier

    def run(self, task: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        if self._carrier == "lent":
            task, arguments = lending, (task, *arguments)
        return self._pool.run(task, *arguments, share=self._carrier != "gloo", **options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" in metafunc.fixturenames and not metafunc.module.__name__.startswith("test_shared"):
        metafunc.parametrize("pool", ["shared", "lent", "gloo"], indirect=True)


@pytest.fixture
def pool(request: pytest.FixtureRequest, pool: Pool) -> Carried:
    return Carried(pool, getattr(request, "param", "shared"))
