"""How a layout is written: one line, or the same keys as a table. Read here, printed here.

    dp=2,tp=4:2d{form=loop},pp=3:list{layers=4/2/2;memory=2.5},zero=3/2,mb=3

Every value has the shape ``HEAD[:KIND][/NUMBER][{OPTION=...;OPTION=...}]``; ``offload`` alone is a list. Reading
checks the spelling only; whether words are known and sizes make sense is for ``Layout`` itself to say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING, Any

from shoal.errors import LayoutError, nearest, setting
from shoal.layout.kinds import SCHEDULES, Grid, Times, grid_text, tensor_grid

if TYPE_CHECKING:
    from shoal.layout.layout import Layout


@dataclass(frozen=True)
class Offload:
    """One thing that lives away from the device: ``fraction`` of ``what``, kept in ``where``."""

    what: str
    where: str
    fraction: float = 1.0

    def __str__(self) -> str:
        return f"{self.what}:{self.where}" + (f"@{self.fraction!r}" if self.fraction != 1 else "")


@dataclass(frozen=True)
class _Key:
    """How one key is written, and which field of ``Layout`` each part of its value fills."""

    form: str
    example: str
    head: str
    word: bool = False
    kind: str | None = None
    number: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """By name, in the order in which they are printed."""


_KEYS = {
    "dp": _Key("N", "dp=2", "dp"),
    "tp": _Key(
        "N[:1d|1d-sp|2d|2.5d[/D]|3d|AxBxC][{form=gather|loop}]",
        "tp=4:2d",
        "tp",
        kind="tp_kind",
        number="tp_grid",
        options={"form": "tp_form"},
    ),
    "pp": _Key(
        "N[:SCHEDULE[/V]][{layers=9/8/8/7;times=F/I/W/C;memory=M}]",
        "pp=2:1f1b",
        "pp",
        kind="schedule",
        number="chunks",
        options={"layers": "stage_layers", "times": "list_times", "memory": "list_memory"},
    ),
    "cp": _Key("N[:ring|ulysses|gather|UxR]", "cp=2:ring", "cp", kind="cp_kind"),
    "ep": _Key("N", "ep=2", "ep"),
    "etp": _Key("N", "etp=2", "etp"),
    "zero": _Key(
        "0|1|2|3[/G][{gather=int8;reduce=int8;keep=step}]",
        "zero=3/8",
        "zero",
        number="zero_group",
        options={"gather": "int8_gather", "reduce": "int8_reduce", "keep": "keep_params"},
    ),
    "sync": _Key(
        "allreduce|server[/N][{stale=S;reduce=mean|sum|max}]",
        "sync=server/2{stale=1}",
        "sync",
        word=True,
        number="servers",
        options={"stale": "stale", "reduce": "reduce"},
    ),
    "mb": _Key("N", "mb=4", "mb"),
    "recompute": _Key(
        "none|selective|full[{stages=0/1}]",
        "recompute=full{stages=0/1}",
        "recompute",
        word=True,
        options={"stages": "recompute_stages"},
    ),
    "offload": _Key("WHAT:WHERE[@F][+WHAT:WHERE...]", "offload=optimizer:cpu@0.5+params:nvme", "offload"),
    "dtype": _Key(
        "float64|float32|bf16[{grads=bf16}]|fp16[{grads=fp16}]",
        "dtype=float32",
        "dtype",
        word=True,
        options={"grads": "half_grads"},
    ),
    "auto": _Key("", "auto", "auto"),
}

_VALUE = re.compile(r"(?P<head>[^:/{};=]+)(:(?P<kind>[^:/{};=]+))?(/(?P<number>[^:/{};=]+))?(\{(?P<options>[^{}]+)\})?")
# Six digits: more than any cluster has ranks, few enough to search for the nearest legal size.
_WHOLE = re.compile(r"-?[0-9]{1,6}")
_DECIMAL = re.compile(r"([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(e-?[0-9]{1,3})?")
_SIDES = re.compile(r"[0-9]{1,6}(x[0-9]{1,6})+")
_OFFLOAD = re.compile(r"(?P<what>[^:@+]+):(?P<where>[^:@+]+)(@(?P<fraction>[0-9.e-]+))?")


def read_line(text: str, offered: Collection[str]) -> dict[str, Any]:
    """The fields of ``Layout`` that a line such as ``dp=2,tp=4:2d`` sets. Raises ``LayoutError``, in which an unknown
    key is told those that are ``offered``."""
    values: dict[str, str | None] = {}
    items = re.split(r",(?![^{]*\})", text)
    if any(given := [item.strip() for item in items]) and not all(given):
        legal = f"use {','.join(filter(None, given))}"
        raise LayoutError(setting("layout", text.strip(), "a comma stands between two keys", legal))
    beside = {key.strip(): value.strip() for key, _, value in (item.partition("=") for item in items)}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key in _KEYS and bool(equals) == (key == "auto"):
            example = _KEYS[key].example
            raise LayoutError(setting("layout", item.strip(), "is not of the form KEY=VALUE", f"use {example}"))
        _known_key(key, value, offered, beside)
        if key in values:
            kept = f"{key}={values[key]}" if equals else key
            raise LayoutError(setting(f"layout.{key}", value or key, "the key is given twice", f"keep one {kept}"))
        values[key] = value if equals else None
    return _read_values(values)


def read_table(table: Mapping[str, object], offered: Collection[str]) -> dict[str, Any]:
    """The fields of ``Layout`` that a ``[layout]`` table sets. Raises ``LayoutError``, as :func:`read_line` does."""
    values: dict[str, str | None] = {}
    for key, value in table.items():
        _known_key(key, str(value), offered, {one: str(text) for one, text in table.items()})
        if key == "auto":
            if not isinstance(value, bool):
                raise LayoutError(setting("layout.auto", value, "is not a truth value", "use true or false"))
            if value:
                values[key] = None
        elif isinstance(value, bool) or not isinstance(value, int | str):
            raise _malformed(key, value)
        else:
            values[key] = str(value).strip()
    return _read_values(values)


def _known_key(key: str, value: str, offered: Collection[str], beside: Mapping[str, str]) -> None:
    if key not in _KEYS:
        _known_option(key, value, beside)
        name, shown = (f"layout.{key}", value) if value else ("layout", key or "(nothing)")
        legal = [one for one in _KEYS if one in offered]
        problem = f"unknown key{nearest(key, legal)}"
        raise LayoutError(setting(name, shown, problem, f"use one of {', '.join(legal)}, as in dp=2,tp=4:2d"))


def _known_option(name: str, value: str, beside: Mapping[str, str]) -> None:
    """Say where an option belongs that is written as a key ``beside`` others."""
    owners = [key for key, spec in _KEYS.items() if name in spec.options]
    if not owners:
        return
    owner = next((key for key in owners if key in beside), owners[0])
    head, _, rest = beside.get(owner, _KEYS[owner].example.partition("=")[2].partition("{")[0]).partition("{")
    options = ";".join(filter(None, (rest.rstrip("}"), f"{name}={value}")))
    problem = f"is an option of {owner}, and stands in its braces"
    raise LayoutError(setting(f"layout.{name}", value, problem, f"use {owner}={head}{{{options}}}"))


def _read_values(values: Mapping[str, str | None]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if value is None:
            fields[key] = True
        elif key == "offload":
            fields[key] = tuple(_read_offload(item.strip(), value) for item in value.split("+"))
        else:
            fields |= _read_value(key, value)
    return fields


def _read_value(key: str, text: str) -> dict[str, Any]:
    spec, match = _KEYS[key], _VALUE.fullmatch(text)
    if match is None:
        raise _malformed(key, text)
    head, kind, number, options = match.group("head", "kind", "number", "options")
    if (kind is not None and spec.kind is None) or (
        number is not None and (spec.number is None or (spec.kind is not None and kind is None))
    ):
        raise _malformed(key, text)
    if key == "tp" and number is not None and kind != "2.5d":
        raise LayoutError(setting("layout.tp", text, "only 2.5d has a depth", f"use tp={head}:{kind}"))
    fields: dict[str, Any] = {spec.head: head if spec.word else _whole(head, key, text)}
    if spec.kind is not None and kind is not None:
        fields[spec.kind] = kind
        if key in ("tp", "cp") and _SIDES.fullmatch(kind):
            fields[spec.kind] = "AxBxC" if key == "tp" else "UxR"
            fields[f"{key}_grid"] = tuple(int(side) for side in kind.split("x"))
    if spec.number is not None and number is not None:
        amount = _positive(number, key, text)
        fields[spec.number] = _depth_grid(fields["tp"], amount) if key == "tp" else amount
    for part in options.split(";") if options is not None else ():
        name, equals, option = (word.strip() for word in part.partition("="))
        if not equals or not option or "=" in option or name not in spec.options:
            raise _malformed(key, text)
        if spec.options[name] in fields:
            raise LayoutError(setting(f"layout.{key}", text, f"{name} is given twice", f"keep one {name}={option}"))
        fields[spec.options[name]] = _read_option(name, option, key, text)
    return fields


def _read_option(name: str, option: str, key: str, text: str) -> str | int | float | Grid | Times:
    match name:
        case "form":
            return option
        case "reduce" if key == "sync":
            return option
        case "stale":
            return _whole(option, key, text)
        case "memory":
            return _decimal(option, key, text)
        case "times":
            return tuple(_decimal(part, key, text) for part in option.split("/"))
        case "grads" | "gather" | "reduce" | "keep":
            if option != {"grads": text.partition("{")[0], "keep": "step"}.get(name, "int8"):
                raise _malformed(key, text)
            return True
    return tuple(_whole(part, key, text) for part in option.split("/"))


def _read_offload(item: str, text: str) -> Offload:
    match = _OFFLOAD.fullmatch(item)
    if match is None:
        raise _malformed("offload", text)
    what, where, fraction = match.group("what", "where", "fraction")
    try:
        return Offload(what, where, float(fraction or 1))
    except ValueError:
        raise _malformed("offload", text) from None


def _depth_grid(size: int, depth: int) -> Grid:
    """(q, q, d) with the largest q that ``size`` has room for; ``Layout`` refuses it if that is not exact."""
    side = isqrt(max(size // depth, 1))
    return (side, side, depth)


def _whole(word: str, key: str, text: str) -> int:
    if not _WHOLE.fullmatch(word):
        problem = f"'{word}' is not a whole number of at most six digits"
        raise LayoutError(setting(f"layout.{key}", text, problem, f"use for example {_KEYS[key].example}"))
    return int(word)


def _decimal(word: str, key: str, text: str) -> float:
    if not _DECIMAL.fullmatch(word.strip()):
        legal = "use for example pp=4:list{times=10/12/9/1;memory=3.5}"
        raise LayoutError(setting(f"layout.{key}", text, f"'{word}' is not a number such as 12 or 3.5", legal))
    return float(word)


def _positive(word: str, key: str, text: str) -> int:
    number = _whole(word, key, text)
    if number < 1:
        least = "" if key == "tp" else "/1"  # a depth of 1 is not one of every size
        raise LayoutError(setting(f"layout.{key}", text, "sizes start at 1", f"use {key}={text.split('/')[0]}{least}"))
    return number


def _malformed(key: str, value: object) -> LayoutError:
    form, example = _KEYS[key].form, _KEYS[key].example
    return LayoutError(setting(f"layout.{key}", value, f"is not of the form {form}", f"use for example {example}"))


def line(layout: Layout) -> str:
    """The canonical line: keys in one order, defaults left out, ``dp=1`` for the default layout."""
    return ",".join(key if value is True else f"{key}={value}" for key, value in table(layout).items()) or "dp=1"


def table(layout: Layout) -> dict[str, str | bool]:
    """The keys and values of the canonical line, as they stand in a run file."""
    default = type(layout)()
    values = {key: value_text(layout, key) for key in _KEYS if key != "auto"}
    items: dict[str, str | bool] = {key: value for key, value in values.items() if value != value_text(default, key)}
    return {**items, "auto": True} if layout.auto else items


def value_text(layout: Layout, key: str) -> str:
    """The value of ``key`` as it is written in a line; also of a layout that is about to be refused."""
    if key == "tp":
        return tensor_text(layout.tp, layout.tp_kind, layout.tp_grid, layout.tp_form)
    if key == "pp":
        return pipeline_text(
            layout.pp, layout.schedule, layout.chunks, layout.stage_layers, layout.list_times, layout.list_memory
        )
    if key == "cp":
        return context_text(layout.cp, layout.cp_kind, layout.cp_grid)
    if key == "zero":
        return zero_text(layout.zero, layout.zero_group, layout.int8_gather, layout.int8_reduce, layout.keep_params)
    if key == "sync":
        default = 1 if layout.sync == "server" else None
        servers = f"/{layout.servers}" if layout.servers not in (None, default) else ""
        options = {"stale": layout.stale or None, "reduce": layout.reduce if layout.reduce != "mean" else None}
        given = ";".join(f"{name}={value}" for name, value in options.items() if value is not None)
        return layout.sync + servers + (f"{{{given}}}" if given else "")
    if key == "recompute":
        return layout.recompute + _braced(stages=layout.recompute_stages)
    if key == "dtype":
        return layout.dtype + (f"{{grads={layout.dtype}}}" if layout.half_grads else "")
    if key == "offload":
        return "+".join(map(str, layout.offload))
    if key == "auto":
        return str(layout.auto).lower()
    return str(getattr(layout, key))


def tensor_text(size: int, kind: str, grid: Grid, form: str = "gather") -> str:
    """``4:2d``, ``8:2.5d/2{form=loop}``, ``8:4x1x2``: a depth is written where it is not the default one."""
    if kind == "AxBxC":
        kind = grid_text(grid) or kind
    elif kind == "2.5d" and len(grid) == 3 and grid != tensor_grid(size, kind):
        kind = f"{kind}/{grid[2]}"
    return str(size) + (f":{kind}" if kind != "1d" else "") + (f"{{form={form}}}" if form != "gather" else "")


def context_text(size: int, kind: str, grid: Grid) -> str:
    """``2`` for a ring, ``4:ulysses``, ``4:2x2``."""
    if kind == "UxR":
        kind = grid_text(grid) or kind
    return str(size) + (f":{kind}" if kind != "ring" else "")


def zero_text(stage: int, group: int | None, gather: bool = False, reduce: bool = False, keep: bool = False) -> str:
    """``1``, ``3/8``, ``3{gather=int8;keep=step}``."""
    options = ["gather=int8"] * gather + ["reduce=int8"] * reduce + ["keep=step"] * keep
    return str(stage) + (f"/{group}" if group is not None else "") + (f"{{{';'.join(options)}}}" if options else "")


def pipeline_text(
    size: int,
    schedule: str,
    chunks: int,
    layers: Grid | None = None,
    times: Times | None = None,
    memory: float | None = None,
) -> str:
    """``2`` for 1F1B, ``4:interleaved/3``, ``2:list{layers=3/1;memory=1.5}``: V is written where it is not the
    schedule's own."""
    own = schedule in SCHEDULES and SCHEDULES[schedule].chunks
    stages = f"/{chunks}" if chunks not in (0, own) else ""
    kind = f":{schedule}{stages}" if schedule != "1f1b" or stages else ""
    return f"{size}{kind}{_braced(layers=layers, times=times, memory=None if memory is None else (memory,))}"


def _braced(**options: Times | None) -> str:
    """``{layers=4/2;memory=2.5}`` of those that are given; without any, nothing."""
    given = [f"{name}={'/'.join(map(_number, each))}" for name, each in options.items() if each is not None]
    return f"{{{';'.join(given)}}}" if given else ""


def _number(number: float) -> str:
    """As few characters as read back as the same."""
    return str(int(number)) if float(number).is_integer() else repr(number)
