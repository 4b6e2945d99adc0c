"""Read Megatron-LM's indexed dataset: ``NAME.bin`` (the tokens) and ``NAME.idx`` (where each sequence lies).

The index, little endian: magic ``MMIDIDX\\0\\0``, uint64 version 1, uint8 dtype code, uint64 sequences,
uint64 document bounds; then int32 lengths [sequences] in tokens, int64 pointers [sequences] in bytes, int64
documents [bounds] as numbers of sequences, the last one the number of sequences.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Indexed:
    """The tokens (1-D, memory-mapped), the documents' start offsets (int64, D+1) and a hex fingerprint."""

    tokens: NDArray[np.integer[Any]]
    documents: NDArray[np.int64]
    fingerprint: str


def index_path(path: Path) -> Path:
    """``NAME.idx`` for ``NAME``, ``NAME.bin`` or ``NAME.idx``."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return stem.with_name(stem.name + ".idx")


def read(path: Path) -> Indexed:
    """Open the pair named by ``path`` (with or without a suffix).

    Raises DataError when a file is missing, empty, of another size than the index says, not such an index,
    or of a floating dtype, and when sequences do not follow one another in the file.
    """
    idx = index_path(path)
    bin_ = idx.with_suffix(".bin")
    if not bin_.is_file():
        raise DataError(f"{bin_}: missing; a Megatron data set is a .bin beside its .idx")
    dtype, n_sequences, n_bounds = _header(idx)

    at = _HEADER.size
    _check_size(idx, at + 12 * n_sequences + 8 * n_bounds)
    lengths = np.memmap(idx, "<i4", "r", at, (n_sequences,)).astype(np.int64)
    pointers = np.memmap(idx, "<i8", "r", at + 4 * n_sequences, (n_sequences,))
    bounds = np.memmap(idx, "<i8", "r", at + 12 * n_sequences, (n_bounds,))

    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{idx}: sequences do not follow one another in {bin_.name}; write the data set again")
    if bounds[0] != 0 or bounds[-1] != n_sequences or (np.diff(bounds) < 0).any():
        raise DataError(f"{idx}: document bounds do not run from 0 to the {n_sequences} sequences; the file is damaged")
    _check_size(bin_, int(starts[-1]) * dtype.itemsize)
    if starts[-1] == 0:
        raise DataError(f"{bin_}: no tokens; tokenise a text that has some")
    return Indexed(np.memmap(bin_, dtype, "r"), starts[bounds], _fingerprint(idx, bin_))


def _header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    """The dtype, the number of sequences and the number of document bounds."""
    with idx.open("rb") as file:
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise DataError(f"{idx}: not a Megatron index (it does not begin with MMIDIDX)")
    _, version, code, n_sequences, n_bounds = _HEADER.unpack(raw)
    if version != 1:
        raise DataError(f"{idx}: version {version} of Megatron's index; version 1 is read")
    dtype = np.dtype(_DTYPES[code]) if code in _DTYPES else None
    if dtype is None or dtype.kind == "f":
        raise DataError(f"{idx}: dtype code {code} is not one of tokens; 1, 2, 3, 4, 5 and 8 are")
    if n_sequences < 1 or n_bounds < 1:
        raise DataError(f"{idx}: no sequences; tokenise a text that has some")
    return dtype, n_sequences, n_bounds


def _check_size(path: Path, expected: int) -> None:
    actual = path.stat().st_size
    if actual != expected:
        raise DataError(f"{path}: {actual} bytes, expected {expected}; the file is truncated or of another data set")


def _fingerprint(idx: Path, bin_: Path) -> str:
    """The format holds no checksum: hash the whole index and both ends of the tokens."""
    digest = sha256(idx.read_bytes())
    with bin_.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, bin_.stat().st_size - _SAMPLE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]
