"""Dropout as a function of where a value stands, not of a generator's state.

The mask is a hash of (seed, step, site, sample, position, feature): a rank that holds some samples, some positions or
some features drops exactly what one device would drop there, after any resume and under any layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

_M1 = 0x2545F4914F6CDD1D
_M2 = -0x40A7B892E31B1A47  # odd, as a signed 64-bit integer
_LOW = (1 << 32) - 1


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 that spreads its bits: xor-shift and multiply, twice, in place.

    The masks make the shifts logical; torch's copy the sign.
    """
    x ^= (x >> 32) & _LOW
    x *= _M1
    x ^= (x >> 32) & _LOW
    x *= _M2
    x ^= (x >> 32) & _LOW
    return x


@dataclass(frozen=True)
class Noise:
    """The keys of one micro-batch at one step.

    ``rows`` is int64 of shape [samples, positions]: a hash of (seed, step, sample, position). ``block`` is the number
    of the block of features held here, where these are divided into blocks of one width.
    """

    rows: Tensor
    block: int = 0

    @classmethod
    def of(cls, seed: int, step: int, sample: Tensor, length: int, first: int = 0) -> Noise:
        """Keys for samples numbered ``sample`` (int64 [samples]) at positions ``first`` … ``first + length − 1``."""
        return cls.at(seed, step, sample, torch.arange(first, first + length, device=sample.device))

    @classmethod
    def at(cls, seed: int, step: int, sample: Tensor, positions: Tensor) -> Noise:
        """Keys for samples numbered ``sample`` (int64 [samples]) at ``positions`` (int64 [positions], or
        [samples, positions])."""
        key = blake2b(f"{seed}/{step}".encode(), digest_size=7).digest()
        samples = _mix(sample + int.from_bytes(key, "little"))
        return cls(_mix(samples[:, None] + positions))

    def part(self, first: int, count: int) -> Noise:
        """The keys of ``count`` positions from number ``first`` of these, those past the end being padding."""
        rows = self.rows[:, first : first + count]
        return replace(self, rows=F.pad(rows, (0, count - rows.shape[1])))

    def drop(self, x: Tensor, rate: float, site: str) -> Tensor:
        """``x`` [samples, positions, features] with about ``rate`` of it zeroed and the rest scaled by 1/(1 − rate).

        ``site`` names the place in the model.
        """
        if rate == 0.0:
            return x
        salt = int.from_bytes(blake2b(site.encode(), digest_size=7).digest(), "little")
        width = x.shape[-1]
        features = torch.arange(self.block * width, (self.block + 1) * width, device=x.device)
        bits = _mix(_mix(self.rows + salt)[..., None] + features)
        keep = bits >= int((rate - 0.5) * 2.0**64)
        # Autograd keeps the mask, a byte an element, and nothing else.
        return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)
