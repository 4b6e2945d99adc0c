"""Bytes in words."""

from __future__ import annotations

import pytest

from shoal.sizes import size_text, unit_for


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (4096, "4.00 KiB"),
        (16_357_786, "15.6 MiB"),
        (2**20 * 99.97, "100 MiB"),
        (2**20 * 9.996, "10.0 MiB"),
        (2**30 - 1, "1,024 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**40, "3,072 GiB"),
    ],
)
def test_sizes_have_three_digits_and_never_none(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_what_is_compared_has_one_unit() -> None:
    assert unit_for(2**20).of(1024) == "0.00"
