"""What is wrong with a run file, in words: the setting, its value and what is legal."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from shoal.errors import nearest, setting


def explain(fault: Any, model: type[BaseModel]) -> str:
    """One line for one of pydantic's faults in a ``model``: the dotted setting, its value, what is wrong or legal."""
    place = [str(part) for part in fault["loc"] if not str(part).startswith(("function-", "constrained-", "literal["))]
    name = ".".join(place)
    if fault["type"] == "extra_forbidden":
        known = _fields(model, place[:-1])
        return f"{name}: unknown key{nearest(place[-1], known)}; known here: {', '.join(sorted(known))}"
    if fault["type"] == "missing" and isinstance(fault["loc"][-1], str):
        return f"{name}: missing; the run file must set it"
    if fault["type"] == "value_error":
        return f"{name}.{fault['ctx']['error']}".lstrip(".")
    if place[0] == "layout" and len(place) > 1:
        legal = 'use one of them, as in dp = 2 or tp = "4:2d"'
        return setting(".".join(place[:2]), fault["input"], "is neither a whole number nor text", legal)
    choices = re.findall("'([^']*)'", fault["ctx"]["expected"]) if fault["type"] == "literal_error" else []
    problem = fault["msg"][0].lower() + fault["msg"][1:] + nearest(str(fault["input"]), choices)
    return setting(
        name, fault["input"], problem, _legal(model, [part for part in place if not part.isdigit()], choices)
    )


def _legal(model: type[BaseModel], place: Sequence[str], choices: Sequence[str]) -> str:
    """What the setting at ``place`` can be, which may be one of some ``choices``."""
    field = _fields(model, place[:-1])[place[-1]]
    if field.is_required():
        number = "8" if field.annotation in (int, float) else ""
        return f"use {number or choices[0]}" if number or choices else f"it is a {field.description or 'section'}"
    if field.default_factory is not None or field.default in (None, ()) or isinstance(field.default, BaseModel):
        return "leave it out"
    return f"its default is {json.dumps(field.default, default=str)}"


def _fields(model: Any, place: Sequence[str]) -> dict[str, Any]:
    for part in place:
        if not part.isdigit():  # a place in a list of sections
            kind = model.model_fields[part].annotation
            model = next((one for one in get_args(kind) if hasattr(one, "model_fields")), kind)
    return dict(model.model_fields)
