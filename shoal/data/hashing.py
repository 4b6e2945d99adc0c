"""Randomness as a function: keys and uniform numbers hashed from what they depend on, without a state."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# 2^64 divided by the golden ratio: the increment of SplitMix64, which keeps successive zero counters apart.
_INCREMENT = 0x9E3779B97F4A7C15


def derive(*parts: int | str) -> int:
    """A 64-bit key for the named purpose: ``derive("order", seed, epoch)``. Equal parts give equal keys."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bijective scrambling of 64-bit words in which every input bit reaches every output bit.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014). ``x`` must have at least one dim: on arrays uint64 wraps in silence, on numpy scalars it warns.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(key: int, *counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from (key, counters) alone; the counters (of any shapes) broadcast together."""
    word = np.full(1, key, np.uint64)
    for counter in counters:
        word = mix((word + np.uint64(_INCREMENT)) ^ counter.astype(np.uint64))
    # float64 has 53 bits of mantissa: the top 53 bits give every multiple of 2^-53 the same chance.
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
