"""The weights of a Hugging Face folder, by logical name, any box of them: who does not hold a part does not read it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shoal.config import Model
from shoal.errors import CheckpointError, setting
from shoal.model.hf.config import read_model
from shoal.model.hf.families import HEAD, Family, family_of
from shoal.model.hf.files import CONFIG, read_json, tensors_of
from shoal.model.hf.names import Stored, is_ignored, logical_shapes, stored_tensors, with_prefix
from shoal.model.hf.on_disk import DTYPES, OnDisk
from shoal.placement import Box

_CHUNK = 1 << 20
"""Elements that are compared at a time."""


class Weights:
    """The weights of the model in ``folder``: every tensor that its config.json calls for, and no other.

    ``model``   what config.json says
    ``shapes``  logical name → shape
    ``dtypes``  logical name → dtype

    Raises, when it is made and from headers alone, :class:`ConfigError` where config.json cannot be used, and
    :class:`CheckpointError` naming file and tensor where the weights are damaged or do not fit it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_json(folder / CONFIG)
        self.model: Model = read_model(self.config)
        self.family: Family = family_of(self.config)
        found = tensors_of(folder)
        for many, what in ((self.model.layers, "layers"), (self.model.experts, "experts")):
            if len(found) < many:  # and no module is made of a number that a stranger wrote
                raise self._unfit(folder, f"{len(found)} tensors are not the {many} {what} of {CONFIG}")
        try:
            self.shapes = logical_shapes(self.model)
        except (RuntimeError, TypeError) as error:  # what torch raises for a size that overflows
            raise self._unfit(folder / CONFIG, f"sizes that no tensor can have: {error}") from None
        self._found: dict[str, OnDisk] = {with_prefix(self.family, key): tensor for key, tensor in found.items()}
        stored = stored_tensors(self.family, self.shapes, self.model)
        self._check(stored)
        self._stored = {part: one for one in stored for part, _ in one.parts}
        self.dtypes = {part: DTYPES[self._found[one.name].dtype] for part, one in self._stored.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """The ``box`` of the logical tensor ``name``, in its dtype, on the CPU."""
        stored = self._stored[name]
        order = stored.order(name, box[0]) if box else None
        if order is None or not len(order):
            part = self._found[stored.name].read(stored.region(name, box))
            return part.t() if stored.transposed else part
        first = int(order.min())
        around = ((first, int(order.max()) + 1), *box[1:])
        return self._found[stored.name].read(stored.region(name, around))[order - first]

    def check_tied(self) -> None:
        """Raise :class:`CheckpointError` where a model whose head is tied has one of its own all the same, with other
        values. Reads both."""
        head, table = f"{HEAD}.weight", "embed.table.weight"
        if not self.model.tied or head not in self._found:
            return
        rows, width = self.shapes[table]
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            box = ((start, min(rows, start + step)), (0, width))
            if not torch.equal(self.read(table, box), self._found[head].read(tuple(slice(*span) for span in box))):
                problem = f"{head} differs from the embedding, and tie_word_embeddings is true"
                raise self._unfit(self._found[head].file, problem)

    def _check(self, stored: list[Stored]) -> None:
        """The tensors are those that config.json calls for."""
        for one in stored:
            tensor = self._found.get(one.name)
            if tensor is None:
                raise self._unfit(self.folder, f"{one.name} {list(one.shape)} is missing")
            if tensor.shape != one.shape:
                problem = f"{one.name} has shape {list(tensor.shape)}, and {CONFIG} calls for {list(one.shape)}"
                raise self._unfit(tensor.file, problem)
            if tensor.dtype not in DTYPES:
                raise self._unfit(tensor.file, f"{one.name} is {tensor.dtype}, which is not one of {', '.join(DTYPES)}")
        wanted = {one.name for one in stored} | ({f"{HEAD}.weight"} if self.model.tied else set())
        for name, tensor in self._found.items():
            if name not in wanted and not is_ignored(self.family, name, self.model.layers):
                raise self._unfit(tensor.file, f"{name} {list(tensor.shape)} has no place in the model of {CONFIG}")

    @staticmethod
    def _unfit(path: Path, problem: str) -> CheckpointError:
        return CheckpointError(
            setting("Hugging Face weights", path, problem, f"see that {CONFIG} and files are of one model")
        )
