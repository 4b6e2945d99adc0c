"""The role table: which module of a model plays which part.

A model is plain PyTorch; beside it stands a table from module names to roles. Every interpreter (of tensor, context or
expert parallelism) reads the same table, so a new kind of parallelism changes no model. A ``*`` in a name stands for
one component, usually the number of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal[
    "embed", "position", "norm", "head_norm", "heads_norm", "qkv", "out_proj", "gate_up", "down", "head", "router",
    "tokens", "experts", "expert", "expert_down", "attention", "loss", "replicated", "latent", "latent_norm",
    "latent_entry", "expand",
]  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What one module is to the layouts.

    Norms of heads are of each (``head_norm``) or of all together (``heads_norm``), of which there are ``kv_heads``
    here. A ``latent`` comes from the stream, has a ``latent_norm``, and after its ``latent_entry`` goes to heads by
    linears that ``expand`` it.

    ``parts`` names the logical weights that a fused matrix stacks along dim 0, with their rows. ``heads`` and
    ``kv_heads`` say how those rows group into attention heads: the granule that may not be cut is one key/value head
    with its share of query heads. ``std`` is the standard deviation of its matrices at initialisation; 0
    starts all of the module at zero, vectors too, which else start at one. Checkpoints know the parts of a ``fused``
    matrix only together, by its own name. A ``transposed`` weight is [in, out] (GPT-2's Conv1D), its parts columns.

    With ``experts`` a matrix stacks the parts of that many, one expert after another; a token goes through ``chosen``
    of them.
    """

    kind: Kind
    parts: tuple[tuple[str, int], ...] = ()
    heads: int = 0
    kv_heads: int = 0
    std: float = 0.02
    experts: int = 0
    chosen: int = 0
    fused: bool = False
    transposed: bool = False


REPLICATED = Role("replicated")
"""The role of a module that the table does not name: every rank of a stage holds it whole."""

RoleTable = Mapping[str, Role]


def role_of(table: RoleTable, module: str) -> Role:
    """The role of the module called ``module`` (dotted, as in ``named_modules``)."""
    if (exact := table.get(module)) is not None:
        return exact
    depth = module.count(".")
    for pattern, role in table.items():
        if pattern.count(".") == depth and fnmatchcase(module, pattern):
            return role
    return REPLICATED


def logical_parts(role: Role, module: str, parameter: str) -> tuple[tuple[str, int], ...]:
    """The logical names and rows stacked in a parameter: ``a.qkv`` ``weight`` → ``a.q.weight``, ``a.k.weight``, …;
    of experts ``a.gate_up`` ``weight`` → ``a.0.gate.weight``, ``a.0.up.weight``, ``a.1.gate.weight``, …"""
    parent, _, own = module.rpartition(".")
    if role.experts:
        return tuple(
            (f"{parent}.{expert}.{part}.{parameter}", rows)
            for expert in range(role.experts)
            for part, rows in role.parts
        )
    if role.fused:
        return tuple((".".join(filter(None, (parent, own, parameter))), rows) for _, rows in role.parts)
    return tuple((".".join(filter(None, (parent, part, parameter))), rows) for part, rows in role.parts)
