"""Names of tensors, both ways: which tensor of a Hugging Face folder holds which of Shoal's, and how.

Shoal's names are logical: each of q, k and v has its own, whatever is fused. Matrices are [out, in]; a family that
keeps some as [in, out] has them transposed, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shoal.config import Model
from shoal.model.decoder import Decoder
from shoal.model.hf.families import HEAD, Family
from shoal.model.roles import logical_parts, role_of
from shoal.placement import Box


@dataclass(frozen=True)
class Stored:
    """One tensor of a Hugging Face folder, of ``shape``: it stacks the logical tensors ``parts`` (name, rows) along
    their dim 0, and is then ``transposed`` or not."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False

    def region(self, name: str, box: Box) -> tuple[slice, ...]:
        """Where the ``box`` of its part ``name`` lies in it."""
        first = 0
        for part, rows in self.parts:
            if part == name:
                break
            first += rows
        (start, stop), *rest = box
        spans = [slice(first + start, first + stop), *(slice(*span) for span in rest)]
        return tuple(reversed(spans) if self.transposed else spans)


def logical_shapes(shape: Model) -> dict[str, tuple[int, ...]]:
    """The logical tensors of a decoder and their shapes, in the order of its modules; one that is tied occurs once."""
    with torch.device("meta"):
        decoder = Decoder(shape)
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in decoder.named_parameters():
        module, _, local = name.rpartition(".")
        parts = logical_parts(role_of(decoder.roles, module), module, local) or ((name, parameter.shape[0]),)
        found |= {part: (rows, *parameter.shape[1:]) for part, rows in parts}
    return found


def stored_tensors(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> list[Stored]:
    """The tensors of a Hugging Face folder that hold the logical tensors ``shapes``."""
    parts: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: _order(family, name)):
        parts.setdefault(_theirs(family, name), []).append(name)
    return [_stored(family, name, {part: shapes[part] for part in parts[name]}) for name in parts]


def _stored(family: Family, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Stored:
    rows = {part: shape[0] for part, shape in shapes.items()}
    full = (sum(rows.values()), *next(iter(shapes.values()))[1:])
    transposed = len(full) > 1 and name.split(".")[-2] in family.transposed
    return Stored(name, full[::-1] if transposed else full, tuple(rows.items()), transposed)


def with_prefix(family: Family, name: str) -> str:
    """The full name of a tensor: files of a model without its head leave out the prefix."""
    return name if name.startswith((family.prefix, f"{HEAD}.")) else family.prefix + name


def is_ignored(family: Family, name: str) -> bool:
    """Whether nothing needs the tensor."""
    return any(fnmatchcase(name, pattern) for pattern in family.ignored)


def _theirs(family: Family, name: str) -> str:
    module, _, local = name.rpartition(".")
    pattern, number = _pattern(module)
    assert pattern in family.names, f"{family.name} has no name for {name}"
    return f"{family.names[pattern].replace('*', number)}.{local}"


def _order(family: Family, name: str) -> tuple[int, int]:
    """By block, and within it as the family's names are."""
    pattern, number = _pattern(name.rpartition(".")[0])
    return int(number or -1), [*family.names].index(pattern)


def _pattern(module: str) -> tuple[str, str]:
    """``blocks.3.attn.q`` → ``blocks.*.attn.q`` and ``3``."""
    words = module.split(".")
    numbers = [word for word in words if word.isdigit()]
    return ".".join("*" if word.isdigit() else word for word in words), "".join(numbers)
