from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import held

from shoal.checkpoint import read_manifest, save
from shoal.comm.world import World
from shoal.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path, 3, held("flat", 0, 1, 3), {"loss": 0.1, "text": "ünï", "n": [1, None]}, World())


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    """Change the manifest, and by default give it the checksum that fits, as a hostile author would."""
    found = json.loads((checkpoint / "manifest.json").read_text())
    change(found)
    if sign:
        found.pop("checksum", None)
        found["checksum"] = f"crc32:{zlib.crc32(json.dumps(found, sort_keys=True).encode()):08x}"
    (checkpoint / "manifest.json").write_text(json.dumps(found))


def test_a_manifest_says_what_was_saved(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert (manifest.version, manifest.step) == (1, 3)
    assert manifest.meta == {"loss": 0.1, "text": "ünï", "n": [1, None]}
    assert manifest.files.keys() == {"rank-00000.safetensors"}
    table = manifest.tensors["weight"]["table"]
    assert (table.shape, table.dtype, table.boxes[0].box) == ((5,), "I32", ((0, 5),))


def test_white_space_and_order_of_keys_do_not_matter(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    before = read_manifest(checkpoint)
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4, sort_keys=True))
    assert read_manifest(checkpoint) == before


def first_box(manifest: dict[str, Any]) -> dict[str, Any]:
    box: dict[str, Any] = manifest["tensors"]["weight"]["embed"]["boxes"][0]
    return box


def rename_file(manifest: dict[str, Any], name: str) -> None:
    manifest["files"][name] = manifest["files"].pop("rank-00000.safetensors")
    for kind in manifest["tensors"].values():
        for tensor in kind.values():
            for box in tensor["boxes"]:
                box["file"] = name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "checkpoint version = 2: .*this one reads 1"),
        (lambda m: m.update(format="other"), "not that of a Shoal checkpoint"),
        (lambda m: m.update(step=-1), "step: .*greater than or equal to 0"),
        (lambda m: m.update(extra=1), "extra: "),
        (lambda m: m.pop("files"), "files: "),
        (lambda m: m["meta"].update(loss=float("nan")), "not JSON compliant"),
        (lambda m: rename_file(m, "../outside.safetensors"), "String should match pattern"),
        (lambda m: rename_file(m, "/etc/passwd"), "String should match pattern"),
        (lambda m: rename_file(m, ".."), "String should match pattern"),
        (lambda m: rename_file(m, "a\n"), "String should match pattern"),
        (lambda m: first_box(m).update(file="rank-00009.safetensors"), "which is not among the files"),
        (lambda m: first_box(m).update(box=[[0, 1], [0, 7]]), r"box \[0:1,0:7\] is not inside shape \(11, 6\)"),
        (lambda m: first_box(m).update(box=[[0, 1]]), r"box \[0:1\] is not inside"),
        (lambda m: first_box(m).update(box=[[-1, 1], [0, 6]]), "is not inside"),
        (lambda m: m["tensors"]["weight"]["embed"]["boxes"].pop(4), r"no file holds \[4:5,0:6\]"),
        (lambda m: m["tensors"]["weight"]["scale"]["boxes"].pop(), r"no file holds \[\] of shape \(\)"),
        (lambda m: m["files"]["rank-00000.safetensors"].update(size=7), r"bytes and should have 7"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(checkpoint)


def test_a_valid_value_that_was_not_saved_is_found(checkpoint: Path) -> None:
    edit(checkpoint, lambda manifest: manifest.update(step=2), sign=False)
    with pytest.raises(CheckpointError, match=r"the checksum of manifest\.json is crc32:"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"])
def test_what_is_not_a_manifest_at_all_is_refused(checkpoint: Path, text: bytes) -> None:
    (checkpoint / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"damaged: manifest.json is not"):
        read_manifest(checkpoint)


def test_files_that_are_missing_cut_or_links_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{file.name} has {len(data) - 1} bytes and should have {len(data)}"):
        read_manifest(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} cannot be read: No such file"):
        read_manifest(checkpoint)
    (tmp_path / "elsewhere").write_bytes(data)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{file.name} is not a plain file"):
        read_manifest(checkpoint)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read: No such file"):
        read_manifest(checkpoint)
