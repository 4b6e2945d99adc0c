"""One safetensors file: written in a stream, verified, and described in the terms of the format.

The file is written here rather than by the library because that takes all tensors at once, as copies on the CPU, and
refuses views that share storage, which the pieces of a fused weight do. Here one tensor at a time is on the CPU, and
the checksum is that of the bytes that were meant to be written. Reading is the library's.

The checksum is CRC-32: it finds every burst of up to 32 bits and misses other damage once in 4e9 times; zlib computes
it at 3.5 GB/s on a core where SHA-256 takes 0.75 and BLAKE2b 0.33, and releases the interpreter meanwhile. It guards
against damage, not against forgery: a checkpoint from a stranger is data and runs no code, but nothing vouches for its
values.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.manifest import StoredFile
from shoal.errors import CheckpointError, setting

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATING = frozenset(code for dtype, code in CODES.items() if dtype.is_floating_point)
_CHUNK = 4 << 20


def dtype_code(tensor: Tensor, name: str) -> str:
    """The safetensors code of the tensor's dtype, such as ``"BF16"``."""
    if (code := CODES.get(tensor.dtype)) is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise CheckpointError(setting(f"dtype of {name}", tensor.dtype, "not a dtype of checkpoints", f"use {known}"))
    return code


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> StoredFile:
    """Write ``tensors`` by key to a new file and force it to disk, with ``metadata`` of the file's own.

    With ``fetch``, the tensors may be on the meta device: each is fetched by its key when its turn comes.
    """
    size = checksum = 0
    with path.open("xb") as file:
        for data in _contents(tensors, fetch or tensors.__getitem__, metadata or {}):
            file.write(data)
            size += len(data)
            checksum = zlib.crc32(data, checksum)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(size=size, checksum=_written(checksum))


def verify_shard(path: Path, stored: StoredFile, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check the file's checksum, and that each key of ``tensors`` has the dtype code and shape given there.

    Raises :class:`CheckpointError` naming the file, what was expected and what is there.
    """
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            checksum = zlib.crc32(data, checksum)
    if (actual := _written(checksum)) != stored.checksum:
        raise _damaged(path, f"its checksum is {actual} and should be {stored.checksum}")
    try:
        with safe_open(path, framework="pt") as shard:
            for key, expected in tensors.items():
                view = shard.get_slice(key)
                if (found := (view.get_dtype(), tuple(view.get_shape()))) != expected:
                    raise _damaged(path, f"{key} is {found} and should be {expected}")
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error


def _contents(
    tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file's bytes: the header's length, the header, and each tensor, the widest dtypes first to keep alignment."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        code = dtype_code(tensor, key)
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little")
    yield head
    for key, tensor in ordered:
        contents = fetch(key)
        assert (contents.dtype, contents.shape) == (tensor.dtype, tensor.shape), f"{key} is not what was announced"
        flat = contents.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _written(checksum: int) -> str:
    return f"crc32:{checksum:08x}"


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(setting("checkpoint file", path, f"damaged: {problem}", "load another checkpoint"))
