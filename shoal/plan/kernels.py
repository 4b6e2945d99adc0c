"""What one device takes: for matrix products by shape, for attention, for reading and writing memory."""

from __future__ import annotations

from math import ceil

from shoal.plan.hardware import Device
from shoal.plan.profile import Constants, Profile

_TERA, _GIGA = 1e12, 1e9
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))


class Kernels:
    """Seconds on one device, under the constants of its kind and of a framework's kernels."""

    def __init__(self, device: Device, profile: Profile, constants: Constants, width: int = 2) -> None:
        family = family_of(device)
        self._units = device.units
        pace = constants[f"rate.{family}"] * _TERA * (1.0 if width == 2 else 0.5)
        self._rate = device.matmul * pace
        self._rates = {
            16: self._rate,
            8: device.matmul_8bit * pace * constants["rate.8bit"],
            4: 2.0 * device.matmul_8bit * pace * constants["rate.4bit"],
        }
        self._memory = device.memory_rate * _GIGA * constants["memory.efficiency"]
        self._ramp = constants["matmul.ramp"]
        self._tiles = constants["matmul.tiles"]
        self._launch = constants[f"launch.{profile.host}"] * 1e-6
        self._fused = profile.attention not in ("unfused", "fused-softmax")
        self._attention = constants[f"attention.{profile.attention}" + (f".{family}" if self._fused else "")]
        self._odd = constants["attention.odd"]
        self._head = constants["attention.head"]
        self._passes = constants[f"elementwise.{profile.kernels}"]
        self._known: dict[tuple[int, int, int, int], float] = {}

    def matmul(self, m: int, k: int, n: int, bits: int = 16) -> float:
        """(m, k) times (k, n). Waves of tiles over the multiprocessors, of which the last may be partly empty, and a
        ramp over k, along which a tile's pipeline fills; or reading and writing, where that takes longer."""
        key = (m, k, n, bits)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._matmul(m, k, n, bits)
        return known

    def _matmul(self, m: int, k: int, n: int, bits: int) -> float:
        filled = 0.0
        for rows, columns in _TILES:
            tiles = ceil(m / rows) * ceil(n / columns)
            waves = ceil(tiles / self._units)
            # Small tiles read more for what they compute.
            worth = 1.0 if rows * columns >= 32768 else 0.95 if rows * columns >= 16384 else 0.8
            filled = max(filled, worth * m * n / (waves * self._units * rows * columns))
        rate = self._rates[bits]
        ramp = self._ramp * 16 / bits
        compute = 2.0 * m * k * n / (rate * float(filled**self._tiles) * k / (k + ramp))
        moved = (bits / 8 * (m * k + k * n) + 2 * m * n) / self._memory
        return max(compute, moved) + self._launch

    def attention(self, batch: int, queries: int, keys: int, heads: int, channels: int, causal: bool = True) -> float:
        """The forward pass of attention's core; ``channels`` are those of a query and of a value, over all heads.

        Kernels that keep no scores skip what is masked; the others compute it, and write and read the scores."""
        flops = 2.0 * batch * queries * keys * channels
        dim = channels / heads / 2
        if self._fused:
            rate = self._rate * self._attention * dim / (dim + self._head)
            return flops * (0.5 if causal else 1.0) / rate + self._launch
        scores = batch * heads * queries * keys
        # Tensor cores take channels by eights.
        aligned = 1.0 if dim % 8 == 0 else self._odd
        return flops / (self._rate * aligned * 0.6 * dim / (dim + self._head)) + self.moved(
            self._attention * scores, False
        )

    @property
    def attention_backward(self) -> float:
        """How much longer attention's backward pass takes than its forward pass."""
        return 2.5 if self._fused else 2.0

    def moved(self, amount: float, by_kernels: bool = True) -> float:
        """Reading and writing ``amount`` bytes, in as many passes more as kernels that are not fused need."""
        return amount * (self._passes if by_kernels else 1.0) / self._memory

    def launches(self, number: float) -> float:
        """Starting that many kernels."""
        return number * self._launch


def family_of(device: Device) -> str:
    """Devices of one generation share their constants."""
    name = device.name
    if "b300" in name:
        return "blackwell-ultra"
    for family, prefixes in _FAMILIES.items():
        if name.startswith(prefixes):
            return family
    return "other"


_FAMILIES = {
    "volta": ("v100",),
    "ampere": ("a100", "l40s", "rtx"),
    "hopper": ("h100", "h200", "h800"),
    "blackwell": ("b200", "gb200"),
}
