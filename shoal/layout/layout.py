"""Layout: one frozen value that says how the work is spread over ranks.

Validated as early as the facts are known, and always before a process group exists: alone when it is made,
against a world by ``fill``, against model and batch by ``check``. ``check_built`` then refuses the kinds that
Shoal knows but cannot run yet. Beside this file, ``text`` reads and prints the one-line form,
``kinds`` holds the kinds with their sizes, and ``rules`` what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from shoal.errors import LayoutError
from shoal.layout import kinds, rules
from shoal.layout import text as layout_text
from shoal.layout.kinds import Grid, Times
from shoal.layout.text import Offload

__all__ = ["BUILT", "Layout", "ModelShape", "Offload"]

# What runs today beyond `dp` and `mb`: the kinds of each key, as in "zero": ("1",) or "tp": ("1d", "1d-sp").
# A kind is listed when all its options work; `check_built` refuses the rest. Keys without kinds ("ep", "etp",
# "auto") list "".
BUILT: dict[str, tuple[str, ...]] = {
    "zero": ("1", "2", "3"),
    "sync": ("server",),
    "tp": ("1d", "1d-sp", "2d", "2.5d", "3d", "AxBxC"),
    "pp": (
        "gpipe",
        "1f1b",
        "1f1b-overlap",
        "interleaved",
        "breadth-first",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "dualpipe-v",
        "list",
        "pipedream",
        "pipedream-vertical",
        "2bw",
    ),
    "cp": ("ring", "ulysses", "gather", "UxR"),
    "ep": ("",),
    "etp": ("",),
    "recompute": ("selective", "full"),
    "offload": (
        "optimizer:cpu",
        "optimizer:nvme",
        "params:cpu",
        "params:nvme",
        "grads:cpu",
        "activations:cpu",
        "activations:nvme",
    ),
    "dtype": ("float32", "float64", "bf16", "fp16"),
    "auto": ("",),
}

_OFFERED = ("dp", "mb", *BUILT)
# For messages: what a key's kinds are called, and how the grammar writes the part before the kind.
_FEATURES = {
    "tp": ("tensor parallelism", "=N:"),
    "pp": ("pipeline schedule", "=N:"),
    "cp": ("context parallelism", "=N:"),
    "ep": ("expert parallelism", "=N"),
    "etp": ("expert tensor parallelism", "=N"),
    "zero": ("ZeRO stage", "="),
    "sync": ("synchronisation", "="),
    "recompute": ("recomputation", "="),
    "offload": ("offload", "="),
    "dtype": ("precision", "="),
    "auto": ("the planner's choice of layout", ""),
}


class ModelShape(Protocol):
    """The sizes of a model that decide whether a layout fits it."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def experts(self) -> int:
        """Experts of a layer; 0 for a dense model."""

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's weight."""


@dataclass(frozen=True)
class Layout:
    """How the work is spread. Sizes count ranks unless said otherwise; what is left open is derived.

    Making one raises ``LayoutError`` for anything wrong that needs neither model, batch nor world to see.
    """

    dp: int = 1
    """Data-parallel replicas; -1 takes the ranks that are left, once ``fill`` knows the world."""
    tp: int = 1
    tp_kind: str = "1d"
    tp_grid: Grid = ()
    """1d → (P,), 2d → (q, q), 2.5d → (q, q, d), 3d → (q, q, q), AxBxC → (a, b, c)."""
    tp_form: str = "gather"
    """How 2d and 2.5d run SUMMA: gather whole operands once, or loop over blocks."""
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    """Pipeline stages a rank holds (V); 0 becomes the schedule's own number."""
    stage_layers: Grid | None = None
    """Layers of each global stage in order, pp·V entries; None balances them."""
    list_times: Times | None = None
    """What ``list`` makes its order for: (F, I, W, C), the time of a micro-batch's forward, input-gradient and
    weight-gradient pass on a whole rank and of moving on to the next, in any unit; None takes the first three for the
    same and the last for nothing."""
    list_memory: float | None = None
    """The most micro-batches whose activations ``list`` has a rank hold at one moment, those of one of V stages counted
    as 1/V; None allows the ``pp`` of 1F1B."""
    cp: int = 1
    cp_kind: str = "ring"
    cp_grid: Grid = ()
    """(U, R): in attention U ranks split heads, R the sequence. ring, gather → (1, N), ulysses → (N, 1)."""
    ep: int = 1
    """Ranks the experts are spread over, folded into dp·cp·tp together with ``etp``."""
    etp: int = 1
    """Tensor-parallel ranks inside one expert, whatever ``tp`` is."""
    zero: int = 0
    """What is sharded: 1 optimizer states, 2 gradients too, 3 parameters too."""
    zero_group: int | None = None
    """Shard inside groups of this many of the dp·cp ranks and replicate across them; None shards over all."""
    int8_gather: bool = False
    """Whether ZeRO gathers parameters rounded to blocks of int8, a quarter of the bytes (qwZ of ZeRO++)."""
    int8_reduce: bool = False
    """Whether the terms of ZeRO's sums of gradients are rounded to blocks of int8 (qgZ of ZeRO++)."""
    keep_params: bool = False
    """Whether stage 3 keeps parameters whole from their first use in a step to their last, and gradients until they
    have added up, however many micro-batches that takes. In a pipeline it does so in any case."""
    sync: str = "allreduce"
    servers: int | None = None
    """Parameter servers; under ``sync="server"`` None becomes 1."""
    stale: int = 0
    """Steps by which a server's answer may be out of date, and replicas ahead of one another; 0 is synchronous."""
    reduce: str = "mean"
    """What servers make of the replicas' gradients: the mean over all tokens, as an all-reduce does, or of the means
    over each replica's own the sum, or element by element the largest value."""
    mb: int = 1
    """Micro-batches of one step."""
    recompute: str = "none"
    recompute_stages: Grid | None = None
    """The global stages that recompute, ascending; None means all of them."""
    offload: tuple[Offload, ...] = ()
    dtype: str = "float32"
    """What the model computes in. Under bf16 and fp16 the optimizer works on float32 copies of the weights."""
    half_grads: bool = False
    """Whether gradients add up in ``dtype``, bf16 or fp16, and not in float32."""
    auto: bool = False
    """Whether the planner is to choose."""

    def __post_init__(self) -> None:
        rules.check_fields(self)
        rules.check_shapes(self)
        derived = {
            "tp_grid": kinds.tensor_grid(self.tp, self.tp_kind, self.tp_grid),
            "cp_grid": kinds.context_grid(self.cp, self.cp_kind, self.cp_grid),
            "chunks": self.chunks or kinds.SCHEDULES[self.schedule].chunks,
            "servers": (self.servers or 1) if self.sync == "server" else None,
            "offload": tuple(sorted(self.offload, key=lambda part: kinds.OFFLOAD_WHATS.index(part.what))),
        }
        for field, value in derived.items():
            object.__setattr__(self, field, value)
        rules.check_together(self)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout of a line such as ``dp=2,tp=4:2d,zero=3``. Raises ``LayoutError``."""
        return cls._of(layout_text.read_line(text, _OFFERED))

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Layout:
        """The layout of a run file's ``[layout]``: the keys of the line, their values whole numbers or text.

        ``auto`` is a truth value. Raises ``LayoutError``."""
        return cls._of(layout_text.read_table(table, _OFFERED))

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> Layout:
        """The layout with these ``fields``. One that is refused is told, too, what would not run if it were right."""
        try:
            return cls(**fields)
        except LayoutError as error:
            for key in fields:
                if key in _FEATURES and key not in BUILT:
                    error.add_note(f"and {_FEATURES[key][0]} is not built yet")
            raise

    def __str__(self) -> str:
        """The canonical line, defaults left out; ``Layout.parse`` reads it back to an equal value."""
        return layout_text.line(self)

    def table(self) -> dict[str, str | bool]:
        """The keys of a run file's ``[layout]``, defaults left out; ``from_table`` reads them back."""
        return layout_text.table(self)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Mesh axes and their sizes, outermost first: ranks count with the axes of tp fastest, then cp, then dp, then
        pp.

        Raises ``LayoutError`` while ``dp`` is -1."""
        if self.dp == -1:
            raise rules.refusal(self, "dp", "the number of replicas is not known yet", "fill in the world or use dp=1")
        return ("pp", self.pp), ("dp", self.dp), ("cp", self.cp), *self.tensor_axes

    @property
    def tensor_axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh axes of tensor parallelism and their sizes, outermost first: several where its grid has several
        sides."""
        return kinds.tensor_axes(self.tp_kind, self.tp_grid)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of :attr:`tensor_axes`."""
        return tuple(name for name, _ in self.tensor_axes)

    @property
    def alike(self) -> int:
        """How many ranks hold the same part of each matrix, with samples of their own: dp·cp, and the depth of 2.5d.
        They are what ZeRO divides over."""
        return self.dp * self.cp * dict(self.tensor_axes).get("depth", 1)

    @property
    def ranks(self) -> int:
        """dp·cp·tp·pp. Raises ``LayoutError`` while ``dp`` is -1."""
        return prod(size for _, size in self.axes)

    @property
    def asynchronous(self) -> bool:
        """Whether the passes of steps overlap, so that gradients meet weights newer than those they were made with."""
        return kinds.SCHEDULES[self.schedule].asynchronous

    @property
    def delayed(self) -> bool:
        """Whether gradients meet weights newer than those they were made with, for whichever reason: what is computed
        then is a recurrence of its own, and a step's result is known when later ones have begun."""
        return self.asynchronous or self.stale > 0

    @property
    def stages(self) -> int:
        """Global pipeline stages, pp·V."""
        return self.pp * self.chunks

    def fill(self, world: int) -> Layout:
        """This layout on ``world`` ranks, ``dp=-1`` resolved.

        Raises ``LayoutError`` naming legal sizes where the ranks do not multiply to the world."""
        rest = self.cp * self.tp * self.pp
        if self.dp == -1 and world >= rest and world % rest == 0:
            return replace(self, dp=world // rest)
        if self.dp == -1:
            below = world // rest * rest
            worlds = " or ".join(str(size) for size in (below, below + rest) if size)
            raise rules.refusal(
                self, "dp", f"{world} ranks are not a multiple of cp·tp·pp = {rest}", f"use {worlds} ranks"
            )
        if self.ranks != world:
            problem = f"dp·cp·tp·pp = {self.ranks} ranks, but the world has {world}"
            fitting = f"dp={world // rest} or " if world >= rest and world % rest == 0 else ""
            raise rules.refusal(self, "dp", problem, f"use {fitting}{self.ranks} ranks")
        return self

    def check(self, model: ModelShape, batch: int, world: int) -> None:
        """Refuse what does not fit: ``model``, ``batch`` samples a step over all replicas, ``world`` ranks.

        Raises ``LayoutError`` naming the setting, its value and a legal one."""
        rules.check_fit(self.fill(world), model, batch)

    def check_built(self) -> None:
        """Refuse, by name, the first kind that this version of Shoal cannot run. Raises ``LayoutError``."""
        for key, kind in self._kinds_in_use():
            if kind not in BUILT.get(key, ()):
                problem = " ".join(filter(None, (_FEATURES[key][0], kind, "is not built yet")))
                built = [f"{known}{_FEATURES[known][1]}{'|'.join(those)}" for known, those in BUILT.items()]
                legal = "built: " + ", ".join(["dp", "mb", *built])
                raise rules.refusal(self, key, problem, legal)

    def _kinds_in_use(self) -> Iterator[tuple[str, str]]:
        """(key, kind) of everything here beyond data parallelism by all-reduce and accumulation."""
        if self.auto:
            yield "auto", ""
        if self.tp > 1 or self.tp_kind != "1d":
            yield "tp", self.tp_kind
        if self.stages > 1 or self.schedule != "1f1b":
            yield "pp", self.schedule
        if self.cp > 1 or self.cp_kind != "ring":
            yield "cp", self.cp_kind
        if self.ep > 1:
            yield "ep", ""
        if self.etp > 1:
            yield "etp", ""
        if self.zero:
            yield "zero", str(self.zero)
        if self.sync != "allreduce":
            yield "sync", self.sync
        if self.recompute != "none":
            yield "recompute", self.recompute
        yield from (("offload", f"{part.what}:{part.where}") for part in self.offload)
        yield "dtype", self.dtype
