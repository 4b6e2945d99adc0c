"""Whole tensors of a checkpoint, one at a time, whatever boxes they were saved in."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from shoal.checkpoint.boxes import within
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.shards import CODES

_DTYPES = {code: dtype for dtype, code in CODES.items()}


class WholeTensors:
    """The weights of the checkpoint at ``path``, as ``manifest`` says; it is entered to read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self._tensors = path, manifest.tensors.get("weight", {})
        self.shapes = {name: stored.shape for name, stored in self._tensors.items()}
        self.dtypes = {name: _DTYPES[stored.dtype] for name, stored in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The logical tensor ``name``, in its dtype, on the CPU."""
        stored = self._tensors[name]
        origin = tuple((0, n) for n in stored.shape)
        full = torch.empty(stored.shape, dtype=self.dtypes[name])
        for one in stored.boxes:
            if one.file not in self._open:
                self._open[one.file] = self._files.enter_context(safe_open(self.path / one.file, framework="pt"))
            full[within(one.box, origin)] = self._open[one.file].get_tensor(one.key)
        return full

    def __enter__(self) -> Self:
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()
