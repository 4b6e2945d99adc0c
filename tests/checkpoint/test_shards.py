from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint import shards
from shoal.checkpoint.manifest import StoredFile
from shoal.checkpoint.shards import CODES, verify_shard, write_shard
from shoal.errors import CheckpointError


def test_the_library_reads_back_every_dtype_rank_and_stride(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CHUNK", 100)
    matrix = torch.arange(24.0).reshape(4, 6)
    tensors = {str(dtype): (torch.arange(5) % 2).to(dtype) for dtype in CODES}
    tensors |= {"transposed": matrix.T, "columns": matrix[:, 1:3], "scalar": torch.tensor(3.0), "empty": matrix[:0]}
    tensors |= {"every second": torch.arange(10.0)[::2], "expanded": torch.ones(1).expand(3)}
    stored = write_shard(tmp_path / "a", tensors)
    found = load_file(tmp_path / "a")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert torch.equal(found[key].double(), tensor.double()), key
    assert stored.size == (tmp_path / "a").stat().st_size
    verify_shard(tmp_path / "a", stored, {"scalar": ("F32", ()), "columns": ("F32", (4, 2))})


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("precious")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "a", {"x": torch.ones(1)})
    assert (tmp_path / "a").read_text() == "precious"


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dtype of phase = torch.complex64: .*bfloat16"):
        write_shard(tmp_path / "a", {"phase": torch.ones(1, dtype=torch.complex64)})


@pytest.mark.parametrize("bit", [0, 8 * 8 + 3, -1], ids=["length", "header", "contents"])
def test_one_flipped_bit_is_found(tmp_path: Path, bit: int) -> None:
    stored = write_shard(tmp_path / "a", {"x": torch.arange(100.0)})
    data = bytearray((tmp_path / "a").read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/a.*its checksum is crc32:.* should be {stored.checksum}"):
        verify_shard(tmp_path / "a", stored, {})


def test_a_header_that_disagrees_with_the_manifest_is_found(tmp_path: Path) -> None:
    stored = write_shard(tmp_path / "a", {"x": torch.zeros(2, 3)})
    with pytest.raises(CheckpointError, match=r"x is \('F32', \(2, 3\)\) and should be \('F32', \(3, 2\)\)"):
        verify_shard(tmp_path / "a", stored, {"x": ("F32", (3, 2))})
    with pytest.raises(CheckpointError, match="y"):
        verify_shard(tmp_path / "a", stored, {"y": ("F32", (2, 3))})


def test_a_missing_file_keeps_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a") as caught:
        verify_shard(tmp_path / "a", StoredFile(size=0, checksum="crc32:00000000"), {})
    assert caught.value.errno == errno.ENOENT
