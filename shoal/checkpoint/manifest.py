"""The manifest: what a checkpoint holds and where, as validated JSON.

It knows no layout. For every logical tensor it gives the full shape and the boxes that make it up, each with the file
and the key that hold it. Nothing in it is trusted: names cannot leave the folder, the boxes must lie inside the
tensor and cover it, the files must be there with their sizes, and a checksum guards the manifest itself.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError, model_validator

from shoal.checkpoint.boxes import cover, text
from shoal.errors import CheckpointError, setting
from shoal.placement import Box

MANIFEST = "manifest.json"
VERSION: Literal[1] = 1

JSON = JsonValue
Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(_Stored):
    """A file of the checkpoint: its size in bytes and the checksum of its contents."""

    size: Count
    checksum: Annotated[str, StringConstraints(pattern="^crc32:[0-9a-f]{8}$")]


class StoredBox(_Stored):
    """A box of a logical tensor, and the file and the key in it that hold its contents."""

    box: Box
    file: FileName
    key: str


class StoredTensor(_Stored):
    """A logical tensor: full shape, safetensors dtype code (``"F32"``), and the boxes that cover it."""

    shape: tuple[Count, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]

    @model_validator(mode="after")
    def _covered(self) -> StoredTensor:
        for stored in self.boxes:
            inside = len(stored.box) == len(self.shape) and all(
                0 <= start <= stop <= n for (start, stop), n in zip(stored.box, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(f"box {text(stored.box)} is not inside shape {self.shape}")
        whole = tuple((0, n) for n in self.shape)
        _, missing = cover(whole, ((stored.box, stored) for stored in self.boxes))
        if missing:
            raise ValueError(f"no file holds {text(missing[0])} of shape {self.shape}")
        return self


class Manifest(_Stored):
    """What a checkpoint holds. ``tensors`` goes by kind ("weight", "exp_avg", …), then by logical name."""

    format: Literal["shoal-checkpoint"] = "shoal-checkpoint"
    version: Literal[1] = VERSION
    step: Count
    meta: dict[str, JSON]
    files: dict[FileName, StoredFile]
    tensors: dict[str, dict[str, StoredTensor]]

    @model_validator(mode="after")
    def _listed(self) -> Manifest:
        for kind, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                for stored in tensor.boxes:
                    if stored.file not in self.files:
                        raise ValueError(f"{kind} {name} lies in {stored.file}, which is not among the files")
        return self

    def checksum(self) -> str:
        """The checksum of the contents, whatever the white space and order of keys they were read from."""
        plain = json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False)
        return f"crc32:{zlib.crc32(plain.encode()):08x}"

    def dumps(self) -> str:
        """The text of ``manifest.json``."""
        return json.dumps({**self.model_dump(mode="json"), "checksum": self.checksum()}, allow_nan=False) + "\n"


def read_manifest(path: Path) -> Manifest:
    """The validated manifest of the checkpoint folder ``path``, whose files are all there with the right sizes.

    File contents are not read. Raises :class:`CheckpointError` for an unknown version and for anything damaged.
    """
    try:
        found: Any = json.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        raise _damaged(path, f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != "shoal-checkpoint":
        raise _damaged(path, f"{MANIFEST} is not that of a Shoal checkpoint")
    if (version := found.get("version")) != VERSION:
        raise CheckpointError(
            setting(
                "checkpoint version", version, f"{path} is of another version of Shoal", f"this one reads {VERSION}"
            )
        )
    claimed = found.pop("checksum", None)
    try:
        manifest = Manifest.model_validate(found)
        actual = manifest.checksum()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{MANIFEST}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST}: {error}") from error
    if actual != claimed:
        raise _damaged(path, f"the checksum of {MANIFEST} is {actual} and should be {claimed}")
    for name, stored in manifest.files.items():
        _check_file(path / name, stored)
    return manifest


def _check_file(path: Path, stored: StoredFile) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise _damaged(path.parent, f"{path.name} cannot be read: {error.strerror}") from error
    if not S_ISREG(found.st_mode):  # A link could lead out of the folder.
        raise _damaged(path.parent, f"{path.name} is not a plain file")
    if found.st_size != stored.size:
        raise _damaged(path.parent, f"{path.name} has {found.st_size} bytes and should have {stored.size}")


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(setting("checkpoint", path, f"damaged: {problem}", "load another checkpoint"))
