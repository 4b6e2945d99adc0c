"""Names of tensors, both ways: which tensor of a Hugging Face folder holds which of Shoal's, and how.

Shoal's names are logical: each of q, k and v has its own, whatever is fused. Matrices are [out, in]; a family that
keeps some as [in, out] has them transposed, and one that keeps rotary features as pairs has their rows in another
order, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from shoal.config import Model
from shoal.model.decoder import Decoder
from shoal.model.hf.families import HEAD, Family
from shoal.model.hf.pairs import Pairs, pairs_of
from shoal.model.roles import logical_parts, role_of
from shoal.placement import Box, Span


@dataclass(frozen=True)
class Stored:
    """One tensor of a Hugging Face folder, of ``shape``: it stacks the logical tensors ``parts`` (name, rows) along
    their dim 0, and is then ``transposed`` or not. Rows of those in ``pairs`` are in the order that these say. Where it
    is ``exact``, its dtype is not to be changed."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False
    pairs: Mapping[str, Pairs] = field(default_factory=dict)
    exact: bool = False

    def order(self, name: str, span: Span) -> Tensor | None:
        """Which of its rows are the rows ``span`` of its part ``name``: int64, counted from the part's first; None
        where they are the same."""
        return self.pairs[name].stored(*span) if name in self.pairs else None

    def region(self, name: str, box: Box) -> tuple[slice, ...]:
        """Where the ``box`` of its part ``name`` lies in it, its rows in their order there."""
        first = 0
        for part, rows in self.parts:
            if part == name:
                break
            first += rows
        (start, stop), *rest = box
        spans = [slice(first + start, first + stop), *(slice(*span) for span in rest)]
        return tuple(reversed(spans) if self.transposed else spans)


def logical_shapes(shape: Model) -> dict[str, tuple[int, ...]]:
    """The logical tensors of a decoder and their shapes, in the order of its modules, and then its buffers; one that is
    tied occurs once."""
    with torch.device("meta"):
        decoder = Decoder(shape)
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in decoder.named_parameters():
        module, _, local = name.rpartition(".")
        parts = logical_parts(role_of(decoder.roles, module), module, local) or ((name, parameter.shape[0]),)
        found |= {part: (rows, *parameter.shape[1:]) for part, rows in parts}
    return found | {name: tuple(buffer.shape) for name, buffer in decoder.named_buffers()}


def stored_tensors(family: Family, shapes: Mapping[str, tuple[int, ...]], model: Model) -> list[Stored]:
    """The tensors of a Hugging Face folder that hold the logical tensors ``shapes`` of a ``model``."""
    parts: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: _order(family, name)):
        parts.setdefault(_theirs(family, name), []).append(name)
    return [_stored(family, name, {part: shapes[part] for part in parts[name]}, model) for name in parts]


def _stored(family: Family, name: str, shapes: Mapping[str, tuple[int, ...]], model: Model) -> Stored:
    rows = {part: shape[0] for part, shape in shapes.items()}
    full = (sum(rows.values()), *next(iter(shapes.values()))[1:])
    transposed = len(full) > 1 and name.split(".")[-2] in family.transposed
    found = {part: pairs_of(part.rpartition(".")[0], model) for part in rows} if family.pairs else {}
    pairs = {part: one for part, one in found.items() if one is not None}
    exact = all(_pattern(part)[0] in family.names for part in rows)  # of its own accord, as buffers are
    return Stored(name, full[::-1] if transposed else full, tuple(rows.items()), transposed, pairs, exact)


def with_prefix(family: Family, name: str) -> str:
    """The full name of a tensor: files of a model without its head leave out the prefix."""
    return name if name.startswith((family.prefix, f"{HEAD}.")) else family.prefix + name


def is_ignored(family: Family, name: str, layers: int) -> bool:
    """Whether a model of so many ``layers`` does not need the tensor."""
    _, numbers = _pattern(name)
    if family.further and numbers and int(numbers[0]) >= layers:
        return True
    return any(fnmatchcase(name, pattern) for pattern in family.ignored)


def _theirs(family: Family, name: str) -> str:
    module, _, local = name.rpartition(".")
    whole, numbers = _pattern(name)
    if whole in family.names:
        return _numbered(family.names[whole], numbers)
    pattern, numbers = _pattern(module)
    assert pattern in family.names, f"{family.name} has no name for {name}"
    return f"{_numbered(family.names[pattern], numbers)}.{local}"


def _order(family: Family, name: str) -> tuple[list[int], int]:
    """By block, and within it as the family's names are."""
    pattern, numbers = _pattern(name)
    pattern = pattern if pattern in family.names else pattern.rpartition(".")[0]
    return [int(number) for number in numbers] or [-1], [*family.names].index(pattern)


def _pattern(module: str) -> tuple[str, list[str]]:
    """``blocks.3.attn.q`` → ``blocks.*.attn.q`` and ``3``."""
    words = module.split(".")
    return ".".join("*" if word.isdigit() else word for word in words), [word for word in words if word.isdigit()]


def _numbered(pattern: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
