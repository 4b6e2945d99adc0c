"""How far a layout is from one process, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Protocol

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

_SHOWN = 12


class Parity(Protocol):
    """What is shown: see :class:`shoal.train.verify.Report`."""

    @property
    def agree(self) -> bool: ...
    @property
    def layout(self) -> str: ...
    @property
    def truth(self) -> str: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def max_rel(self) -> Mapping[str, float]: ...
    @property
    def allowed(self) -> Mapping[str, float]: ...
    @property
    def rounding(self) -> float | None: ...
    @property
    def drift(self) -> float: ...
    @property
    def worst(self) -> Mapping[str, float]: ...
    @property
    def faults(self) -> Sequence[str]: ...


def parity_table(report: Parity) -> RenderableType:
    """The comparisons, the tensors that are furthest apart, and the verdict."""
    table = Table("compared", "largest relative difference", "allowed", box=None, pad_edge=False)
    names = {"loss": "loss", "grad_norm": "gradient norm", "grad": "gradients", "weight": "weights"}
    for key, rel in report.max_rel.items():
        table.add_row(names[key], _number(rel, report.allowed[key]), _short(report.allowed[key]))
    table.add_row("copies of a tensor", _number(report.drift, report.tolerance), _short(report.tolerance))
    if report.rounding is not None:
        table.add_row("one process in float32 itself", f"{report.rounding:.1e}", "")
    for name, rel in sorted(report.worst.items(), key=lambda item: (isfinite(item[1]), -item[1]))[:3]:
        table.add_row(f"  [dim]{escape(name)}[/]", f"[dim]{rel:.1e}[/]", "")
    if report.agree:
        rounds = ", up to what float32 rounds" if report.rounding is not None else ""
        said = f"{report.layout} computes what {report.truth} computes{rounds}."
        return Group(table, f"[bold green]{escape(said)}[/]")
    lines = [f"  {escape(fault)}" for fault in report.faults[:_SHOWN]]
    if len(report.faults) > _SHOWN:
        lines.append(f"  … and {len(report.faults) - _SHOWN} more")
    return Group(table, f"[bold red]{escape(report.layout)} disagrees with {escape(report.truth)}:[/]", *lines)


def _number(value: float, tolerance: float) -> str:
    return f"[{'green' if value <= tolerance else 'bold red'}]{value:.1e}[/]"


def _short(limit: float) -> str:
    """A limit in one digit where it has one, else in two."""
    short = f"{limit:.0e}"
    return short if float(short) == limit else f"{limit:.1e}"
