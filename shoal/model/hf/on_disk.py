"""Tensors in safetensors files: what a header says of them, and reading any part of one.

Contents are read, not mapped into memory: a rank's memory is then what it asked for, and pages of others' shares do not
count as its own. A header is not trusted: it must agree with the size of its file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoal.errors import CheckpointError, setting

_MOST_HEADER = 100_000_000
_BUFFER = 4 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights may have."""

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class OnDisk:
    """A tensor in a safetensors file: its dtype code and shape, and the byte ``at`` which it begins."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return _BYTES[self.dtype] * prod(self.shape)

    def read(self, region: tuple[slice, ...]) -> Tensor:
        """A part of a tensor whose dtype is one of ``DTYPES``. Whole rows are read, a few megabytes of them at a time
        where only some columns are wanted."""
        rows, *rest = region
        part = torch.empty([one.stop - one.start for one in region], dtype=DTYPES[self.dtype])
        width = self.nbytes // max(1, self.shape[0])
        with self.file.open("rb") as file:
            if part.shape[1:] == self.shape[1:]:
                self._fill(file, self.at + rows.start * width, part)
                return part
            step = max(1, _BUFFER // width)
            buffer = torch.empty((min(step, len(part)), *self.shape[1:]), dtype=part.dtype)
            for start in range(0, len(part), step):
                some = buffer[: len(part) - start]
                self._fill(file, self.at + (rows.start + start) * width, some)
                part[start : start + step] = some[(slice(None), *rest)]
        return part

    def _fill(self, file: BinaryIO, at: int, out: Tensor) -> None:
        file.seek(at)
        found = file.readinto(out.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
        if found != out.nbytes:
            raise bad(self.file, f"{found} bytes at {at} and not {out.nbytes}; it has changed or cannot be read")


def read_header(path: Path) -> dict[str, OnDisk]:
    """The tensors of a safetensors file by name: eight bytes of length, as many of JSON, then the contents.

    Raises :class:`CheckpointError` naming the file, and a tensor where it can, when it is truncated or malformed.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise bad(path, f"it is truncated or no safetensors file: {size} bytes, and a header of {length}")
        text = file.read(length)
    try:
        found = json.loads(text)
        found.pop("__metadata__", None)
        spans = {name: (_span(entry), _entry(path, entry, 8 + length)) for name, entry in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise bad(path, "its header is not that of a safetensors file") from None
    for name, ((start, stop), entry) in spans.items():
        if stop - start != entry.nbytes:
            raise bad(
                path, f"{name} has {stop - start} bytes, and {entry.dtype} {list(entry.shape)} needs {entry.nbytes}"
            )
        if not 0 <= start <= stop <= size - 8 - length:
            raise bad(path, f"it is truncated: {name} ends at byte {8 + length + stop} and the file at {size}")
    return {name: entry for name, (_, entry) in spans.items()}


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    return int(start), int(stop)


def _entry(path: Path, entry: dict[str, Any], start: int) -> OnDisk:
    if entry["dtype"] not in _BYTES:
        raise bad(path, f"a tensor of dtype {entry['dtype']}, which is not known")
    return OnDisk(path, entry["dtype"], tuple(int(n) for n in entry["shape"]), start + _span(entry)[0])


def bad(path: Path, problem: str, legal: str = "fetch the model again, or name another folder") -> CheckpointError:
    """What is wrong with a file of a Hugging Face folder."""
    return CheckpointError(setting("Hugging Face folder", path, problem, legal))
