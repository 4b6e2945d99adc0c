"""The machines a job may run on: a catalogue of devices, and clusters of them, named or read from TOML.

Rates are those that a long run sustains, not those of a data sheet, where somebody has measured them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, nearest, setting

_MAMF = "largest matrix-product rate found (ml-engineering, compute/accelerator, mamf-finder)"


@dataclass(frozen=True)
class Device:
    """One GPU, or one rank's share of a machine. Rates count 10^12 operations and 10^9 bytes a second."""

    name: str
    memory_gib: float
    peak: float
    """Dense bf16 (fp16 on V100) of the data sheet: what MFU is measured against."""
    matmul: float
    """Dense bf16, sustained."""
    matmul_8bit: float
    """Likewise with 8-bit floats; that of 16-bit ones where the device has none."""
    memory_rate: float
    """Device memory, of the data sheet."""
    link: float
    """To other devices of the node, each way, of the data sheet."""
    host_link: float
    """To the host's memory, each way."""
    units: int
    """Multiprocessors: what a matrix product's tiles are dealt out to."""
    per_node: int
    """Devices that share fast links, where a cluster does not say."""
    nic: float
    """Network of each device, each way, where a cluster does not say."""
    source: str


_CATALOGUE = (
    Device("v100", 32, 125, 105, 105, 900, 150, 13, 80, 8, 12.5, "NVIDIA V100 data sheet; 84 % of it sustained"),
    Device("a100-40", 40, 312, 271, 271, 1555, 300, 26, 108, 8, 25, f"{_MAMF}: 271.2 TFLOP/s on A100 SXM"),
    Device("a100", 80, 312, 271, 271, 2039, 300, 26, 108, 8, 25, f"{_MAMF}: 271.2 TFLOP/s on A100 SXM"),
    Device("h100", 80, 989, 794, 1402, 3350, 450, 55, 132, 8, 50, f"{_MAMF}: 794.5 and 1402.6 TFLOP/s on H100 SXM"),
    Device("h100-500w", 96, 989, 560, 990, 2400, 450, 55, 132, 8, 50, "H100 of 500 W and HBM2e; rate scaled by power"),
    Device("h800", 80, 989, 794, 1402, 3350, 200, 55, 132, 8, 50, "as H100, with NVLink of 400 GB/s both ways"),
    Device("h200", 141, 989, 794, 1453, 4800, 450, 55, 132, 8, 50, f"{_MAMF}: 1453.4 TFLOP/s (fp8) on H200 SXM"),
    Device("b200", 180, 2250, 1745, 3432, 8000, 900, 55, 148, 8, 50, f"{_MAMF}: 1745 and 3432.5 TFLOP/s on B200 SXM"),
    Device("b300", 268, 2250, 1769, 3353, 8000, 900, 55, 148, 8, 100, f"{_MAMF}: 1769 and 3353.3 TFLOP/s on B300 SXM"),
    Device("gb200", 185, 2500, 1822, 3615, 8000, 900, 200, 148, 64, 50, f"{_MAMF}: 1822 and 3615.6 TFLOP/s on GB200"),
    Device("gb300", 268, 2500, 1822, 3615, 8000, 900, 200, 148, 64, 100, "as GB200, with more memory"),
    Device("mi300x", 192, 1307, 668, 1300, 5300, 448, 55, 304, 8, 50, f"{_MAMF}: 668.4 TFLOP/s on MI300X"),
    Device("l40s", 48, 362, 230, 460, 864, 26, 26, 142, 8, 12.5, "NVIDIA L40S data sheet; two thirds sustained"),
    Device("rtx4090", 24, 165, 150, 300, 1008, 26, 26, 128, 8, 3.1, "NVIDIA Ada data sheet; 90 % of it sustained"),
    Device("cpu", 4, 0.1, 0.06, 0.06, 10, 4, 10, 1, 4, 1.2, "two laptop cores, of the order of magnitude only"),
)
DEVICES = {device.name: device for device in _CATALOGUE}
_ALIASES = {"a100-80": "a100", "h100-80": "h100", "4090": "rtx4090"}


@dataclass(frozen=True)
class Cluster:
    """``nodes`` nodes of ``per_node`` devices, which have ``nic`` 10^9 bytes a second each way to other nodes each."""

    name: str
    device: Device
    nodes: int
    per_node: int
    nic: float
    """A device's share of its node's network."""
    cores: int = 0
    """Of a node, where its ranks share them; 0 where each rank has a device of its own."""

    @property
    def crowd(self) -> float:
        """How many ranks share a core; 1 where each has its own, or several."""
        return max(1.0, self.per_node / self.cores) if self.cores else 1.0

    @property
    def ranks(self) -> int:
        """Devices altogether."""
        return self.nodes * self.per_node

    def resized(self, ranks: int) -> Cluster:
        """The like of it with another number of devices, in whole nodes where there are several."""
        per_node = min(self.per_node, ranks)
        return replace(self, nodes=-(-ranks // per_node), per_node=per_node)


_NAMED = {"laptop": ("cpu", 1, 4)}
_FORM = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9-]*)(?::(\d+(?:\.\d+)?)g)?")
_LEGAL = "write 8xh100, 64x8xh100:400G (nodes x devices x kind : Gbit/s a device), laptop, or a .toml file"


def cluster(text: str) -> Cluster:
    """The cluster of a name such as ``8xh100`` or ``64x8xh100:400G``, or of a TOML file.

    Raises :class:`ConfigError` for one that does not exist."""
    if text.endswith(".toml"):
        return _read(Path(text))
    if text in _NAMED:
        known, nodes, per_node = _NAMED[text]
        return _cluster(text, DEVICES[known], nodes, per_node, None)
    form = _FORM.fullmatch(text.lower())
    if form is None:
        raise ConfigError(setting("cluster", text, "there is no such cluster", _LEGAL))
    nodes, count = int(form[1] or 1), int(form[2])
    if nodes * count == 0:
        raise ConfigError(setting("cluster", text, "it has no devices", _LEGAL))
    kind = _device(form[3], text)
    # Without nodes, as many as the devices need.
    if form[1] is None and count > kind.per_node:
        if count % kind.per_node:
            problem = f"{count} devices do not fill nodes of {kind.per_node}"
            legal = f"use {count // kind.per_node}x{kind.per_node}x{form[3]}"
            raise ConfigError(setting("cluster", text, problem, legal))
        nodes, count = count // kind.per_node, kind.per_node
    return _cluster(text, kind, nodes, count, float(form[4]) / 8 if form[4] else None)


def _cluster(name: str, device: Device, nodes: int, per_node: int, nic: float | None) -> Cluster:
    return Cluster(name, device, nodes, per_node, device.nic if nic is None else nic)


def _device(name: str, text: str) -> Device:
    found = DEVICES.get(_ALIASES.get(name, name))
    if found is None:
        problem = f"unknown device '{name}'{nearest(name, tuple(DEVICES))}"
        raise ConfigError(setting("cluster", text, problem, f"use one of {', '.join(DEVICES)}"))
    return found


def _read(path: Path) -> Cluster:
    """``device`` (a name, or a table that changes some of one's numbers: ``like`` and fields), ``nodes``, ``per_node``,
    ``nic_gbit``."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(setting("cluster", str(path), "there is no such file", _LEGAL)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {path}: not valid TOML: {error}") from None
    known = {"device", "nodes", "per_node", "nic_gbit", "name"}
    for key in table.keys() - known:
        problem = f"unknown key{nearest(key, tuple(known))}"
        raise ConfigError(setting(f"{path}: {key}", table[key], problem, f"use {', '.join(sorted(known))}"))
    device = _described(table.get("device", "h100"), path)
    numbers = {key: table[key] for key in ("nodes", "per_node", "nic_gbit") if key in table}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(setting(f"{path}: {key}", value, "must be a number above 0", f"use {key} = 8"))
    nic = numbers["nic_gbit"] / 8 if "nic_gbit" in numbers else None
    nodes, per_node = int(numbers.get("nodes", 1)), int(numbers.get("per_node", device.per_node))
    return _cluster(str(table.get("name", path.stem)), device, nodes, per_node, nic)


def _described(given: str | Mapping[str, Any], path: Path) -> Device:
    if isinstance(given, str):
        return _device(given, str(path))
    base = _device(str(given.get("like", "h100")), str(path))
    numbers = {field.name for field in fields(Device)} - {"name", "source"}
    for key in given.keys() - numbers - {"like", "name"}:
        problem = f"unknown key{nearest(key, tuple(numbers))}"
        raise ConfigError(setting(f"{path}: device.{key}", given[key], problem, f"use {', '.join(sorted(numbers))}"))
    changes = {key: given[key] for key in given.keys() & numbers}
    return replace(base, name=str(given.get("name", base.name)), source=f"{path.name}, like {base.name}", **changes)
