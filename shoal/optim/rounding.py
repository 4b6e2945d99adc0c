"""Stochastic rounding to bf16: up or down, each as likely as the value is near, so that on average nothing is lost.

Weights then need no float32 copies. An update that is a hundredth of the step between two bf16 numbers moves one weight
in a hundred by a whole step, where rounding to the nearest would move none (Zamirai et al. 2020).
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_LOWER = 1 << 16
"""float32 has sixteen bits more than bf16, the lower ones."""


class Rounding:
    """Rounds what one update has made. Which way is a function of (``seed``, update, the run's ``key``, place in the
    run): ranks that hold the same run round it alike."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.updates = 0

    def round_into(self, half: Tensor, wide: Tensor, key: str) -> None:
        """Write ``wide`` (float32) to ``half`` (bf16, of the same shape)."""
        digest = blake2b(f"{self._seed}/{self.updates}/{key}".encode(), digest_size=8).digest()
        generator = torch.Generator(half.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randint(_LOWER, wide.shape, dtype=torch.int32, generator=generator, device=half.device)
        half.copy_((wide.view(torch.int32) + noise).bitwise_and_(-_LOWER).view(torch.float32))
